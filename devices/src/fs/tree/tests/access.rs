use super::*;

#[test]
fn nothing_changes_through_a_read_only_tree() {
    nothing_changes(Access::ReadOnly);
}

/// Nothing is mounted below the root here.
#[test]
fn nothing_changes_in_the_mount_of_a_root_that_is_made_of_mount_points() {
    nothing_changes(Access::BelowMounts);
}

#[test]
fn what_is_mounted_below_a_root_of_mount_points_changes() {
    // A separate mount on every Linux, with another one below it.
    let root: OwnedFd = File::open("/dev").unwrap().into();
    let tree = Tree::new(&root, Access::BelowMounts, Quota::own(100), None).unwrap();
    tree.prepare_thread().unwrap();
    let (context, refused) = (me(), Some(Errno::ROFS));
    let own = name(&format!("podvisor-test-{}", std::process::id()));
    let made = tree.mkdir(&context, ROOT, &own, 0o755, 0);
    assert_eq!(code(made), refused);
    let shm = tree.lookup(&context, ROOT, c"shm").unwrap().inode;
    let made = tree.mkdir(&context, shm, &own, 0o755, 0).unwrap().inode;
    let file = tree.create(&context, made, c"file", creation(libc::O_RDWR, 0o644));
    let (file, handle, ..) = file.unwrap();
    let handle = handle.unwrap();
    tree.fallocate(&context, file.inode, handle, 0, 0, 10)
        .unwrap();
    let moved = tree.rename(&context, made, c"file", ROOT, &own, 0);
    assert_eq!(code(moved), refused);
    let moved = tree.rename(&context, ROOT, c"null", made, c"null", 0);
    assert_eq!(code(moved), refused);
    tree.unlink(&context, made, c"file").unwrap();
    assert_eq!(code(tree.rmdir(&context, ROOT, c"shm")), refused);
    tree.rmdir(&context, shm, &own).unwrap();
}

#[test]
fn names_of_mounts_are_kept_at_the_top_and_not_below() {
    let root: OwnedFd = File::open("/").unwrap().into();
    let tree = Tree::new(&root, Access::ReadOnly, Quota::own(100), None).unwrap();
    let look_up = |parent, name| tree.lookup(&me(), parent, name).unwrap();
    // Separate mounts on every Linux.
    let dev = look_up(ROOT, c"dev");
    let shm = look_up(dev.inode, c"shm");
    assert_eq!([dev, shm].map(|entry| entry.attr_flags), [ATTR_SUBMOUNT; 2]);
    let kept = [dev, shm, look_up(dev.inode, c"null")].map(|entry| entry.entry_timeout);
    assert_eq!(kept, [CACHE_TIMEOUT, Duration::ZERO, CACHE_TIMEOUT]);
}

fn nothing_changes(access: Access) {
    let rig = rig_with(access, 100);
    std::fs::write(rig.path("file"), "text").unwrap();
    std::fs::create_dir(rig.path("dir")).unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let (tree, context, refused) = (&rig.tree, me(), Some(Errno::ROFS));
    for flags in [
        libc::O_WRONLY,
        libc::O_RDWR,
        libc::O_TRUNC,
        libc::O_RDWR | libc::O_APPEND,
    ] {
        assert_eq!(
            code(tree.open(&context, object, flags.cast_unsigned(), 0)),
            refused
        );
        let create = tree.create(&context, ROOT, c"new", creation(flags, 0o644));
        assert_eq!(code(create), refused);
    }
    let read = creation(libc::O_RDONLY, 0o644);
    assert_eq!(code(tree.create(&context, ROOT, c"new", read)), refused);
    assert_eq!(code(tree.mkdir(&context, ROOT, c"new", 0o755, 0)), refused);
    assert_eq!(
        code(tree.mknod(&context, ROOT, c"new", 0o10_0644, 0, 0)),
        refused
    );
    assert_eq!(code(tree.symlink(&context, c"x", ROOT, c"new")), refused);
    assert_eq!(code(tree.link(&context, object, ROOT, c"new")), refused);
    assert_eq!(code(tree.unlink(&context, ROOT, c"file")), refused);
    assert_eq!(code(tree.rmdir(&context, ROOT, c"dir")), refused);
    assert_eq!(
        code(tree.rename(&context, ROOT, c"file", ROOT, c"new", 0)),
        refused
    );
    for object in [ROOT, object] {
        let set = tree.setattr(&context, object, libc_stat(), None, SetattrValid::all());
        assert_eq!(code(set), refused);
    }
    assert_eq!(
        code(tree.setxattr(&context, object, c"user.a", b"1", 0)),
        refused
    );
    assert_eq!(code(tree.removexattr(&context, object, c"user.a")), refused);
    let handle = tree.open(&context, object, 0, 0).unwrap().0.unwrap();
    assert_eq!(
        code(tree.fallocate(&context, object, handle, 0, 0, 10)),
        refused
    );
    assert_eq!(std::fs::read(rig.path("file")).unwrap(), b"text");
    assert_eq!(std::fs::read_dir(rig.dir.path()).unwrap().count(), 2);
}
