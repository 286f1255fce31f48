//! A tap in a private network namespace of the harness.
#![allow(unsafe_code)] // unshare, TUNSETIFF, a descriptor that children inherit

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The host's address on the tap; the guest's is 10.9.0.2 (`benches/guest/net.c`).
const HOST: &str = "10.9.0.1/24";

/// The open tap, which every child inherits under the same number.
#[derive(Debug)]
pub(super) struct Tap(File);

impl Tap {
    /// Enters a new network namespace and creates a tap there. Requires root.
    pub(super) fn new() -> Result<Self> {
        // SAFETY: only the calling thread's network namespace changes.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error())
                .context("no network namespace can be made: run as root");
        }
        let tap = File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .context("/dev/net/tun cannot be opened: load the module `tun`")?;
        // SAFETY: an ifreq of zeroes is a valid one.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
            *to = (*from).cast_signed();
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = i16::try_from(flags)?;
        // SAFETY: TUNSETIFF reads and writes an ifreq.
        let made = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if made != 0 {
            return Err(io::Error::last_os_error()).context("no tap can be made");
        }
        // SAFETY: clears FD_CLOEXEC of a descriptor of ours.
        if unsafe { libc::fcntl(tap.as_raw_fd(), libc::F_SETFD, 0) } != 0 {
            return Err(io::Error::last_os_error()).context("the tap cannot be left to children");
        }
        ip(&format!("addr add {HOST} dev tap0"))?;
        ip("link set tap0 up")?;
        Ok(Self(tap))
    }

    /// Returns its descriptor number.
    pub(super) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn ip(arguments: &str) -> Result<()> {
    let mut command = Command::new("/bin/busybox");
    let status = command.arg("ip").args(arguments.split(' ')).status();
    if !status.context("busybox cannot be started")?.success() {
        bail!("`ip {arguments}` failed");
    }
    Ok(())
}
