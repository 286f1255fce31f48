//! POSIX access control lists.

use super::super::acl;
use super::*;

/// The tags of entries (`linux/posix_acl.h`), and the id of those that have none.
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NONE: u32 = u32::MAX;

/// A list that lets one more user do `permissions`.
fn list(user: u32, permissions: u16) -> Vec<u8> {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (USER_OBJ, 6, NONE),
        (USER, permissions, user),
        (GROUP_OBJ, 0, NONE),
        (MASK, permissions, NONE),
        (OTHER, 0, NONE),
    ] {
        list.extend(u16::to_le_bytes(tag));
        list.extend(u16::to_le_bytes(permissions));
        list.extend(u32::to_le_bytes(id));
    }
    list
}

fn get(tree: &Tree, object: u64, name: &CStr, size: u32) -> Result<Vec<u8>, Errno> {
    match tree.getxattr(&me(), object, name, size) {
        Ok(GetxattrReply::Value(value)) => Ok(value),
        Ok(GetxattrReply::Count(len)) => Ok(vec![0; len as usize]),
        Err(error) => Err(Errno::from_io_error(&error).unwrap()),
    }
}

fn on_host(path: &Path, name: &CStr) -> Vec<u8> {
    let mut value = vec![0; 1024];
    let len = rustix::fs::getxattr(path, name, &mut *value).unwrap();
    value.truncate(len);
    value
}

#[test]
fn a_list_of_the_client_is_the_hosts_and_the_other_way_round() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let (tree, value) = (&rig.tree, list(1234, 4));
    assert_eq!(get(tree, object, acl::ACCESS, 0), Err(Errno::NODATA));
    tree.setxattr(&me(), object, acl::ACCESS, &value, 0)
        .unwrap();
    assert_eq!(on_host(&rig.path("file"), acl::ACCESS), value);
    // The mask is the group's bits of the mode.
    let mode = rig.look_up(ROOT, "file").unwrap().attr.st_mode;
    assert_eq!(mode & 0o777, 0o640);
    for (size, expected) in [
        (0, Ok(vec![0; value.len()])),
        (value.len() - 1, Err(Errno::RANGE)),
        (value.len(), Ok(value.clone())),
        (4096, Ok(value.clone())),
    ] {
        let size = u32::try_from(size).unwrap();
        assert_eq!(get(tree, object, acl::ACCESS, size), expected, "{size}");
    }
    let ListxattrReply::Names(names) = tree.listxattr(&me(), object, 1000).unwrap() else {
        panic!("no names");
    };
    assert_eq!(names, acl::ACCESS.to_bytes_with_nul());
    tree.removexattr(&me(), object, acl::ACCESS).unwrap();
    assert_eq!(get(tree, object, acl::ACCESS, 0), Err(Errno::NODATA));
    let broken = tree.setxattr(&me(), object, acl::ACCESS, &value[..13], 0);
    assert_eq!(code(broken), Some(Errno::INVAL));
}

#[test]
fn what_is_made_in_a_directory_with_a_default_list_has_that_whatever_the_umask_is() {
    let rig = rig();
    let tree = &rig.tree;
    let dir = tree.mkdir(&me(), ROOT, c"dir", 0o755, 0o077).unwrap().inode;
    let default = list(1234, 6);
    tree.setxattr(&me(), dir, acl::DEFAULT, &default, 0)
        .unwrap();
    let masked = |mode| CreateIn {
        umask: 0o077,
        ..creation(libc::O_RDWR, mode)
    };
    tree.create(&me(), dir, c"file", masked(0o10_0666)).unwrap();
    tree.mkdir(&me(), dir, c"below", 0o777, 0o077).unwrap();
    let fifo = libc::S_IFIFO | 0o666;
    tree.mknod(&me(), dir, c"fifo", fifo, 0, 0o077).unwrap();
    let below = rig.path("dir/below");
    assert_eq!(on_host(&rig.path("dir/file"), acl::ACCESS), default);
    assert_eq!(on_host(&below, acl::DEFAULT), default);
    let mode = |path: &str| rig.path(path).metadata().unwrap().mode() & 0o777;
    assert_eq!((mode("dir/file"), mode("dir/fifo")), (0o660, 0o660));
    // Elsewhere the umask counts, and not longer than for one call.
    assert_eq!(mode("dir"), 0o700);
    tree.create(&me(), ROOT, c"file", masked(0o10_0666))
        .unwrap();
    tree.mknod(&me(), ROOT, c"fifo", fifo, 0, 0).unwrap();
    assert_eq!((mode("file"), mode("fifo")), (0o600, 0o666));
}

