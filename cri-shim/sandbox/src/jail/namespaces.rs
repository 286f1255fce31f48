//! Namespaces of its own, and a root directory that holds nothing.
#![allow(unsafe_code)] // unshare, fork

use std::fs;
use std::io;
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::process::{Pid, WaitOptions, chdir, pivot_root, waitpid};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::error::{JailError, MissingLayer};
use super::share::Share;

/// Where the empty root is mounted before it becomes the root: a directory that every Linux has.
const MOUNT_POINT: &str = "/proc";

/// Mount flags of the root, in addition to read-only.
const ROOT_FLAGS: MountFlags = MountFlags::NOSUID
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
        share.attach(CWD, ROOT_FLAGS)?;
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

fn step<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> JailError {
    move |source| JailError::Namespaces {
        step,
        source: source.into(),
    }
}

/// Settings of the host that refuse users namespaces, below `/proc/sys`, each with the value that
/// does and what to do about it.
const OBSTACLES: [(&str, &str, &str); 3] = [
    (
        "user/max_user_namespaces",
        "0",
        "sudo sysctl user.max_user_namespaces=15000",
    ),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "sudo sysctl kernel.unprivileged_userns_clone=1",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "load the AppArmor profile of /usr/bin/podvisor, as podvisor's Debian package does, or \
         sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
];

/// Tries, in a process that ends, to make the namespaces and the root directory of a jail for
/// another user than root.
///
/// # Errors
/// The kernel's answer.
pub fn try_user_namespaces() -> io::Result<()> {
    // SAFETY: the child makes system calls and nothing else until it ends, as other threads may
    // have held locks.
    let pid = match unsafe { libc::fork() } {
        0 => {
            let entered = enter(false).and_then(|()| empty_root(None));
            let code = match entered {
                Ok(()) => 0,
                Err(JailError::Namespaces { source, .. }) => source.raw_os_error().unwrap_or(-1),
                Err(_) => -1,
            };
            // SAFETY: nothing of the parent's is run or flushed.
            unsafe { libc::_exit(code) }
        }
        -1 => return Err(io::Error::last_os_error()),
        pid => Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?,
    };
    let ended = loop {
        match waitpid(Some(pid), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            ended => break ended?,
        }
    };
    match ended.and_then(|(_, status)| status.exit_status()) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code)),
        None => Err(io::Error::other("the process that tried was killed")),
    }
}

/// What to do where [`try_user_namespaces`] fails.
#[must_use]
pub fn user_namespaces_remedy() -> String {
    remedy_by(Path::new("/proc/sys"))
}

fn remedy_by(settings: &Path) -> String {
    let is_set = |name: &str, value: &str| {
        fs::read_to_string(settings.join(name)).is_ok_and(|text| text.trim() == value)
    };
    let found = OBSTACLES
        .iter()
        .filter(|(name, value, _)| is_set(name, value));
    let remedies: Vec<&str> = found.map(|(_, _, remedy)| *remedy).collect();
    match remedies.is_empty() {
        true => "run a kernel with CONFIG_USER_NS; in a container, give it a seccomp profile that \
                 allows unshare and mount"
            .to_owned(),
        false => remedies.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_that_refuses_user_namespaces_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let set = |name: &str, value: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        };
        assert!(remedy_by(dir.path()).contains("CONFIG_USER_NS"));
        set("user/max_user_namespaces", "95000");
        set("kernel/apparmor_restrict_unprivileged_userns", "1");
        let remedy = remedy_by(dir.path());
        assert!(remedy.contains("AppArmor profile"), "{remedy}");
        assert!(!remedy.contains("max_user_namespaces"), "{remedy}");
        set("user/max_user_namespaces", "0");
        set("kernel/unprivileged_userns_clone", "0");
        let remedy = remedy_by(dir.path());
        for (name, ..) in OBSTACLES {
            assert!(remedy.contains(&name.replace('/', ".")), "{remedy}");
        }
    }
}
