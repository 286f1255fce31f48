use super::*;
use fuse_backend_rs::abi::fuse_abi::CreateIn;
use fuse_backend_rs::api::filesystem::{
    DirEntry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, SetattrValid,
};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;
use std::ffi::CString;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

#[path = "access_tests.rs"]
mod access_tests;
#[path = "client_tests.rs"]
mod client_tests;
#[path = "credentials_tests.rs"]
mod credentials_tests;
#[path = "ids_tests.rs"]
mod ids_tests;
#[path = "overlay_tests.rs"]
mod overlay_tests;
#[path = "parts_tests.rs"]
mod parts_tests;

struct Rig {
    dir: tempfile::TempDir,
    tree: Tree,
}

const ROOT: u64 = table::ROOT;

fn rig_with(access: Access, limit: usize) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let root: OwnedFd = File::open(dir.path()).unwrap().into();
    let tree = Tree::new(&root, access, Quota::own(limit), None).unwrap();
    tree.prepare_thread().unwrap();
    Rig { dir, tree }
}

fn rig() -> Rig {
    rig_with(Access::ReadWrite, 1000)
}

fn me() -> Context {
    Context {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 1,
    }
}

fn name(name: &str) -> CString {
    CString::new(name).unwrap()
}

fn code<T>(result: io::Result<T>) -> Option<Errno> {
    result
        .err()
        .map(|error| Errno::from_io_error(&error).unwrap())
}

fn creation(flags: i32, mode: u32) -> CreateIn {
    CreateIn {
        flags: flags.cast_unsigned(),
        mode,
        umask: 0,
        fuse_flags: 0,
    }
}

impl Rig {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn look_up(&self, parent: u64, text: &str) -> io::Result<Entry> {
        let entry = self.tree.lookup(&me(), parent, &name(text))?;
        // Number 0 means that there is no such object.
        if entry.inode == 0 {
            return Err(Errno::NOENT.into());
        }
        Ok(entry)
    }

    fn list(&self, object: u64, plus: bool) -> Vec<(String, u64)> {
        self.list_by(object, plus, 4096)
    }

    /// For a client that has `size` bytes for each reply.
    fn list_by(&self, object: u64, plus: bool, size: u32) -> Vec<(String, u64)> {
        let (handle, _) = self.tree.opendir(&me(), object, 0).unwrap();
        let mut names = Vec::new();
        let mut offset = 0;
        loop {
            let before = names.len();
            // Three at a time.
            self.tree
                .entries(
                    &me(),
                    (object, handle.unwrap()),
                    (size, offset),
                    plus,
                    &mut |listed, entry| {
                        if names.len() == before + 3 {
                            return Ok(0);
                        }
                        offset = listed.offset;
                        let name = String::from_utf8(listed.name.to_vec()).unwrap();
                        names.push((name, entry.map_or(0, |entry| entry.inode)));
                        Ok(100)
                    },
                )
                .unwrap();
            if names.len() == before {
                break;
            }
        }
        self.tree
            .releasedir(&me(), object, 0, handle.unwrap())
            .unwrap();
        names.sort();
        names
    }
}

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

