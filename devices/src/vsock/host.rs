//! The host's side of a socket device: where streams of host programs come from, and where streams
//! of the guest lead.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

/// The interface to the host's programs. Its streams are Unix sockets; the device makes them
/// non-blocking.
pub trait VsockHost: fmt::Debug + Send {
    /// Readable when [`Self::accept`] may return a stream. Always the same descriptor.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the next stream of a host program, which starts with the line `CONNECT <port>`;
    /// `None` if no program is waiting. Never blocks.
    ///
    /// # Errors
    /// If descriptors or memory run out; it is retried later.
    fn accept(&mut self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Whether it creates sockets, connects them to paths and removes paths: threads that serve no
    /// such host side are not permitted to make these system calls.
    fn uses_paths(&self) -> bool {
        true
    }

    /// Opens a stream to the host program that serves `port` for the guest. Never blocks.
    ///
    /// # Errors
    /// If no program does; the guest's connection is refused.
    fn connect(&mut self, port: u32) -> io::Result<OwnedFd>;
}

/// Host programs connect to a socket that was passed in; the guest can only reach listeners in this
/// process.
#[derive(Debug)]
pub(super) struct ListenerHost(pub(super) Option<UnixListener>);

impl VsockHost for ListenerHost {
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
