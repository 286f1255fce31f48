//! The machine around the loader: the kernel's own file systems, and the way to power off.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;

use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};

use crate::console;
use crate::error::LoaderError;

/// The I/O port by which a guest without ACPI powers itself off, and what to write there: sleep type
/// 5 and sleep enable.
const POWER_OFF: (u64, u8) = (0x600, 0x34);

/// Where files that are made here are: in memory, without a limit of their size.
pub(crate) const SCRATCH: &str = "/scratch";

/// Mounts what the kernel itself serves.
pub(crate) fn mount_kernel_file_systems() -> Result<(), LoaderError> {
    for (what, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("ramfs", SCRATCH),
    ] {
        // Some are in the archive.
        let _ = fs::create_dir(target);
        mount(what, target, what, MountFlags::empty(), None).map_err(|source| {
            LoaderError::KernelFileSystem {
                what,
                target,
                source,
            }
        })?;
    }
    Ok(())
}

/// Powers the machine off; returns only if it does not obey.
pub(crate) fn power_off() {
    console::drain();
    let (port, value) = POWER_OFF;
    // After an error, the next way is tried.
    let _ = OpenOptions::new()
        .write(true)
        .open("/dev/port")
        .and_then(|ports| ports.write_all_at(&[value], port));
    let _ = reboot(RebootCommand::Restart);
}
