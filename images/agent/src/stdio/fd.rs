//! A pipe's or terminal's descriptor in the event loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Our end of a process's pipe, or the master of its terminal. Clones share the descriptor.
#[derive(Debug, Clone)]
pub struct Endpoint {
    fd: Arc<AsyncFd<OwnedFd>>,
}

impl Endpoint {
    /// Takes over a descriptor and makes it non-blocking.
    ///
    /// Non-blocking is a property of the open file, which must therefore not be shared with the
    /// process: that holds for a pipe's other end and for a terminal's slave.
    ///
    /// # Errors
    ///
    /// If the descriptor cannot be polled (a regular file).
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        let interest = match flags & OFlags::ACCMODE {
            OFlags::WRONLY => Interest::WRITABLE,
            OFlags::RDWR => Interest::READABLE | Interest::WRITABLE,
            _ => Interest::READABLE,
        };
        Ok(Self {
            fd: Arc::new(crate::sys::watch(fd, interest)?),
        })
    }

    /// Reads available bytes, and waits for at least one; 0 is the end of output.
    ///
    /// # Errors
    ///
    /// Errors of read(2), except for the two with which a terminal ends.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.fd.readable().await?;
            match ready.try_io(|fd| read_once(fd.as_fd(), buffer)) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// Reads available bytes without waiting; `None` if there are none now.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::read`].
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match read_once(self.fd.as_fd(), buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes all bytes, and waits for room as often as necessary.
    ///
    /// # Errors
    ///
    /// Errors of write(2): `BrokenPipe` if the process has closed its end.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.fd.writable().await?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd, bytes)?)) {
                Ok(Ok(count)) => bytes = bytes.get(count..).unwrap_or_default(),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn read_once(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Ok(count) => return Ok(count),
            Err(Errno::INTR) => {}
            // A terminal whose last slave was closed.
            Err(Errno::IO) => return Ok(0),
            Err(error) => return Err(error.into()),
        }
    }
}
