//! Calls as a client makes them: of lists, of several objects at once, of holes.

use super::*;

/// Lists a directory by one call for `room` entries; of those that follow, `refuse` is the answer.
fn listed(tree: &Tree, plus: bool, room: usize, refuse: io::Result<usize>) -> Vec<(String, u64)> {
    let (handle, _) = tree.opendir(&me(), ROOT, 0).unwrap();
    let handle = handle.unwrap();
    let mut names = Vec::new();
    let mut refuse = Some(refuse);
    let mut add = |entry: DirEntry<'_>, inode| {
        if names.len() == room {
            return refuse.take().unwrap();
        }
        names.push((String::from_utf8(entry.name.to_vec()).unwrap(), inode));
        Ok(24)
    };
    if plus {
        tree.readdirplus(&me(), ROOT, handle, 4096, 0, &mut |listed, entry| {
            add(listed, entry.inode)
        })
        .unwrap();
    } else {
        tree.readdir(&me(), ROOT, handle, 4096, 0, &mut |listed| add(listed, 0))
            .unwrap();
    }
    tree.releasedir(&me(), ROOT, 0, handle).unwrap();
    names.sort();
    names
}

#[test]
fn a_client_is_told_to_cache_to_list_with_objects_and_to_know_of_mounts() {
    let told = rig().tree.init(FsOptions::empty()).unwrap();
    for option in [
        FsOptions::ASYNC_READ,
        FsOptions::ASYNC_DIO,
        FsOptions::ATOMIC_O_TRUNC,
        FsOptions::AUTO_INVAL_DATA,
        FsOptions::BIG_WRITES,
        FsOptions::DO_READDIRPLUS,
        FsOptions::READDIRPLUS_AUTO,
        FsOptions::MAX_PAGES,
        FsOptions::PARALLEL_DIROPS,
        FsOptions::HANDLE_KILLPRIV_V2,
        FsOptions::SUBMOUNTS,
        FsOptions::DONT_MASK,
        FsOptions::POSIX_ACL,
    ] {
        assert!(told.contains(option), "{option:?}");
    }
    // Locks are the guest's own, and so is what it has not written yet.
    for option in [
        FsOptions::POSIX_LOCKS,
        FsOptions::FLOCK_LOCKS,
        FsOptions::WRITEBACK_CACHE,
    ] {
        assert!(!told.contains(option), "{option:?}");
    }
}

#[test]
fn a_list_has_the_objects_where_asked_which_are_forgotten_all_at_once() {
    let rig = rig();
    for file in ["a", "b"] {
        std::fs::write(rig.path(file), "").unwrap();
    }
    let names = |list: &[(String, u64)]| list.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    let plain = listed(&rig.tree, false, 10, Ok(0));
    assert_eq!(names(&plain), [".", "..", "a", "b"]);
    assert_eq!(rig.tree.table().objects(), 0);
    let told = listed(&rig.tree, true, 10, Ok(0));
    assert_eq!(names(&told), names(&plain));
    assert_eq!(rig.tree.table().objects(), 2);
    let both = told[2..].iter().map(|(_, number)| (*number, 1)).collect();
    rig.tree.batch_forget(&me(), both);
    assert_eq!(rig.tree.table().objects(), 0);
}

#[test]
fn an_entry_that_is_refused_ends_the_list_and_loses_none_before_it() {
    let rig = rig();
    std::fs::write(rig.path("a"), "").unwrap();
    for plus in [false, true] {
        for refuse in [Ok(0), Err(Errno::NOSPC.into())] {
            assert_eq!(listed(&rig.tree, plus, 2, refuse).len(), 2);
        }
    }
    // The first one's error is the list's.
    let (handle, _) = rig.tree.opendir(&me(), ROOT, 0).unwrap();
    let handle = handle.unwrap();
    let listed = rig.tree.readdir(&me(), ROOT, handle, 4096, 0, &mut |_| {
        Err(Errno::NOSPC.into())
    });
    listed.unwrap();
    assert_eq!(rig.tree.take_list_error(), Some(Errno::NOSPC));
    assert_eq!(rig.tree.take_list_error(), None);
}

/// Counts the entries of the root that one call for `size` bytes offers. The answer to the one with
/// this number, from 0 on, is `answer`, and 1 to all others.
fn offered(tree: &Tree, plus: bool, size: u32, (number, answer): (usize, usize)) -> usize {
    let handle = tree.opendir(&me(), ROOT, 0).unwrap().0.unwrap();
    let mut count = 0;
    let mut add = |_: DirEntry<'_>, _| {
        count += 1;
        Ok(if count == number + 1 { answer } else { 1 })
    };
    let of = (ROOT, handle);
    tree.entries(&me(), of, (size, 0), plus, &mut add).unwrap();
    tree.releasedir(&me(), ROOT, 0, handle).unwrap();
    count
}

