//! Frames on a Unix stream socket: a length of four bytes (little-endian), then as many bytes.
//! Descriptors come as `SCM_RIGHTS` with a frame's first byte.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Longest frame in bytes: a specification of 1 MiB, three generated files as JSON arrays of
/// numbers, and room to spare.
pub(crate) const MAX_FRAME: usize = 4 << 20;

/// Most descriptors of one frame.
pub(crate) const MAX_FDS: usize = 64;

/// Bytes that are read at a time: a false length does not cost memory.
const READ_CHUNK: usize = 64 << 10;

const LENGTH_PREFIX: usize = size_of::<u32>();

/// An error of sending or receiving a frame. The connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The socket failed.
    #[error("control socket I/O failed")]
    Io(#[from] io::Error),
    /// A frame is too long.
    #[error("a frame of {0} bytes, but at most {MAX_FRAME} are allowed")]
    TooLong(usize),
    /// A frame has too many descriptors.
    #[error("too many file descriptors in a control message")]
    TooManyFds,
    /// The connection ended within a frame.
    #[error("the connection ended in the middle of a frame")]
    Cut,
    /// A frame's contents do not match the protocol.
    #[error("failed to decode a frame")]
    Json(#[from] serde_json::Error),
    /// A descriptor that a frame refers to did not come with it, or could not be opened here.
    #[error("a frame lacks a file descriptor")]
    MissingFd,
    /// An answer's kind does not match its request.
    #[error("an answer does not fit its request")]
    Answer,
    /// An answer reports more memory than the guest was launched for.
    #[error("a reply reports {grown} bytes of guest growth, more than the possible {most}")]
    Grown {
        /// The growth that the process reports.
        grown: u64,
        /// The possible growth.
        most: u64,
    },
    /// An answer has more groups than a process can be in.
    #[error("an answer has a user with {0} groups, more than Linux allows")]
    Groups(usize),
}

/// A frame that was received.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Receives frames, in one task.
#[derive(Debug)]
pub(crate) struct FrameReader {
    stream: Arc<UnixStream>,
}

impl FrameReader {
    pub(crate) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream }
    }

    /// Receives the next frame; `None` if the other side has closed the connection between frames.
    ///
    /// Not cancel-safe: the connection is out of step if this is dropped half-way.
    pub(crate) async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let mut length = [0; LENGTH_PREFIX];
        let (mut filled, fds) = self.first(&mut length).await?;
        if filled == 0 {
            return Ok(None);
        }
        while filled < LENGTH_PREFIX {
            filled += self.more(&mut length[filled..]).await?;
        }
        // 32 bits fit into a usize wherever podvisor runs.
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_FRAME {
            return Err(FrameError::TooLong(length));
        }
        let mut body = Vec::with_capacity(length.min(READ_CHUNK));
        while body.len() < length {
            let filled = body.len();
            body.resize(length.min(filled + READ_CHUNK), 0);
            let count = self.more(&mut body[filled..]).await?;
            body.truncate(filled + count);
        }
        Ok(Some(Frame { body, fds }))
    }

    /// Reads the start of a frame with its descriptors.
    async fn first(&self, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), FrameError> {
        let receive = || -> io::Result<_> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = recvmsg(
                &*self.stream,
                &mut [IoSliceMut::new(bytes)],
                &mut control,
                flags,
            )?;
            let mut fds = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            Ok((received.bytes, received.flags, fds))
        };
        let (count, flags, mut fds) = self.stream.async_io(Interest::READABLE, receive).await?;
        let is_cut = flags.contains(ReturnFlags::CTRUNC);
        if fds.len() > MAX_FDS || (is_cut && fds.len() == MAX_FDS) {
            return Err(FrameError::TooManyFds);
        }
        if is_cut {
            // This process cannot open more files, which only affects this frame: its request lacks
            // them.
            fds.clear();
        }
        Ok((count, fds))
    }

    /// Reads at least one byte. Descriptors that come here violate the protocol, and the kernel
    /// closes them, as there is no room for them.
    async fn more(&self, bytes: &mut [u8]) -> Result<usize, FrameError> {
        loop {
            self.stream.readable().await?;
            match self.stream.try_read(bytes) {
                Ok(0) => return Err(FrameError::Cut),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Sends frames, in one task.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    stream: Arc<UnixStream>,
}

impl FrameWriter {
    pub(crate) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream }
    }

    /// Sends a frame.
    ///
    /// Not cancel-safe: the connection is out of step if this is dropped half-way.
    pub(crate) async fn send(&mut self, body: &[u8], fds: &[OwnedFd]) -> Result<(), FrameError> {
        if body.len() > MAX_FRAME {
            return Err(FrameError::TooLong(body.len()));
        }
        if fds.len() > MAX_FDS {
            return Err(FrameError::TooManyFds);
        }
        let length = u32::try_from(body.len()).map_err(|_| FrameError::TooLong(body.len()))?;
        let length = length.to_le_bytes();
        let rights: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let first = || -> io::Result<usize> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !rights.is_empty() {
                // There is room for the maximum.
                control.push(SendAncillaryMessage::ScmRights(&rights));
            }
            let bytes = [IoSlice::new(&length), IoSlice::new(body)];
            let flags = SendFlags::NOSIGNAL;
            Ok(sendmsg(&*self.stream, &bytes, &mut control, flags)?)
        };
        let mut sent = self.stream.async_io(Interest::WRITABLE, first).await?;
        while sent < LENGTH_PREFIX + body.len() {
            let rest = match length.get(sent..).filter(|rest| !rest.is_empty()) {
                Some(rest) => rest,
                None => &body[sent - LENGTH_PREFIX..],
            };
            self.stream.writable().await?;
            match self.stream.try_write(rest) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
