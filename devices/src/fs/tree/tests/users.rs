use super::*;
use fuse_backend_rs::api::filesystem::ZeroCopyReader;
use fuse_backend_rs::common::file_buf::FileVolatileSlice;
use fuse_backend_rs::common::file_traits::FileReadWriteVolatile;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::os::unix::fs::chown;
use vm_memory::VolatileSlice;

const USER: Context = Context {
    uid: 1234,
    gid: 5678,
    pid: 1,
};

/// A supplementary group of the guest's user.
const GROUP: u32 = 5000;

/// A share that only this group may write to, like the volumes of a pod with `fsGroup`.
fn rig_of_group() -> Rig {
    let rig = rig();
    of_group(rig.dir.path());
    rig
}

fn of_group(path: &Path) {
    chown(path, None, Some(GROUP)).unwrap();
    rustix::fs::chmod(path, Mode::from_raw_mode(0o2775)).unwrap();
}

#[test]
fn objects_belong_to_the_guests_user_and_keep_no_group_that_is_not_its() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig();
    rustix::fs::chmod(rig.dir.path(), Mode::from_raw_mode(0o2777)).unwrap();
    let (context, tree) = (USER, &rig.tree);
    tree.mkdir(&context, ROOT, c"dir", 0o755, 0).unwrap();
    tree.symlink(&context, c"x", ROOT, c"link").unwrap();
    let make = creation(libc::O_RDWR, 0o10_2777);
    tree.create(&context, ROOT, c"file", make).unwrap();
    for text in ["dir", "link", "file"] {
        assert_eq!(
            rig.path(text).symlink_metadata().unwrap().uid(),
            USER.uid,
            "{text}"
        );
    }
    // The directory's group is root's, which the user is not a member of: the file gets the group,
    // but not the set-group-ID bit.
    let meta = rig.path("file").metadata().unwrap();
    assert_eq!((meta.gid(), meta.mode() & 0o2000), (0, 0));
    assert!(rustix::process::geteuid().is_root());
    assert_eq!(rustix::process::getegid(), rustix::process::getgid());
    for (uid, gid) in [(u32::MAX, 0), (0, u32::MAX)] {
        let context = Context { uid, gid, pid: 1 };
        assert_eq!(
            code(tree.mkdir(&context, ROOT, c"no", 0o755, 0)),
            Some(Errno::INVAL)
        );
    }
}

#[test]
fn bits_that_lend_an_identity_go_where_the_guest_asks_for_it() {
    use fuse_backend_rs::abi::fuse_abi::FOPEN_IN_KILL_SUIDGID;
    let rig = rig();
    let truncate = (libc::O_RDWR | libc::O_TRUNC).cast_unsigned();
    let path = rig.path("file");
    std::fs::write(&path, "text").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let mut size = libc_stat();
    size.st_size = 1;
    for ask in [true, false] {
        let lend = std::fs::Permissions::from_mode(0o6777);
        let left = || path.metadata().unwrap().permissions().mode() & 0o6000;
        // An unprivileged process loses them in either case.
        let kept = if credentials::may_switch() && !ask {
            0o6000
        } else {
            0
        };
        std::fs::set_permissions(&path, lend.clone()).unwrap();
        let flags = if ask { FOPEN_IN_KILL_SUIDGID } else { 0 };
        rig.tree.open(&me(), object, truncate, flags).unwrap();
        assert_eq!(left(), kept);
        std::fs::set_permissions(&path, lend).unwrap();
        let mut valid = SetattrValid::SIZE;
        valid.set(SetattrValid::KILL_SUIDGID, ask);
        rig.tree.setattr(&me(), object, size, None, valid).unwrap();
        assert_eq!(left(), kept);
    }
}

#[test]
fn what_another_group_of_the_guests_user_may_write_to_it_can_fill() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig_of_group();
    let tree = &rig.tree;
    let before = capabilities(None).unwrap();
    let make = creation(libc::O_RDWR | libc::O_EXCL, 0o10_2777);
    let (file, ..) = tree.create(&USER, ROOT, c"file", make).unwrap();
    let dir = tree.mkdir(&USER, ROOT, c"dir", 0o775, 0).unwrap();
    tree.mknod(&USER, ROOT, c"pipe", libc::S_IFIFO | 0o600, 0, 0)
        .unwrap();
    tree.symlink(&USER, c"x", ROOT, c"link").unwrap();
    tree.link(&USER, file.inode, ROOT, c"hard").unwrap();
    tree.rename(&USER, ROOT, c"hard", dir.inode, c"moved", 0)
        .unwrap();
    for text in ["file", "dir", "pipe", "link", "dir/moved"] {
        let meta = rig.path(text).symlink_metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid()), (USER.uid, GROUP), "{text}");
    }
    // The group is inherited, but the program does not run with it.
    assert_eq!(dir.attr.st_mode, 0o4_2775);
    assert_eq!(file.attr.st_mode, 0o10_0777);
    assert_eq!(capabilities(None).unwrap(), before);
}

