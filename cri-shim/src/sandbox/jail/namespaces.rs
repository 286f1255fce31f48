//! New namespaces, and an empty root directory.
#![allow(unsafe_code)] // unshare

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::{JailError, MissingLayer, Share, step};

/// Where the empty root is mounted before it becomes the root: a directory that every Linux has.
const MOUNT_POINT: &str = "/proc";

/// Mount flags of the root, in addition to read-only.
pub(super) const ROOT_FLAGS: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);

/// Leaves the host's namespaces. Without privileges, this creates a user namespace, too.
pub(super) fn enter(is_privileged: bool) -> Result<(), JailError> {
    let mut flags = UnshareFlags::NEWNS
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWCGROUP;
    if !is_privileged {
        flags |= UnshareFlags::NEWUSER;
    }
    // SAFETY: descriptors stay shared, which is what `unshare` could break; the process has one
    // thread.
    let left = unsafe { unshare_unsafe(flags) };
    left.map_err(step("make namespaces for the jail"))
}

/// Makes a read-only file system the root, which is empty except for the shared directory.
pub(super) fn empty_root(share: Option<&Share>) -> Result<(), JailError> {
    let share = share.filter(|share| share.has_mounts());
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(step("keep the jail's mounts from the host"))?;
    let (flags, options) = match share {
        None => (MountFlags::RDONLY, c"size=4096,nr_inodes=1,mode=0555"),
        // One more inode: a directory to mount it on.
        Some(_) => (MountFlags::empty(), c"size=4096,nr_inodes=2,mode=0555"),
    };
    mount(
        "podvisor",
        MOUNT_POINT,
        "tmpfs",
        ROOT_FLAGS | flags,
        Some(options),
    )
    .map_err(step("mount the jail's root directory"))?;
    chdir(MOUNT_POINT).map_err(step("enter the jail's root directory"))?;
    if let Some(share) = share {
        share.attach(CWD)?;
    }
    pivot_root(".", ".").map_err(step("make the jail's directory the root"))?;
    // The old root is mounted on top of the new one now.
    unmount(".", UnmountFlags::DETACH).map_err(step("detach the host's files"))?;
    chdir("/").map_err(step("enter the root directory"))
}

/// Enters a user namespace without mapped users. The host refuses it if not every user may create
/// one; the capabilities are gone in either case.
pub(super) fn leave_user_namespace() -> Option<MissingLayer> {
    // SAFETY: as in `enter`.
    let left = unsafe { unshare_unsafe(UnshareFlags::NEWUSER) };
    let error = left.err()?;
    tracing::debug!(%error, "the jail has no user namespace of its own");
    Some(MissingLayer::UserNamespace)
}
