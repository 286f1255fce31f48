use super::*;
use std::os::unix::fs::chown;

/// The guest's id that is mapped to the host's 0.
const FIRST: u32 = 65_536;

fn user(uid: u32, gid: u32) -> Context {
    Context { uid, gid, pid: 1 }
}

/// A tree with mapped ids; `None` if the test may not change owners.
fn mapped() -> Option<Rig> {
    if !credentials::may_switch() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    rustix::fs::chmod(dir.path(), Mode::from_raw_mode(0o777)).unwrap();
    let root: OwnedFd = File::open(dir.path()).unwrap().into();
    let (quota, ids) = (Quota::own(100), IdMap::new(FIRST, 65_536));
    let tree = Tree::new(&root, Access::ReadWrite, quota, ids).unwrap();
    tree.prepare_thread().unwrap();
    Some(Rig { dir, tree })
}

#[test]
fn what_the_hosts_users_own_is_owned_by_those_that_stand_for_them() {
    let Some(rig) = mapped() else { return };
    for (owner, shown) in [
        ((0, 0), (FIRST, FIRST)),
        ((1000, 2000), (FIRST + 1000, FIRST + 2000)),
        ((FIRST, FIRST + 1), (u32::MAX - 1, u32::MAX - 1)),
    ] {
        std::fs::write(rig.path("file"), "").unwrap();
        chown(rig.path("file"), Some(owner.0), Some(owner.1)).unwrap();
        let attributes = rig.look_up(ROOT, "file").unwrap().attr;
        assert_eq!((attributes.st_uid, attributes.st_gid), shown);
    }
}

#[test]
fn what_users_of_the_guest_make_or_give_away_is_theirs_whom_they_stand_for() {
    let Some(rig) = mapped() else { return };
    let owner = |name: &str| {
        let meta = rig.path(name).symlink_metadata().unwrap();
        (meta.uid(), meta.gid())
    };
    let tree = &rig.tree;
    let root = user(FIRST, FIRST);
    let other = user(FIRST + 1000, FIRST + 2000);
    let file = creation(libc::O_RDWR, 0o644);
    let (made, ..) = tree.create(&root, ROOT, c"roots", file).unwrap();
    assert_eq!((made.attr.st_uid, made.attr.st_gid), (FIRST, FIRST));
    tree.mkdir(&other, ROOT, c"others", 0o755, 0).unwrap();
    tree.symlink(&user(0, 0), c"x", ROOT, c"guests").unwrap();
    assert_eq!(owner("roots"), (0, 0));
    assert_eq!(owner("others"), (1000, 2000));
    assert_eq!(owner("guests"), (0, 0));

    let mut attributes = libc_stat();
    (attributes.st_uid, attributes.st_gid) = (FIRST + 5, FIRST + 6);
    let both = SetattrValid::UID | SetattrValid::GID;
    let (set, _) = tree
        .setattr(&root, made.inode, attributes, None, both)
        .unwrap();
    assert_eq!((set.st_uid, set.st_gid), (FIRST + 5, FIRST + 6));
    assert_eq!(owner("roots"), (5, 6));
}

#[test]
fn ids_that_stand_for_nothing_own_nothing() {
    let Some(rig) = mapped() else { return };
    let tree = &rig.tree;
    let made = tree.mkdir(&user(FIRST, FIRST), ROOT, c"dir", 0o777, 0);
    let made = made.unwrap().inode;
    for id in [1, 1000, FIRST - 1, FIRST + 65_536] {
        for context in [user(id, FIRST), user(FIRST, id)] {
            let refused = tree.mkdir(&context, ROOT, c"no", 0o755, 0);
            assert_eq!(code(refused), Some(Errno::OVERFLOW));
        }
        let mut attributes = libc_stat();
        (attributes.st_uid, attributes.st_gid) = (id, id);
        for valid in [SetattrValid::UID, SetattrValid::GID] {
            let refused = tree.setattr(&user(FIRST, FIRST), made, attributes, None, valid);
            assert_eq!(code(refused), Some(Errno::OVERFLOW));
        }
    }
    assert_eq!(rig.path("dir").metadata().unwrap().uid(), 0);
}