#[test]
fn files_that_are_there_when_the_guest_makes_them_send_it_to_look_again() {
    let rig = rig();
    for mode in [0o600, 0o666] {
        std::fs::write(rig.path("file"), "text").unwrap();
        rustix::fs::chmod(rig.path("file"), Mode::from_raw_mode(mode)).unwrap();
        for context in [USER, me()] {
            let make = creation(libc::O_RDWR | libc::O_TRUNC, 0o10_0666);
            let made = rig.tree.create(&context, ROOT, c"file", make);
            assert_eq!(code(made), Some(Errno::STALE));
        }
        assert_eq!(std::fs::read(rig.path("file")).unwrap(), b"text");
        assert_eq!(rig.tree.table().objects(), 0);
    }
}

#[test]
fn a_thread_takes_no_capability_along_but_the_one_that_the_guest_answers_for() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig();
    let effective = || capabilities(None).unwrap().effective;
    let before = effective();
    assert!(before.contains(CapabilitySet::FSETID | CapabilitySet::DAC_OVERRIDE));
    {
        let _acting = rig.tree.making(&USER, 0).unwrap();
        assert_eq!(effective(), CapabilitySet::DAC_OVERRIDE);
    }
    assert_eq!(effective(), before);
    {
        let _acting = rig.tree.acting(&USER, None).unwrap();
        assert_eq!(effective(), CapabilitySet::empty());
    }
    assert_eq!(effective(), before);
}

#[test]
fn a_process_that_was_not_given_the_capability_leaves_permissions_to_the_host() {
    if !credentials::may_switch() {
        return;
    }
    let thread = std::thread::spawn(|| {
        let sets = capabilities(None).unwrap();
        let kept = sets.permitted - CapabilitySet::DAC_OVERRIDE;
        let less = CapabilitySets {
            effective: kept,
            permitted: kept,
            ..sets
        };
        set_capabilities(None, less).unwrap();
        let rig = rig_of_group();
        let made = rig.tree.mkdir(&USER, ROOT, c"dir", 0o775, 0);
        assert_eq!(code(made), Some(Errno::ACCESS));
        assert_eq!(capabilities(None).unwrap(), less);
    });
    thread.join().unwrap();
}

/// As on a file server that maps its clients' root to `nobody`: this thread may access what it
/// owns, and other users what they own.
#[test]
fn what_the_host_denies_to_itself_the_guests_user_may_do_where_it_is_allowed_to() {
    if !credentials::may_switch() {
        return;
    }
    let thread = std::thread::spawn(|| {
        let sets = capabilities(None).unwrap();
        let all =
            CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::FOWNER;
        let kept = sets.permitted - all;
        let less = CapabilitySets {
            effective: kept,
            permitted: kept,
            ..sets
        };
        set_capabilities(None, less).unwrap();
        let rig = rig();
        rustix::fs::chmod(rig.dir.path(), Mode::from_raw_mode(0o755)).unwrap();
        let tree = &rig.tree;
        std::fs::create_dir(rig.path("home")).unwrap();
        let home = rig.look_up(ROOT, "home").unwrap();
        let path = rig.path("home/file");
        std::fs::write(&path, "text").unwrap();
        for (path, mode) in [(path, 0o600), (rig.path("home"), 0o700)] {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode)).unwrap();
            chown(&path, Some(USER.uid), Some(USER.gid)).unwrap();
        }
        let other = Context { uid: 4321, ..USER };
        let denied = Some(Errno::ACCESS);
        assert_eq!(code(tree.lookup(&other, home.inode, c"file")), denied);
        let file = tree.lookup(&USER, home.inode, c"file").unwrap().inode;
        let write = libc::O_WRONLY.cast_unsigned();
        assert_eq!(code(tree.open(&other, file, write, 0)), denied);
        tree.open(&USER, file, write, 0).unwrap();
        tree.opendir(&USER, home.inode, 0).unwrap();
        let mut wanted = libc_stat();
        wanted.st_mode = 0o640;
        let valid = SetattrValid::MODE | SetattrValid::SIZE | SetattrValid::MTIME_NOW;
        let valid = valid | SetattrValid::MTIME;
        tree.setattr(&USER, file, wanted, None, valid).unwrap();
        tree.link(&USER, file, home.inode, c"hard").unwrap();
        tree.rename(&USER, home.inode, c"hard", home.inode, c"moved", 0)
            .unwrap();
        assert_eq!(code(tree.unlink(&other, home.inode, c"moved")), denied);
        tree.unlink(&USER, home.inode, c"moved").unwrap();
        tree.mkdir(&USER, home.inode, c"dir", 0o700, 0).unwrap();
        tree.rmdir(&USER, home.inode, c"dir").unwrap();
        assert_eq!(capabilities(None).unwrap(), less);
    });
    thread.join().unwrap();
}

