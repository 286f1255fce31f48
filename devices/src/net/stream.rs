//! A stream socket as a backend: each frame follows its length, in four bytes, big-endian.
//!
//! This is how `passt` and QEMU's `-netdev stream` carry frames. The format has no field for
//! offloads, so none are offered. If the peer violates the protocol or closes the connection, the
//! backend fails permanently: nothing is received or sent any more.
#![allow(unsafe_code)] // sendmsg on guest memory

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags, SocketType, recv, send, sockopt};
use vm_memory::VolatileSlice;

use super::header::{HEADER_LEN, MAX_FRAME};
use super::nic::Nic;
use super::offloads::Offloads;
use super::segments::{Guards, with_iovecs};

/// Bytes of the length prefix.
const PREFIX: usize = 4;

/// The longest frame that peers accept.
const MAX_SENT: usize = 65_535;

/// Bytes of the receive buffer: the longest frame and many of the usual size.
const RECEIVE_BUFFER: usize = 128 << 10;

/// Why a descriptor cannot be a network device's backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Not a socket.
    #[error("the descriptor is not a socket")]
    NotASocket(#[source] io::Error),
    /// A socket of another type.
    #[error("the socket is not of SOCK_STREAM")]
    NotAStream,
}

/// A connected stream socket whose peer carries frames.
#[derive(Debug)]
pub struct FrameStream {
    fd: OwnedFd,
    received: Received,
    /// A frame of which `sent` bytes were sent; empty if none is left.
    left: Vec<u8>,
    sent: usize,
    has_failed: bool,
}

impl FrameStream {
    /// Takes a stream socket that the caller has connected.
    ///
    /// # Errors
    /// If `fd` is not such a socket.
    pub fn new(fd: OwnedFd) -> Result<Self, StreamError> {
        match sockopt::socket_type(&fd) {
            Ok(SocketType::STREAM) => {}
            Ok(_) => return Err(StreamError::NotAStream),
            Err(error) => return Err(StreamError::NotASocket(error.into())),
        }
        Ok(Self {
            fd,
            received: Received::default(),
            left: Vec::with_capacity(PREFIX.saturating_add(MAX_SENT)),
            sent: 0,
            has_failed: false,
        })
    }

    /// Records a permanent failure: the peer has closed the connection or violates the protocol.
    /// After any other error, for example if the host has no memory at the moment, nothing was sent
    /// or received.
    fn failed(&mut self, error: io::Error) -> io::Error {
        use io::ErrorKind as K;
        let is_final = matches!(
            error.kind(),
            K::BrokenPipe
                | K::ConnectionReset
                | K::ConnectionAborted
                | K::NotConnected
                | K::UnexpectedEof
                | K::InvalidData
        );
        if is_final && !self.has_failed {
            self.has_failed = true;
            self.left.clear();
            tracing::warn!(%error, "net: the stream of frames has failed; the link is dead");
        }
        error
    }

    fn is_alive(&self) -> io::Result<()> {
        match self.has_failed {
            true => Err(io::ErrorKind::NotConnected.into()),
            false => Ok(()),
        }
    }

    /// Sends the length and the frame, or as much of them as the socket takes.
    fn send_now(&self, prefix: [u8; PREFIX], frame: &[VolatileSlice<'_>]) -> io::Result<usize> {
        let guards = Guards::readable(frame);
        let prefix = libc::iovec {
            iov_base: prefix.as_ptr().cast_mut().cast(),
            iov_len: PREFIX,
        };
        with_iovecs(prefix, &guards, |iovecs, count| {
            // SAFETY: a msghdr of zeroes is a valid one.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = iovecs.cast_mut();
            message.msg_iovlen = usize::try_from(count).unwrap_or(0);
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: the first iovec covers `prefix`, the others guest memory that stays mapped
            // while it is borrowed; sendmsg only reads from them.
            unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, flags) }
        })
    }

    /// Stores the part that the socket did not take.
    fn keep(&mut self, prefix: [u8; PREFIX], frame: &[VolatileSlice<'_>], sent: usize) {
        self.left.clear();
        self.left.extend_from_slice(&prefix);
        for slice in frame {
            let begin = self.left.len();
            self.left.resize(begin.saturating_add(slice.len()), 0);
            if let Some(room) = self.left.get_mut(begin..) {
                slice.copy_to(room);
            }
        }
        self.sent = sent;
    }
}

impl Nic for FrameStream {
    fn offloads(&self) -> Offloads {
        Offloads::NONE
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some(rest) = self.left.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(&self.fd, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => self.sent = self.sent.saturating_add(sent),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.failed(error.into())),
            }
        }
        self.left.clear();
        self.sent = 0;
        Ok(())
    }

    fn send(&mut self, _: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()> {
        self.is_alive()?;
        if !self.left.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = frame
            .iter()
            .fold(0usize, |sum, slice| sum.saturating_add(slice.len()));
        if len > MAX_SENT {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // At most MAX_SENT.
        let prefix = u32::try_from(len).unwrap_or(0).to_be_bytes();
        let sent = match self.send_now(prefix, frame) {
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(self.failed(error)),
        };
        if sent < len.saturating_add(PREFIX) {
            self.keep(prefix, frame, sent);
        }
        Ok(())
    }

    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize> {
        self.is_alive()?;
        *header = [0; HEADER_LEN];
        loop {
            match self.received.next() {
                Ok(Some(bytes)) => return Ok(copy(bytes, frame)),
                Ok(None) => {}
                Err(error) => return Err(self.failed(error)),
            }
            let room = self.received.room();
            let got = match recv(&self.fd, room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, got)) => Ok(got),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => Err(error.into()),
            };
            match got {
                Ok(got) => self.received.grew(got),
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Does nothing: there are no offloads.
    fn set_offloads(&mut self, _: Offloads) -> io::Result<()> {
        Ok(())
    }
}

/// Copies as much of a frame as there is room for; returns the number of bytes.
fn copy(bytes: &[u8], frame: &[VolatileSlice<'_>]) -> usize {
    let mut rest = bytes;
    for slice in frame {
        let (now, later) = rest.split_at_checked(slice.len()).unwrap_or((rest, &[]));
        slice.copy_from(now);
        rest = later;
    }
    bytes.len().saturating_sub(rest.len())
}

/// Received bytes that are not a complete frame yet, or frames that were not taken yet.
#[derive(Debug, Default)]
struct Received {
    /// It has [`RECEIVE_BUFFER`] bytes once anything was received.
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Received {
    /// Returns the next frame, if it was received completely.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        let bytes = self.buffer.get(self.begin..self.end).unwrap_or(&[]);
        let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let len = u32::from_be_bytes(*prefix);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len > MAX_FRAME {
            let text = format!("a frame of {len} bytes, more than {MAX_FRAME}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let frame = rest.get(..len);
        if frame.is_some() {
            self.begin = self.begin.saturating_add(PREFIX).saturating_add(len);
        }
        Ok(frame)
    }

    /// Returns the buffer for the next bytes: after those that are here, with room for the longest
    /// frame.
    fn room(&mut self) -> &mut [u8] {
        if self.buffer.is_empty() {
            self.buffer.resize(RECEIVE_BUFFER, 0);
        }
        if self.begin > 0 {
            self.buffer.copy_within(self.begin..self.end, 0);
            self.end = self.end.saturating_sub(self.begin);
            self.begin = 0;
        }
        self.buffer.get_mut(self.end..).unwrap_or(&mut [])
    }

    fn grew(&mut self, got: usize) {
        self.end = self.end.saturating_add(got).min(self.buffer.len());
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
