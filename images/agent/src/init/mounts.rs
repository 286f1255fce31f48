//! The guest's own filesystems, and a root that is read-only and can be left with pivot_root(2).

use std::ffi::CStr;
use std::io;
use std::path::Path;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind, mount_move, mount_remount};
use rustix::process::{chdir, chroot};

use crate::cgroup::{CGROUP_ROOT, enable_controllers};

/// A step of the set-up failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}")]
pub struct MountError {
    action: &'static str,
    path: &'static str,
    source: io::Error,
}

struct Entry {
    target: &'static str,
    fstype: &'static str,
    flags: MountFlags,
    data: &'static CStr,
}

const NOSUID: MountFlags = MountFlags::NOSUID;
const CLOSED: MountFlags = NOSUID.union(MountFlags::NOEXEC).union(MountFlags::NODEV);
/// Filesystems that are required to run containers, in the order of mounting.
const MOUNTS: &[Entry] = &[
    Entry {
        target: "/proc",
        fstype: "proc",
        flags: CLOSED,
        data: c"",
    },
    Entry {
        target: "/sys",
        fstype: "sysfs",
        flags: CLOSED,
        data: c"",
    },
    Entry {
        target: CGROUP_ROOT,
        fstype: "cgroup2",
        flags: CLOSED,
        data: c"nsdelegate",
    },
    Entry {
        target: "/dev",
        fstype: "devtmpfs",
        flags: NOSUID.union(MountFlags::NOEXEC),
        data: c"mode=0755",
    },
    Entry {
        target: "/dev/pts",
        fstype: "devpts",
        flags: NOSUID.union(MountFlags::NOEXEC),
        data: c"gid=5,mode=0620,ptmxmode=0666",
    },
    Entry {
        target: "/dev/shm",
        fstype: "tmpfs",
        flags: CLOSED,
        data: c"mode=1777",
    },
    Entry {
        target: "/dev/mqueue",
        fstype: "mqueue",
        flags: CLOSED,
        data: c"",
    },
    Entry {
        target: "/run",
        fstype: "tmpfs",
        flags: NOSUID.union(MountFlags::NODEV),
        data: c"mode=0755",
    },
    Entry {
        target: "/tmp",
        fstype: "tmpfs",
        flags: CLOSED,
        data: c"mode=1777",
    },
];

/// Mounts everything, makes the root filesystem read-only, and turns cgroup controllers on.
///
/// # Errors
///
/// [`MountError`] for the first step that failed; the guest is unusable then.
pub fn set_up() -> Result<(), MountError> {
    for path in ["/proc", "/sys", "/dev", "/run", "/tmp"] {
        make_dir(path)?;
    }
    seal_root()?;
    for entry in MOUNTS {
        if entry.target.starts_with("/dev/") {
            make_dir(entry.target)?;
        }
        match mount(
            entry.fstype,
            entry.target,
            entry.fstype,
            entry.flags,
            entry.data,
        ) {
            // The kernel has already mounted it.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => return Err(failed("mount", entry.target, error.into())),
        }
    }
    enable_controllers(Path::new(CGROUP_ROOT))
        .map_err(|error| failed("enable controllers of", CGROUP_ROOT, error))
}

/// Makes the initramfs read-only, and gives the root mount a parent.
///
/// Read-only, because it contains the agent's own executable: a container process that obtained
/// `/proc/PID/exe` of a process that has not executed its command yet could otherwise overwrite the
/// agent (CVE-2019-5736). A mount with a parent, because pivot_root(2) refuses to leave the
/// kernel's initial root mount.
fn seal_root() -> Result<(), MountError> {
    mount_bind("/", "/run").map_err(|e| failed("bind the root filesystem to", "/run", e.into()))?;
    chdir("/run").map_err(|e| failed("enter", "/run", e.into()))?;
    mount_move(".", "/").map_err(|e| failed("move the root filesystem to", "/", e.into()))?;
    chroot(".").map_err(|e| failed("change the root to", "/", e.into()))?;
    chdir("/").map_err(|e| failed("enter", "/", e.into()))?;
    mount_remount("/", MountFlags::RDONLY, c"").map_err(|e| failed("make read-only", "/", e.into()))
}

fn make_dir(path: &'static str) -> Result<(), MountError> {
    match rustix::fs::mkdirat(CWD, path, rustix::fs::Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(failed("create", path, error.into())),
    }
}

fn failed(action: &'static str, path: &'static str, source: io::Error) -> MountError {
    MountError {
        action,
        path,
        source,
    }
}
