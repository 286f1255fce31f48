//! Names, links and the objects behind them.

use super::*;

#[test]
fn names_that_lead_out_of_their_directory_do_not_exist() {
    let rig = rig();
    std::fs::create_dir(rig.path("a")).unwrap();
    let a = rig.look_up(ROOT, "a").unwrap().inode;
    let context = me();
    for parent in [ROOT, a] {
        for bad in ["", ".", "..", "/", "/etc", "a/..", "../x", "b/"] {
            let bad = name(bad);
            let invalid = Some(Errno::INVAL);
            let tree = &rig.tree;
            assert_eq!(
                code(tree.lookup(&context, parent, &bad)),
                invalid,
                "{bad:?}"
            );
            assert_eq!(code(tree.mkdir(&context, parent, &bad, 0o755, 0)), invalid);
            assert_eq!(
                code(tree.mknod(&context, parent, &bad, 0o10_0644, 0, 0)),
                invalid
            );
            assert_eq!(code(tree.symlink(&context, c"x", parent, &bad)), invalid);
            assert_eq!(code(tree.link(&context, a, parent, &bad)), invalid);
            assert_eq!(code(tree.unlink(&context, parent, &bad)), invalid);
            assert_eq!(code(tree.rmdir(&context, parent, &bad)), invalid);
            assert_eq!(
                code(tree.rename(&context, parent, &bad, ROOT, c"x", 0)),
                invalid
            );
            assert_eq!(
                code(tree.rename(&context, ROOT, c"a", parent, &bad, 0)),
                invalid
            );
            let create = tree.create(&context, parent, &bad, creation(libc::O_RDWR, 0o644));
            assert_eq!(code(create), invalid);
        }
    }
    assert!(rig.path("a").is_dir());
}

#[test]
fn links_are_given_to_the_guest_and_never_followed() {
    let rig = rig();
    symlink("/etc", rig.path("absolute")).unwrap();
    symlink("../..", rig.path("up")).unwrap();
    symlink("/etc/passwd", rig.path("file")).unwrap();
    for (link, target) in [
        ("absolute", "/etc"),
        ("up", "../.."),
        ("file", "/etc/passwd"),
    ] {
        let entry = rig.look_up(ROOT, link).unwrap();
        assert_eq!(entry.attr.st_mode & libc::S_IFMT, libc::S_IFLNK);
        assert_eq!(
            rig.tree.readlink(&me(), entry.inode).unwrap(),
            target.as_bytes()
        );
        assert!(rig.look_up(entry.inode, "passwd").is_err());
        assert!(rig.tree.open(&me(), entry.inode, 0, 0).is_err());
        assert!(rig.tree.opendir(&me(), entry.inode, 0).is_err());
        let create = rig
            .tree
            .create(&me(), ROOT, &name(link), creation(libc::O_RDWR, 0o644));
        assert!(create.is_err());
    }
    // A directory that becomes a link between two requests.
    std::fs::create_dir(rig.path("dir")).unwrap();
    let dir = rig.look_up(ROOT, "dir").unwrap().inode;
    std::fs::rename(rig.path("dir"), rig.path("moved")).unwrap();
    symlink("/etc", rig.path("dir")).unwrap();
    assert_eq!(code(rig.look_up(dir, "passwd")), Some(Errno::NOENT));
}

#[test]
fn that_there_is_nothing_may_be_kept_as_long_as_a_name() {
    let rig = rig();
    let nothing = rig.tree.lookup(&me(), ROOT, &name("later")).unwrap();
    assert_eq!((nothing.inode, nothing.entry_timeout), (0, CACHE_TIMEOUT));
    assert!(CACHE_TIMEOUT < std::time::Duration::from_secs(1));
    std::fs::write(rig.path("later"), "x").unwrap();
    let there = rig.tree.lookup(&me(), ROOT, &name("later")).unwrap();
    assert_ne!(there.inode, 0);
    assert_eq!(there.entry_timeout, CACHE_TIMEOUT);
}

