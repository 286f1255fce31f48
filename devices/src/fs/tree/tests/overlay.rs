//! What an overlayfs of the guest keeps in a tree: whiteouts and `trusted` attributes.

use super::*;

#[test]
fn whiteouts_are_made_and_other_devices_are_not() {
    let rig = rig();
    let kind = libc::S_IFCHR;
    let made = rig.tree.mknod(&me(), ROOT, c"gone", kind | 0o600, 0, 0);
    assert_eq!(made.unwrap().attr.st_mode, kind | 0o600);
    let on_host = rig.path("gone").symlink_metadata().unwrap();
    assert_eq!((on_host.mode(), on_host.rdev()), (kind | 0o600, 0));
    for (kind, device) in [
        (libc::S_IFCHR, 1),
        (libc::S_IFCHR, 1 << 8),
        (libc::S_IFBLK, 0),
        (libc::S_IFDIR, 0),
        (libc::S_IFLNK, 0),
    ] {
        let made = rig.tree.mknod(&me(), ROOT, c"dev", kind, device, 0);
        assert_eq!(code(made), Some(Errno::PERM), "{kind:o} {device}");
    }
}

#[test]
fn only_the_guests_root_lists_trusted_attributes() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    std::fs::set_permissions(rig.path("file"), PermissionsExt::from_mode(0o644)).unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    for attribute in [c"trusted.b", c"user.a", c"security.capability"] {
        let set = rig.tree.setxattr(&me(), object, attribute, b"1", 0);
        set.unwrap();
    }
    let list = |uid, size| {
        let context = Context { uid, ..me() };
        match rig.tree.listxattr(&context, object, size)? {
            ListxattrReply::Names(names) => Ok(names),
            ListxattrReply::Count(count) => Ok(vec![0; count as usize]),
        }
    };
    let names = |uid| {
        let list = String::from_utf8(list(uid, 1000).unwrap()).unwrap();
        let mut names: Vec<_> = list.split_terminator('\0').map(str::to_owned).collect();
        names.sort();
        names
    };
    let others = ["security.capability", "user.a"];
    assert_eq!(names(0), [others[0], "trusted.b", others[1]]);
    assert_eq!(names(1234), others);
    // The length without names, each with a NUL, and a list that has just room or not.
    let len = u32::try_from(others.concat().len() + 2).unwrap();
    assert_eq!(list(1234, 0).unwrap().len(), len as usize);
    assert_eq!(list(1234, len).unwrap().len(), len as usize);
    assert_eq!(code(list(1234, len - 1)), Some(Errno::RANGE));
}
