//! What the host has mounted, and what of it the client cannot reach.

use super::*;

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