#[test]
fn names_of_more_than_many_objects_are_not_kept() {
    // More than half of the quota are many.
    let rig = rig_with(Access::ReadWrite, 8);
    for n in 0..6 {
        std::fs::write(rig.path(&n.to_string()), "x").unwrap();
    }
    let look_up = |n: u64| rig.look_up(ROOT, &n.to_string()).unwrap();
    let entries: Vec<_> = (0..6).map(look_up).collect();
    let timeouts: Vec<_> = entries.iter().map(|entry| entry.entry_timeout).collect();
    let none = Duration::ZERO;
    assert_eq!(
        timeouts,
        [
            CACHE_TIMEOUT,
            CACHE_TIMEOUT,
            CACHE_TIMEOUT,
            CACHE_TIMEOUT,
            none,
            none
        ]
    );
    assert_eq!(look_up(0).entry_timeout, none, "one that is known already");
    let attributes = entries.iter().map(|entry| entry.attr_timeout);
    assert!(
        attributes
            .into_iter()
            .all(|timeout| timeout == CACHE_TIMEOUT)
    );
    let made = rig.tree.mkdir(&me(), ROOT, &name("made"), 0o755, 0);
    assert_eq!(made.unwrap().entry_timeout, none);
    // Nothing is looked up that would be forgotten immediately.
    let listed = rig.list(ROOT, true);
    assert_eq!(listed.len(), 9);
    assert!(listed.iter().all(|(_, number)| *number == 0));
    rig.tree.forget(&me(), entries[4].inode, 1);
    assert_eq!(look_up(5).entry_timeout, none);
    rig.tree.forget(&me(), entries[5].inode, 2);
    assert_eq!(look_up(4).entry_timeout, none);
    rig.tree.forget(&me(), entries[0].inode, 2);
    assert_eq!(look_up(4).entry_timeout, none);
    rig.tree.forget(&me(), entries[1].inode, 1);
    assert_eq!(look_up(4).entry_timeout, CACHE_TIMEOUT);
}

#[test]
fn what_the_host_removed_is_counted_while_the_client_knows_it_and_has_it_not_open() {
    let rig = rig();
    std::fs::create_dir(rig.path("dir")).unwrap();
    for file in ["read", "open", "two names"] {
        std::fs::write(rig.path(file), "x").unwrap();
    }
    std::fs::hard_link(rig.path("two names"), rig.path("other")).unwrap();
    let number = |name: &str| rig.look_up(ROOT, name).unwrap().inode;
    let [dir, read, open, _] = ["dir", "read", "open", "two names"].map(number);
    let flags = libc::O_RDONLY.cast_unsigned();
    let (handle, ..) = rig.tree.open(&me(), open, flags, 0).unwrap();
    assert_eq!(rig.tree.nameless(), 0);
    std::fs::remove_dir(rig.path("dir")).unwrap();
    for file in ["read", "open", "two names"] {
        std::fs::remove_file(rig.path(file)).unwrap();
    }
    assert_eq!(rig.tree.nameless(), 2);
    let closed = rig
        .tree
        .release(&me(), open, 0, handle.unwrap(), false, false, None);
    closed.unwrap();
    assert_eq!(rig.tree.nameless(), 3);
    for number in [dir, read, open] {
        rig.tree.forget(&me(), number, 1);
    }
    assert_eq!(rig.tree.nameless(), 0);
}

#[test]
fn objects_that_were_not_looked_up_and_handles_of_others_do_not_exist() {
    let rig = rig();
    std::fs::write(rig.path("a"), "a").unwrap();
    std::fs::write(rig.path("b"), "b").unwrap();
    let [a, b] = ["a", "b"].map(|text| rig.look_up(ROOT, text).unwrap().inode);
    let handle = rig.tree.open(&me(), a, 2, 0).unwrap().0.unwrap();
    let stat = libc_stat();
    for (object, handle) in [(b, handle), (ROOT, handle), (a, handle + 1), (99, handle)] {
        let tree = &rig.tree;
        assert!(tree.getattr(&me(), object, Some(handle)).is_err());
        assert!(tree.fsync(&me(), object, false, handle).is_err());
        assert!(tree.fallocate(&me(), object, handle, 0, 0, 10).is_err());
        assert!(tree.lseek(&me(), object, handle, 0, 3).is_err());
        assert!(
            tree.release(&me(), object, 0, handle, false, false, None)
                .is_err()
        );
        let size = tree.setattr(&me(), object, stat, Some(handle), SetattrValid::SIZE);
        assert!(size.is_err());
    }
    assert!(rig.tree.getattr(&me(), 99, None).is_err());
    rig.tree.forget(&me(), a, 1);
    assert_eq!(code(rig.tree.getattr(&me(), a, None)), Some(Errno::STALE));
    assert_eq!(std::fs::read(rig.path("a")).unwrap(), b"a");
}

