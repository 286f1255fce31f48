//! System calls for which there are no safe wrappers.
#![allow(unsafe_code)] // Two raw system calls; each block states why it is sound.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::ioctl::{Setter, ioctl, opcode};

/// `BLKROSET`.
const SET_READ_ONLY: rustix::ioctl::Opcode = opcode::none(0x12, 93);
/// `KEXEC_FILE_NO_INITRAMFS`.
const NO_INITRAMFS: libc::c_ulong = 4;

/// Makes a block device refuse writes.
pub(crate) fn set_read_only(device: impl AsFd) -> io::Result<()> {
    // SAFETY: BLKROSET reads one int from the pointer that it gets.
    let request = unsafe { Setter::<SET_READ_ONLY, libc::c_int>::new(1) };
    // SAFETY: the descriptor is borrowed for the call, and the request matches the opcode.
    unsafe { ioctl(device, request) }.map_err(Into::into)
}

/// Loads a kernel to be started by `reboot(KEXEC)`.
pub(crate) fn kexec_file_load(
    kernel: impl AsFd,
    initrd: Option<impl AsFd>,
    cmdline: &CStr,
) -> io::Result<()> {
    let flags = if initrd.is_some() { 0 } else { NO_INITRAMFS };
    let initrd = initrd.as_ref().map_or(-1, |file| file.as_fd().as_raw_fd());
    // SAFETY: the descriptors are open during the call, and the command line is as long as is said,
    // its terminator included; the kernel copies it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_fd().as_raw_fd(),
            initrd,
            cmdline.count_bytes() + 1,
            cmdline.as_ptr(),
            flags,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
