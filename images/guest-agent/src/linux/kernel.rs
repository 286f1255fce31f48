//! What changes the whole system, and not a file of it.

use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_settime};

use super::sys;

/// What changes the whole system, and not a file of it.
pub trait Kernel {
    /// Makes the file system of an open file consistent, and keeps it so.
    ///
    /// # Errors
    /// The kernel's.
    fn freeze(&self, file: &File) -> io::Result<()>;

    /// Ends [`freeze`](Self::freeze).
    ///
    /// # Errors
    /// The kernel's; `EINVAL`: it is not frozen.
    fn thaw(&self, file: &File) -> io::Result<()>;

    /// Sets the clock to so long after 1970.
    ///
    /// # Errors
    /// The kernel's.
    fn set_clock(&self, since: Duration) -> io::Result<()>;
}

/// The kernel that this program runs on.
#[derive(Debug, Clone, Copy)]
pub struct ThisKernel;

impl Kernel for ThisKernel {
    fn freeze(&self, file: &File) -> io::Result<()> {
        sys::freeze(file)
    }

    fn thaw(&self, file: &File) -> io::Result<()> {
        sys::thaw(file)
    }

    fn set_clock(&self, since: Duration) -> io::Result<()> {
        let time =
            Timespec::try_from(since).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(clock_settime(ClockId::Realtime, time)?)
    }
}