#[test]
fn a_client_that_keeps_everything_open_meets_a_limit_and_goes_on_after_it() {
    let rig = rig_with(Access::ReadWrite, 10);
    for n in 0..30 {
        std::fs::write(rig.path(&format!("file{n}")), "").unwrap();
    }
    let mut known = Vec::new();
    for n in 0..30 {
        match rig.look_up(ROOT, &format!("file{n}")) {
            Ok(entry) => known.push(entry.inode),
            Err(error) => assert_eq!(Errno::from_io_error(&error), Some(Errno::NFILE)),
        }
    }
    assert_eq!(known.len(), 10);
    assert_eq!(
        code(rig.tree.open(&me(), known[0], 0, 0)),
        Some(Errno::NFILE)
    );
    let create = rig
        .tree
        .create(&me(), ROOT, c"new", creation(libc::O_RDWR, 0o644));
    assert_eq!(code(create), Some(Errno::NFILE));
    assert!(!rig.path("new").exists());
    // Names are still listed.
    let (handle, _) = {
        rig.tree.forget(&me(), known[9], 1);
        rig.tree.opendir(&me(), ROOT, 0).unwrap()
    };
    let mut seen = 0;
    rig.tree
        .entries(
            &me(),
            (ROOT, handle.unwrap()),
            (4096, 0),
            true,
            &mut |_, _| {
                seen += 1;
                Ok(10)
            },
        )
        .unwrap();
    assert_eq!(seen, 32);
    rig.tree.init(FsOptions::all()).unwrap();
    assert_eq!(rig.tree.counters.objects.load(Ordering::Relaxed), 0);
    assert!(rig.look_up(ROOT, "file29").is_ok());
}

#[test]
fn names_of_objects_change_on_the_host_and_the_client_sees_the_new_ones() {
    let rig = rig();
    std::fs::create_dir(rig.path("v1")).unwrap();
    std::fs::write(rig.path("v1/key"), "one").unwrap();
    std::fs::create_dir(rig.path("v2")).unwrap();
    std::fs::write(rig.path("v2/key"), "two").unwrap();
    symlink("v1", rig.path("..data")).unwrap();
    let read = |rig: &Rig| {
        let link = rig.look_up(ROOT, "..data").unwrap();
        assert!(link.entry_timeout < Duration::from_secs(1));
        let target = rig.tree.readlink(&me(), link.inode).unwrap();
        let dir = rig
            .look_up(ROOT, std::str::from_utf8(&target).unwrap())
            .unwrap();
        rig.look_up(dir.inode, "key").unwrap().attr.st_ino
    };
    let before = read(&rig);
    symlink("v2", rig.path("..new")).unwrap();
    std::fs::rename(rig.path("..new"), rig.path("..data")).unwrap();
    assert_ne!(read(&rig), before);
    assert_eq!(read(&rig), rig.path("v2/key").metadata().unwrap().ino());
}

#[test]
fn links_and_renames_keep_the_object() {
    let rig = rig();
    std::fs::write(rig.path("a"), "text").unwrap();
    std::fs::write(rig.path("b"), "other").unwrap();
    let a = rig.look_up(ROOT, "a").unwrap().inode;
    let linked = rig.tree.link(&me(), a, ROOT, c"hard").unwrap();
    assert_eq!((linked.inode, linked.attr.st_nlink), (a, 2));
    let keep = libc::RENAME_NOREPLACE;
    let refused = rig.tree.rename(&me(), ROOT, c"a", ROOT, c"b", keep);
    assert_eq!(code(refused), Some(Errno::EXIST));
    rig.tree.rename(&me(), ROOT, c"a", ROOT, c"b", 0).unwrap();
    assert_eq!(rig.look_up(ROOT, "b").unwrap().inode, a);
    assert!(!rig.path("a").exists());
    // The object outlives its names.
    rig.tree.unlink(&me(), ROOT, c"b").unwrap();
    rig.tree.unlink(&me(), ROOT, c"hard").unwrap();
    assert_eq!(rig.tree.getattr(&me(), a, None).unwrap().0.st_nlink, 0);
    symlink("nowhere", rig.path("link")).unwrap();
    let link = rig.look_up(ROOT, "link").unwrap().inode;
    let linked = rig.tree.link(&me(), link, ROOT, c"link2").unwrap();
    assert_eq!(linked.inode, link);
}
