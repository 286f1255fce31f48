//! The host's side of a socket device: where the streams of host programs come from, and where
//! those of the guest lead.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

/// What stands for the host's programs. Its streams are Unix sockets; the device makes them
/// non-blocking.
pub trait VsockHost: fmt::Debug + Send {
    /// Readable when [`Self::accept`] may have something. The same for the host side's life.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The next stream of a host program, which begins with the line `CONNECT <port>`; `None`
    /// when nobody waits. Never blocks.
    ///
    /// # Errors
    /// When descriptors or memory run out; it is tried again later.
    fn accept(&mut self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Whether it makes sockets, connects them to paths and removes paths: all of that is refused
    /// to threads that serve no such host side.
    fn uses_paths(&self) -> bool {
        true
    }

    /// A stream to the host program that serves `port` for the guest. Never blocks.
    ///
    /// # Errors
    /// When there is none; the guest's connection is refused.
    fn connect(&mut self, port: u32) -> io::Result<OwnedFd>;
}

/// Host programs connect to a socket that was handed in; the guest reaches nobody but
/// listeners in this process.
#[derive(Debug)]
pub(super) struct Handed(pub(super) Option<UnixListener>);

impl VsockHost for Handed {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }

    fn accept(&mut self) -> io::Result<Option<OwnedFd>> {
        let Some(listener) = &self.0 else {
            return Ok(None);
        };
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream.into())),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(error),
                },
            }
        }
    }

    fn uses_paths(&self) -> bool {
        false
    }

    fn connect(&mut self, _port: u32) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }
}
