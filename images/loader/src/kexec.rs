//! From one kernel to the next.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use podvisor_boot_entries::cmdline::CmdlineTooLong;
use podvisor_boot_entries::limits::CMDLINE_BYTES;
use rustix::system::{RebootCommand, reboot};

use crate::console;
use crate::error::LoaderError;
use crate::image::Image;
use crate::sys;

/// Loading reads megabytes: it may take this many times as long as other steps.
pub(crate) const LOAD_FACTOR: u32 = 5;

/// Loads a kernel, to be started by [`start`].
pub(crate) fn load(image: &Image, title: &str, line: &str) -> Result<(), LoaderError> {
    let max = usize::try_from(image.header.cmdline_bytes).unwrap_or(usize::MAX);
    let max = max.min(CMDLINE_BYTES);
    if line.len() > max {
        return Err(LoaderError::Cmdline(CmdlineTooLong {
            title: title.to_owned(),
            bytes: line.len(),
            max,
        }));
    }
    // Disks' files may hold anything; the line ends at the first NUL.
    let line: Vec<u8> = line.bytes().take_while(|byte| *byte != 0).collect();
    let line = CString::new(line).unwrap_or_default();
    sys::kexec_file_load(&image.kernel, image.initrd.as_ref(), &line).map_err(|source| {
        LoaderError::Load {
            file: image.name.clone(),
            source,
        }
    })
}

/// Starts the kernel that was loaded.
///
/// Each virtio driver is taken off its device before, which resets it: what a device would still
/// write then lands in no memory that the next kernel uses.
pub(crate) fn start() -> Result<std::convert::Infallible, LoaderError> {
    console::drain();
    for driver in names_in(Path::new("/sys/bus/virtio/drivers")) {
        let driver = Path::new("/sys/bus/virtio/drivers").join(driver);
        for device in names_in(&driver) {
            if device.starts_with("virtio") {
                // The kernel's shutdown resets it as well.
                let _ = fs::write(driver.join("unbind"), &device);
            }
        }
    }
    match reboot(RebootCommand::Kexec) {
        Err(error) => Err(LoaderError::Start(error)),
        // Never: the machine is another one by then.
        Ok(()) => Err(LoaderError::Start(rustix::io::Errno::AGAIN)),
    }
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