fn libc_stat() -> libc::stat64 {
    fuse_backend_rs::abi::fuse_abi::Attr::default().into()
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
fn directories_are_listed_whole_in_parts_and_told_of_only_where_asked() {
    let rig = rig();
    for n in 0..20 {
        std::fs::write(rig.path(&format!("file{n}")), "").unwrap();
    }
    let plain = rig.list(ROOT, false);
    assert_eq!(plain.len(), 22);
    for size in [0, 512, 1 << 20, u32::MAX] {
        assert_eq!(rig.list_by(ROOT, false, size), plain);
    }
    assert!(plain.iter().all(|(_, number)| *number == 0));
    assert_eq!(rig.tree.table().objects(), 0);
    let told = rig.list(ROOT, true);
    let names = |list: &[(String, u64)]| list.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    assert_eq!(names(&plain), names(&told));
    for (name, number) in &told {
        assert_eq!(*number == 0, name == "." || name == "..", "{name}");
    }
    // Those that did not fit were forgotten again.
    for (_, number) in told {
        rig.tree.forget(&me(), number, 1);
    }
    assert_eq!(rig.tree.table().objects(), 0);
}

#[test]
fn of_a_directory_hardly_more_is_read_than_fits_into_the_reply() {
    let rig = rig();
    for n in 0..400 {
        std::fs::write(rig.path(&format!("file{n:03}")), "").unwrap();
    }
    let (handle, _) = rig.tree.opendir(&me(), ROOT, 0).unwrap();
    let handle = handle.unwrap();
    // As Linux asks: for a page, of which an entry takes 32 bytes, or 160 with its object.
    for (plus, len, most) in [(false, 32, 140), (true, 160, 40)] {
        let mut room = 4096;
        let mut add = |_: DirEntry<'_>, _| {
            let fits = if room >= len { len } else { 0 };
            room -= fits;
            Ok(fits)
        };
        let of = (ROOT, handle);
        let tree = &rig.tree;
        tree.entries(&me(), of, (4096, 0), plus, &mut add).unwrap();
        let handle = tree.handle(handle, ROOT).unwrap();
        let directory = file(&handle);
        // What the host would read next.
        let mut buffer = vec![std::mem::MaybeUninit::uninit(); 64 << 10];
        let mut rest = rustix::fs::RawDir::new(&*directory, &mut buffer);
        let mut unread = 0;
        while rest.next().is_some() {
            unread += 1;
        }
        assert!(402 - unread <= most, "{} with {plus}", 402 - unread);
    }
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
fn attributes_that_mean_something_to_the_host_do_not_exist() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    for reserved in [
        "security.selinux",
        "security.capability.x",
        "security.ima",
        "system.posix_acl_access",
        "trusted",
        "podvisor.trusted.a",
    ] {
        let attribute = name(reserved);
        let refused = Some(Errno::OPNOTSUPP);
        assert_eq!(
            code(rig.tree.setxattr(&me(), object, &attribute, b"1", 0)),
            refused
        );
        assert_eq!(
            code(rig.tree.getxattr(&me(), object, &attribute, 10).map(drop)),
            refused
        );
        assert_eq!(
            code(rig.tree.removexattr(&me(), object, &attribute)),
            refused
        );
    }
    let flags = rig.tree.setxattr(&me(), object, c"user.a", b"1", 0xff);
    assert_eq!(code(flags), Some(Errno::INVAL));
}

/// The names of an object's attributes on the host, in order.
fn names_on_host(path: &Path) -> Vec<String> {
    let mut list = vec![0; 4096];
    let len = rustix::fs::listxattr(path, &mut *list).unwrap();
    let names = list[..len].split(|byte| *byte == 0);
    let names = names.map(|name| String::from_utf8(name.to_vec()).unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("user.")).collect();
    names.sort();
    names
}

#[test]
fn attributes_of_the_guests_root_are_users_attributes_on_the_host() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    std::fs::create_dir(rig.path("dir")).unwrap();
    let tree = &rig.tree;
    let all = [
        "security.capability",
        "trusted.overlay.opaque",
        "user.a",
        "user.podvisor.trusted.b",
    ];
    for path in ["file", "dir"] {
        let object = rig.look_up(ROOT, path).unwrap().inode;
        for attribute in all {
            let value = attribute.as_bytes();
            tree.setxattr(&me(), object, &name(attribute), value, 0)
                .unwrap();
        }
        let on_host = [
            "user.a",
            "user.podvisor.security.capability",
            "user.podvisor.trusted.overlay.opaque",
            "user.podvisor.user.podvisor.trusted.b",
        ];
        assert_eq!(names_on_host(&rig.path(path)), on_host);
        // Names on the host that no client has set are not shown.
        let flags = rustix::fs::XattrFlags::empty();
        for stray in ["user.podvisor.system.x", "user.podvisor.user.x"] {
            rustix::fs::setxattr(rig.path(path), stray, b"", flags).unwrap();
        }
        let ListxattrReply::Names(list) = tree.listxattr(&me(), object, 1000).unwrap() else {
            panic!("no names");
        };
        let list = String::from_utf8(list).unwrap();
        let mut list: Vec<_> = list.split_terminator('\0').collect();
        list.sort_unstable();
        assert_eq!(list, all);
        for attribute in all {
            let value = tree.getxattr(&me(), object, &name(attribute), 100);
            let GetxattrReply::Value(value) = value.unwrap() else {
                panic!("no value");
            };
            assert_eq!(value, attribute.as_bytes());
        }
        // The client cannot read or create it by its name on the host.
        let hidden = c"user.podvisor.security.capability";
        let found = tree.getxattr(&me(), object, hidden, 100).map(drop);
        assert_eq!(code(found), Some(Errno::NODATA));
        for attribute in all {
            tree.removexattr(&me(), object, &name(attribute)).unwrap();
        }
        let strays = ["user.podvisor.system.x", "user.podvisor.user.x"];
        assert_eq!(names_on_host(&rig.path(path)), strays);
        let long = name(&format!("trusted.{}", "a".repeat(255 - 8)));
        let refused = tree.setxattr(&me(), object, &long, b"", 0);
        assert_eq!(code(refused), Some(Errno::RANGE));
    }
    symlink("file", rig.path("link")).unwrap();
    let link = rig.look_up(ROOT, "link").unwrap().inode;
    let refused = tree.setxattr(&me(), link, c"trusted.a", b"", 0);
    assert_eq!(code(refused), Some(Errno::OPNOTSUPP));
}