/// Returns the user of this thread for file system accesses.
fn file_system_user() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.and_then(|ids| ids.split_whitespace().nth(3)?.parse().ok())
}

/// A source of data that records the user who reads it to write to a file.
#[derive(Default)]
struct Writer(Option<u32>);

impl io::Read for Writer {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl ZeroCopyReader for Writer {
    fn read_to(
        &mut self,
        _: &mut dyn FileReadWriteVolatile,
        count: usize,
        _: u64,
    ) -> io::Result<usize> {
        self.0 = file_system_user();
        Ok(count)
    }
}

#[test]
fn who_makes_something_has_the_supplementary_group_and_only_then() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig();
    let groups = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        groups.unwrap().trim().to_owned()
    };
    rig.tree.make_with_group(Some(GROUP));
    {
        let _making = rig.tree.making(&USER, 0).unwrap();
        assert_eq!(groups(), GROUP.to_string());
    }
    assert_eq!(groups(), "");
    {
        let _acting = rig.tree.acting(&USER, None).unwrap();
        assert_eq!(groups(), "");
    }
    rig.tree.make_with_group(None);
    let _making = rig.tree.making(&USER, 0).unwrap();
    assert_eq!(groups(), "");
}

#[test]
fn who_opens_a_file_has_no_more_room_for_it_than_a_user_of_the_host() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig();
    rustix::fs::chmod(rig.dir.path(), Mode::from_raw_mode(0o2777)).unwrap();
    let (tree, before) = (&rig.tree, capabilities(None).unwrap());
    for (context, name) in [(USER, c"user"), (me(), c"root")] {
        let make = creation(libc::O_RDWR, 0o10_0666);
        let (made, handle, ..) = tree.create(&context, ROOT, name, make).unwrap();
        let flags = libc::O_WRONLY.cast_unsigned();
        let (opened, ..) = tree.open(&context, made.inode, flags, 0).unwrap();
        for handle in [handle, opened].map(Option::unwrap) {
            let mut writer = Writer::default();
            // Whatever the request's user: the client's cache writes without one.
            let (inode, reader) = (made.inode, &mut writer);
            tree.write(&me(), inode, handle, reader, 1, 0, None, true, 0, 0)
                .unwrap();
            assert_eq!(writer.0, Some(context.uid));
            tree.fallocate(&me(), inode, handle, 0, 0, 10).unwrap();
            assert_eq!(file_system_user(), Some(0));
            assert_eq!(capabilities(None).unwrap(), before);
        }
    }
}

/// A source of zeroes.
struct Zeroes;

impl io::Read for Zeroes {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl ZeroCopyReader for Zeroes {
    fn read_to(
        &mut self,
        file: &mut dyn FileReadWriteVolatile,
        count: usize,
        offset: u64,
    ) -> io::Result<usize> {
        let mut zeroes = vec![0; count];
        let slice = VolatileSlice::from(&mut *zeroes);
        file.write_at_volatile(FileVolatileSlice::from_volatile_slice(&slice), offset)
    }
}

#[test]
fn a_write_takes_the_set_user_id_bit_where_the_client_wants_it() {
    if !credentials::may_switch() {
        return;
    }
    let rig = rig();
    let tree = &rig.tree;
    std::fs::write(rig.path("file"), "text").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let flags = libc::O_WRONLY.cast_unsigned();
    let handle = tree.open(&me(), object, flags, 0).unwrap().0.unwrap();
    let (locked, kill) = (1 << 1, 1 << 2);
    for (flags, mode) in [
        (0, 0o4755),
        (locked, 0o4755),
        (kill, 0o755),
        (kill | locked, 0o755),
    ] {
        let whole = std::fs::Permissions::from_mode(0o4755);
        std::fs::set_permissions(rig.path("file"), whole).unwrap();
        tree.write(
            &me(),
            object,
            handle,
            &mut Zeroes,
            1,
            0,
            None,
            true,
            0,
            flags,
        )
        .unwrap();
        let meta = rig.path("file").metadata().unwrap();
        assert_eq!(meta.mode() & 0o7777, mode, "{flags}");
    }
}

#[test]
fn a_root_without_capabilities_acts_as_nobody_else() {
    if !credentials::may_switch() {
        return;
    }
    // Capabilities are a thread's.
    let thread = std::thread::spawn(|| {
        let sets = capabilities(None).unwrap();
        for lacking in [CapabilitySet::SETUID, CapabilitySet::SETGID] {
            let effective = sets.effective.difference(lacking);
            set_capabilities(None, CapabilitySets { effective, ..sets }).unwrap();
            assert!(rustix::process::geteuid().is_root());
            assert!(!credentials::may_switch(), "{lacking:?}");
        }
        set_capabilities(None, sets).unwrap();
        assert!(credentials::may_switch());
    });
    thread.join().unwrap();
}