#[test]
fn a_reply_ends_once_it_has_as_many_bytes_as_it_may_have() {
    let rig = rig();
    std::fs::write(rig.path("a"), "").unwrap();
    let most = directory::MAX_REPLY;
    let offered = |answer| offered(&rig.tree, false, u32::MAX, (0, answer));
    assert_eq!((offered(most - 1), offered(most)), (2, 1));
}

#[test]
fn more_entries_are_read_unless_more_than_three_quarters_of_the_reply_are_full() {
    let rig = rig();
    for n in 0..40 {
        std::fs::write(rig.path(&format!("{n:0200}")), "").unwrap();
    }
    let offered = |plus, size, which| offered(&rig.tree, plus, size, which);
    // The number of entries that are read at once.
    let read = offered(false, 4096, (0, 3073));
    assert!(read < 30, "{read}");
    let full_to = |bytes: usize| offered(false, 4096, (read - 1, bytes - (read - 1)));
    assert!(full_to(3072) > read);
    assert_eq!(full_to(3073), read);
    // In the reply, an entry takes four times its bytes if its object is told.
    assert_eq!(offered(true, 4 * 4096, (0, 4 * 4096)), read);
}

#[test]
fn the_directory_above_is_listed_with_the_number_of_the_one_below() {
    let rig = rig();
    std::fs::create_dir(rig.path("below")).unwrap();
    let below = rig.look_up(ROOT, "below").unwrap().inode;
    for (object, path) in [(ROOT, "."), (below, "below")] {
        let own = std::fs::metadata(rig.path(path)).unwrap().ino();
        let handle = rig.tree.opendir(&me(), object, 0).unwrap().0.unwrap();
        let mut add = |listed: DirEntry<'_>| {
            assert_eq!(listed.ino == own, listed.name != b"below");
            Ok(24)
        };
        let listed = rig.tree.readdir(&me(), object, handle, 4096, 0, &mut add);
        listed.unwrap();
    }
}

#[test]
fn a_directory_that_is_removed_is_an_error_unless_entries_of_it_were_listed() {
    let rig = rig();
    std::fs::create_dir(rig.path("gone")).unwrap();
    let object = rig.look_up(ROOT, "gone").unwrap().inode;
    let handle = rig.tree.opendir(&me(), object, 0).unwrap().0.unwrap();
    let mut names = 0;
    let mut list = || {
        let mut add = |_: DirEntry<'_>| {
            // The next entries that the host is asked for are those of a removed directory.
            let _ = std::fs::remove_dir(rig.path("gone"));
            names += 1;
            Ok(24)
        };
        let listed = rig.tree.readdir(&me(), object, handle, 4096, 0, &mut add);
        listed.unwrap();
        rig.tree.take_list_error()
    };
    assert_eq!([list(), list()], [None, Some(Errno::NOENT)]);
    assert_eq!(names, 2);
}

#[test]
fn holes_and_data_are_found_and_other_seeks_are_the_clients() {
    let rig = rig();
    let file = File::create(rig.path("file")).unwrap();
    file.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 1 << 20).unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let handle = rig.tree.open(&me(), object, 0, 0).unwrap().0.unwrap();
    let seek = |from, whence: i32| {
        let whence = whence.cast_unsigned();
        rig.tree.lseek(&me(), object, handle, from, whence)
    };
    assert_eq!(seek(0, libc::SEEK_DATA).unwrap(), 1 << 20);
    assert_eq!(seek(0, libc::SEEK_HOLE).unwrap(), 0);
    assert_eq!(seek(1 << 20, libc::SEEK_HOLE).unwrap(), (1 << 20) + 4096);
    assert_eq!(code(seek(2 << 20, libc::SEEK_DATA)), Some(Errno::NXIO));
    for whence in [libc::SEEK_SET, libc::SEEK_CUR, libc::SEEK_END, 99] {
        assert_eq!(code(seek(0, whence)), Some(Errno::INVAL));
    }
}

#[test]
fn devices_have_their_numbers_as_linux_encodes_them() {
    use rustix::fs::{FileType, makedev, mknodat};
    let root: OwnedFd = File::open("/dev").unwrap().into();
    let tree = Tree::new(&root, Access::ReadOnly, Quota::own(100), None).unwrap();
    for (name, number) in [(c"null", 0x103), (c"zero", 0x105)] {
        let entry = tree.lookup(&me(), ROOT, name).unwrap();
        assert_eq!(entry.attr.st_rdev, number, "{name:?}");
    }
    // Numbers of more than a byte, where the test may make such a device.
    let rig = rig();
    let (at, number) = (rig.path("device"), makedev(0xabc, 0x1_2345));
    if mknodat(CWD, at, FileType::CharacterDevice, Mode::RUSR, number).is_ok() {
        let entry = rig.look_up(ROOT, "device").unwrap();
        assert_eq!(entry.attr.st_rdev, 0x123a_bc45);
    }
}