#[test]
fn of_an_attribute_the_client_gets_the_length_the_value_or_that_it_has_no_room() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    rig.tree
        .setxattr(&me(), object, c"user.a", b"value", 0)
        .unwrap();
    for (size, value) in [
        (0, Ok(None)),
        (1, Err(Errno::RANGE)),
        (4, Err(Errno::RANGE)),
        (5, Ok(Some(b"value".to_vec()))),
        (u32::MAX, Ok(Some(b"value".to_vec()))),
    ] {
        let got = rig.tree.getxattr(&me(), object, c"user.a", size);
        let got = got.map(|reply| match reply {
            GetxattrReply::Count(count) => {
                assert_eq!(count, 5);
                None
            }
            GetxattrReply::Value(value) => Some(value),
        });
        let got = got.map_err(|error| Errno::from_io_error(&error).unwrap());
        assert_eq!(got, value, "{size}");
    }
    let missing = rig.tree.getxattr(&me(), object, c"user.b", 0).map(drop);
    assert_eq!(code(missing), Some(Errno::NODATA));
}

#[test]
fn a_program_that_is_emptied_loses_its_capabilities() {
    let rig = rig();
    std::fs::write(rig.path("file"), "text").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let capability = c"security.capability";
    let tree = &rig.tree;
    let lost = || code(tree.getxattr(&me(), object, capability, 0).map(drop));
    let write = libc::O_WRONLY.cast_unsigned();
    let truncate = write | libc::O_TRUNC.cast_unsigned();
    for empties in [false, true] {
        tree.setxattr(&me(), object, capability, b"1", 0).unwrap();
        let flags = if empties { truncate } else { write };
        tree.open(&me(), object, flags, 0).unwrap();
        assert_eq!(lost(), empties.then_some(Errno::NODATA));
    }
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

#[test]
fn a_directory_that_is_mounted_when_it_is_used_has_its_contents() {
    let dir = tempfile::tempdir().unwrap();
    // In a mount namespace of this thread: the kernel's own example of such a directory.
    // SAFETY: of this thread alone, which has a working directory of its own by that.
    #[allow(unsafe_code)]
    let own = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) };
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    let mounted = own.and_then(|()| {
        mount_change("/", private)?;
        mount("none", dir.path(), "debugfs", MountFlags::empty(), None)
    });
    // Not every host has it, nor may every user mount. To ask of it by its path would mount it.
    let mut listed = std::fs::read_dir(dir.path()).unwrap();
    if mounted.is_err() || !listed.any(|entry| entry.unwrap().file_name() == "tracing") {
        return;
    }
    let root: OwnedFd = File::open(dir.path()).unwrap().into();
    let tree = Tree::new(&root, Access::ReadOnly, Quota::own(100), None).unwrap();
    let entry = tree.lookup(&me(), ROOT, c"tracing").unwrap();
    assert_eq!(entry.attr_flags, ATTR_SUBMOUNT);
    let file = tree.lookup(&me(), entry.inode, c"README").unwrap();
    assert_ne!(file.inode, 0);
}

#[test]
fn no_way_leads_up_from_the_list_of_descriptors() {
    let rig = rig();
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let above = openat(&rig.tree.proc_fds, c"../..", flags, Mode::empty()).unwrap();
    let ino = |fd: &OwnedFd| Attributes::of(fd).unwrap().id();
    // A process that may not mount uses the host's mount.
    let may_mount = rustix::process::geteuid().is_root();
    assert_eq!(ino(&above) == ino(&rig.tree.proc_fds), may_mount);
}