#[test]
fn where_there_can_be_no_list_there_is_none_and_it_is_not_opened() {
    let rig = rig();
    let fifo = libc::S_IFIFO | 0o666;
    let fifo = rig.tree.mknod(&me(), ROOT, c"fifo", fifo, 0, 0).unwrap();
    let lists = [acl::ACCESS, acl::DEFAULT];
    for name in lists {
        assert_eq!(get(&rig.tree, fifo.inode, name, 0), Err(Errno::NODATA));
        let set = rig.tree.setxattr(&me(), fifo.inode, name, &list(1, 4), 0);
        assert_eq!(code(set), Some(Errno::OPNOTSUPP));
    }
    let proc: OwnedFd = File::open("/proc").unwrap().into();
    let tree = Tree::new(&proc, Access::ReadWrite, Quota::own(10), None).unwrap();
    let version = tree.lookup(&me(), ROOT, c"version").unwrap().inode;
    for name in lists {
        assert_eq!(get(&tree, version, name, 4096), Err(Errno::NODATA));
        let set = tree.setxattr(&me(), version, name, &list(1, 4), 0);
        assert_eq!(code(set), Some(Errno::OPNOTSUPP));
    }
    // Nor can a client that may not write.
    let rig = rig_with(Access::ReadOnly, 10);
    std::fs::write(rig.path("file"), "").unwrap();
    let file = rig.look_up(ROOT, "file").unwrap().inode;
    let set = rig.tree.setxattr(&me(), file, acl::ACCESS, &list(1, 4), 0);
    assert_eq!(code(set), Some(Errno::ROFS));
}

#[test]
fn a_list_takes_the_set_group_id_bit_only_where_the_client_says_so() {
    let rig = rig();
    let mode = || rig.path("file").metadata().unwrap().mode() & 0o7777;
    std::fs::write(rig.path("file"), "").unwrap();
    let file = rig.look_up(ROOT, "file").unwrap().inode;
    let set_bit = Mode::from_raw_mode(0o2750);
    let tree = &rig.tree;
    for clears in [false, true] {
        rustix::fs::chmod(rig.path("file"), set_bit).unwrap();
        tree.clear_group_bit(clears);
        tree.setxattr(&me(), file, acl::ACCESS, &list(7, 4), 0)
            .unwrap();
        assert_eq!(mode(), if clears { 0o640 } else { 0o2640 });
    }
    // It was said of that one request.
    rustix::fs::chmod(rig.path("file"), set_bit).unwrap();
    tree.setxattr(&me(), file, acl::ACCESS, &list(7, 4), 0)
        .unwrap();
    assert_eq!(mode(), 0o2640);
}

#[test]
fn lists_name_the_hosts_users_on_the_host_and_the_guests_in_the_guest() {
    if !credentials::may_switch() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root: OwnedFd = File::open(dir.path()).unwrap().into();
    let (quota, ids) = (Quota::own(100), IdMap::new(65_536, 65_536));
    let tree = Tree::new(&root, Access::ReadWrite, quota, ids).unwrap();
    tree.prepare_thread().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "").unwrap();
    let file = tree.lookup(&me(), ROOT, c"file").unwrap().inode;
    let guests = list(65_536 + 1000, 4);
    tree.setxattr(&me(), file, acl::ACCESS, &guests, 0).unwrap();
    assert_eq!(on_host(&path, acl::ACCESS), list(1000, 4));
    assert_eq!(get(&tree, file, acl::ACCESS, 4096), Ok(guests));
    let nobodys = tree.setxattr(&me(), file, acl::ACCESS, &list(1000, 4), 0);
    assert_eq!(code(nobodys), Some(Errno::INVAL));
}
