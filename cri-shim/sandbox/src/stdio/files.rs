//! Files of any kind, read and written by threads.

use std::os::fd::BorrowedFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::StdioError;

/// Size of the buffer for moving bytes.
pub(super) const BUFFER: usize = 64 << 10;

/// Stack size of a thread that moves bytes: its buffer is not on it.
const STACK: usize = 128 << 10;

/// Starts a thread that moves bytes.
pub(crate) fn spawn(
    name: &'static str,
    run: impl FnOnce() + Send + 'static,
) -> Result<(), StdioError> {
    let builder = thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK);
    match builder.spawn(run) {
        Ok(_) => Ok(()),
        Err(source) => Err(StdioError::SetUp { name, source }),
    }
}

/// Reads at least one byte, unless the file has ended.
pub fn read(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::read(from, &mut *buffer) {
            Err(Errno::INTR) => {}
            // The file may be shared with a program that made it non-blocking.
            Err(Errno::AGAIN) => wait_for(from, PollFlags::IN)?,
            done => return done,
        }
    }
}

/// Writes all of `bytes`. A file that another program made non-blocking is waited for.
pub fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(to, PollFlags::OUT)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for(file: BorrowedFd<'_>, flags: PollFlags) -> Result<(), Errno> {
    match poll(&mut [PollFd::new(&file, flags)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
