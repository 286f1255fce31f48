//! Files that are made, opened and changed.

use super::*;

#[test]
fn devices_are_not_made_and_what_is_no_file_is_not_opened() {
    let rig = rig();
    for kind in [libc::S_IFBLK, libc::S_IFCHR] {
        let made = rig.tree.mknod(&me(), ROOT, c"dev", kind | 0o666, 0x103, 0);
        assert_eq!(code(made), Some(Errno::PERM));
        assert!(!rig.path("dev").exists());
    }
    for (text, kind) in [("pipe", libc::S_IFIFO), ("socket", libc::S_IFSOCK)] {
        let entry = rig
            .tree
            .mknod(&me(), ROOT, &name(text), kind | 0o600, 0, 0)
            .unwrap();
        assert_eq!(entry.attr.st_mode, kind | 0o600);
        for flags in [0, 1, 2, libc::O_PATH.cast_unsigned()] {
            let opened = rig.tree.open(&me(), entry.inode, flags, 0);
            assert_eq!(code(opened), Some(Errno::NXIO));
        }
        let create = rig
            .tree
            .create(&me(), ROOT, &name(text), creation(libc::O_RDWR, 0o644));
        assert_eq!(code(create), Some(Errno::STALE));
        let list = rig.tree.listxattr(&me(), entry.inode, 0).map(drop);
        assert_eq!(code(list), Some(Errno::OPNOTSUPP));
    }
}

#[test]
fn flags_that_are_not_the_clients_affair_have_no_effect() {
    let rig = rig();
    std::fs::write(rig.path("file"), "text").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let odd = libc::O_PATH | libc::O_DIRECT | libc::O_ASYNC | libc::O_TMPFILE | libc::O_CREAT;
    let handle = rig
        .tree
        .open(&me(), object, odd.cast_unsigned(), 0)
        .unwrap()
        .0
        .unwrap();
    let flags = rustix::fs::fcntl_getfl(&*file(&rig.tree.handle(handle, object).unwrap())).unwrap();
    let large_file = OFlags::from_bits_retain(0o100_000);
    assert_eq!(flags - large_file, OFlags::RDONLY);
    assert_eq!(code(rig.tree.open(&me(), object, 3, 0)), Some(Errno::INVAL));
    assert_eq!(code(rig.tree.open(&me(), ROOT, 0, 0)), Some(Errno::ISDIR));
    assert_eq!(
        code(rig.tree.opendir(&me(), object, 0)),
        Some(Errno::NOTDIR)
    );
}

#[test]
fn files_are_made_with_the_mode_that_the_guest_asks_for() {
    let rig = rig();
    let (context, tree) = (me(), &rig.tree);
    let (entry, handle, ..) = tree
        .create(&context, ROOT, c"file", creation(libc::O_RDWR, 0o10_0666))
        .unwrap();
    assert!(handle.is_some());
    assert_eq!(entry.attr.st_mode, 0o10_0666);
    tree.mkdir(&context, ROOT, c"dir", 0o777, 0o022).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&rig.path("file")), 0o666);
    assert_eq!(mode(&rig.path("dir")), 0o755);
    // Once more: who did not ask for a new one is to look again.
    let again = creation(libc::O_RDWR, 0o600);
    let again = tree.create(&context, ROOT, c"file", again);
    assert_eq!(code(again), Some(Errno::STALE));
    let new = creation(libc::O_RDWR | libc::O_EXCL, 0o600);
    assert_eq!(
        code(tree.create(&context, ROOT, c"file", new)),
        Some(Errno::EXIST)
    );
}

#[test]
fn attributes_are_set_and_read_back() {
    let rig = rig();
    std::fs::write(rig.path("file"), "some text").unwrap();
    symlink("file", rig.path("link")).unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let mut wanted = libc_stat();
    wanted.st_mode = 0o640;
    wanted.st_size = 4;
    wanted.st_atime = 1_000_000_000;
    wanted.st_mtime = -5;
    wanted.st_mtime_nsec = 7;
    let valid = SetattrValid::MODE | SetattrValid::SIZE | SetattrValid::ATIME | SetattrValid::MTIME;
    let (stat, keep) = rig
        .tree
        .setattr(&me(), object, wanted, None, valid)
        .unwrap();
    assert!(keep < Duration::from_secs(1));
    assert_eq!(stat.st_mode, 0o10_0640);
    assert_eq!((stat.st_size, stat.st_atime), (4, 1_000_000_000));
    assert_eq!((stat.st_mtime, stat.st_mtime_nsec), (-5, 7));
    assert_eq!(std::fs::read(rig.path("file")).unwrap(), b"some");
    // Of the link itself, not of what it points to.
    let link = rig.look_up(ROOT, "link").unwrap().inode;
    let (stat, _) = rig
        .tree
        .setattr(&me(), link, wanted, None, SetattrValid::MTIME)
        .unwrap();
    assert_eq!(
        (stat.st_mode & libc::S_IFMT, stat.st_mtime),
        (libc::S_IFLNK, -5)
    );
    wanted.st_size = -1;
    let size = rig
        .tree
        .setattr(&me(), object, wanted, None, SetattrValid::SIZE);
    assert_eq!(code(size), Some(Errno::INVAL));
    let mode = rig
        .tree
        .setattr(&me(), ROOT, wanted, None, SetattrValid::SIZE);
    assert_eq!(code(mode), Some(Errno::INVAL));
}

#[test]
fn files_without_a_size_are_read_past_the_clients_cache_and_never_waited_for() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let ordinary = dir.path().join("file");
    std::fs::write(&ordinary, "").unwrap();
    let root: OwnedFd = File::open("/").unwrap().into();
    let tree = Tree::new(&root, Access::ReadWrite, Quota::own(100), None).unwrap();
    tree.prepare_thread().unwrap();
    let generated = [
        "/proc/version",
        "/sys/kernel/uevent_seqnum",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/cgroup/unified/cgroup.procs",
        "/sys/fs/cgroup/memory/cgroup.procs",
        "/sys/kernel/tracing/available_tracers",
        "/sys/kernel/security/lsm",
    ];
    for path in generated.map(Path::new).iter().chain([&&*ordinary]) {
        // Not every host has all of them.
        if !path.exists() && !path.starts_with("/proc") {
            continue;
        }
        let mut object = ROOT;
        for part in path.iter().skip(1) {
            let part = name(part.to_str().unwrap());
            object = tree.lookup(&me(), object, &part).unwrap().inode;
        }
        let (handle, opened, _) = tree.open(&me(), object, 0, 0).unwrap();
        let waits = |handle: Option<u64>| {
            let handle = tree.handle(handle.unwrap(), object).unwrap();
            let flags = rustix::fs::fcntl_getfl(&*file(&handle)).unwrap();
            !flags.contains(OFlags::NONBLOCK)
        };
        let direct = **path != *ordinary;
        assert_eq!(opened.contains(OpenOptions::DIRECT_IO), direct, "{path:?}");
        assert_eq!(waits(handle), !direct, "{path:?}");
        // Some are read-only.
        if let Ok((handle, ..)) = tree.open(&me(), object, 1, 0) {
            assert!(waits(handle), "{path:?}");
        }
    }
}
