//! Signals as bytes of a pipe, so that they are waited for with everything else.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::ioctl_fionbio;

use super::sys;

/// Those that only say that something has happened.
const NOTICES: [libc::c_int; 2] = [libc::SIGIO, libc::SIGCHLD];

/// Signals of this process: those that end it, the one of the port, and the one of programs that
/// have ended.
#[derive(Debug)]
pub struct Signals(File);

impl Signals {
    /// Takes them. There is one such value in a process.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take() -> io::Result<Self> {
        let (read, write) = io::pipe()?;
        let (read, write) = (OwnedFd::from(read), OwnedFd::from(write));
        ioctl_fionbio(&read, true)?;
        ioctl_fionbio(&write, true)?;
        sys::write_signals(
            &write,
            &[&NOTICES[..], &[libc::SIGTERM, libc::SIGINT]].concat(),
        )?;
        Ok(Self(File::from(read)))
    }

    /// Returns whether one has come that ends this process.
    pub(super) fn ends(&mut self) -> bool {
        let mut bytes = [0; 64];
        let mut ends = false;
        // It does not wait.
        while let Ok(count) = self.0.read(&mut bytes)
            && count > 0
        {
            let seen = bytes.get(..count).unwrap_or_default();
            ends |= seen.iter().any(|byte| !NOTICES.contains(&i32::from(*byte)));
        }
        ends
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
