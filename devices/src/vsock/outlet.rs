//! What the guest sends to a host program, and the socket that leads there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::GuestRam;
use crate::virtio::{Chain, Fault, SpareList, iovec};

/// A buffer that is larger than this is freed once it is empty.
const MAX_IDLE_BUFFER: usize = 16 << 10;

/// A socket and the bytes that are not written to it yet.
#[derive(Debug)]
pub(super) struct Outlet {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were sent.
    head: usize,
    /// The maximum size of `buffer`: half as large again as what the guest may have in it, so that
    /// bytes that stay are moved once for as many that were sent, or twice at most.
    limit: usize,
    writable: bool,
}

/// The host program no longer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed;

impl Outlet {
    /// Creates the outlet of a connection whose guest may have `buf_alloc` bytes in flight.
    pub(super) fn new(socket: OwnedFd, buf_alloc: u32) -> Self {
        let credit = usize::try_from(buf_alloc).unwrap_or(usize::MAX);
        Self {
            socket,
            buffer: Vec::new(),
            head: 0,
            limit: credit.saturating_add(credit >> 1),
            writable: true,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Bytes that are not written to the socket yet.
    pub(super) fn pending(&self) -> &[u8] {
        self.buffer.get(self.head..).unwrap_or(&[])
    }

    fn clear(&mut self) {
        self.head = 0;
        if self.buffer.capacity() > MAX_IDLE_BUFFER {
            self.buffer = Vec::new();
        } else {
            self.buffer.clear();
        }
    }

    pub(super) fn set_writable(&mut self) {
        self.writable = true;
    }

    /// Sends as much of the buffer as the socket takes; returns the number of bytes.
    pub(super) fn flush(&mut self) -> Result<usize, Closed> {
        let mut done = 0usize;
        while self.writable && !self.buffer.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let pending = self.pending();
            match rustix::io::retry_on_intr(|| send(&self.socket, pending, flags)) {
                Ok(sent) => {
                    done = done.saturating_add(sent);
                    self.head = self.head.saturating_add(sent);
                    if self.head >= self.buffer.len() {
                        self.clear();
                    }
                }
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => {
                    self.clear();
                    return Err(Closed);
                }
            }
        }
        Ok(done)
    }

    /// Sends `len` bytes of the chain from `offset` on: directly from guest memory as far as the
    /// socket takes them; buffers the rest. Returns how much the socket took.
    pub(super) fn send_chain(
        &mut self,
        mem: &GuestRam,
        chain: &Chain,
        offset: usize,
        len: usize,
        scratch: &mut SpareList,
    ) -> Result<Result<usize, Closed>, Fault> {
        let mut sent = 0usize;
        if self.writable && self.buffer.is_empty() {
            let mut slices = scratch.take();
            chain.readable_slices(mem, offset, len, &mut slices)?;
            let result = iovec::send(self.socket.as_fd(), &slices);
            scratch.put_back(slices);
            match result {
                Ok(taken) => sent = taken.min(len),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok(Err(Closed)),
            }
            // A socket that took only a part is full: an event will report when it is writable
            // again.
            self.writable = sent == len;
        }
        let rest = len.saturating_sub(sent);
        if rest > 0 {
            self.keep(mem, chain, offset.saturating_add(sent), rest)?;
        }
        Ok(Ok(sent))
    }

    /// Copies `len` bytes of the chain to the end of the buffer.
    fn keep(
        &mut self,
        mem: &GuestRam,
        chain: &Chain,
        offset: usize,
        len: usize,
    ) -> Result<(), Fault> {
        let old = self.make_room(len);
        let result = match self.buffer.get_mut(old..) {
            Some(room) => chain.read(mem, offset, room),
            None => Ok(()),
        };
        if result.is_err() {
            self.buffer.truncate(old);
        }
        Ok(result?)
    }

    /// Adds `len` bytes to the end of the buffer, for the caller to fill; returns where they begin.
    fn make_room(&mut self, len: usize) -> usize {
        let needed = self.buffer.len().saturating_add(len);
        if self.head > self.buffer.len() >> 1 || needed > self.limit {
            self.buffer.drain(..self.head);
            self.head = 0;
        }
        let old = self.buffer.len();
        let needed = old.saturating_add(len);
        if needed > self.buffer.capacity() {
            let doubled = self.buffer.capacity().saturating_mul(2).min(self.limit);
            self.buffer
                .reserve_exact(needed.max(doubled).saturating_sub(old));
        }
        self.buffer.resize(needed, 0);
        old
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_buffer_that_is_never_empty_is_bounded() {
        const CREDIT: usize = 32 << 10;
        let (socket, _reader) = UnixStream::pair().unwrap();
        let mut outlet = Outlet::new(socket.into(), 32 << 10);
        let mut next = 0_u8;
        let mut expected = 0_u8;
        for step in (1..2000).cycle().take(20_000) {
            // The guest uses all of its credit, and the host program reads a few bytes.
            let room = outlet.make_room(CREDIT - outlet.pending().len());
            for byte in &mut outlet.buffer[room..] {
                *byte = next;
                next = next.wrapping_add(1);
            }
            assert!(outlet.buffer.capacity() <= CREDIT * 3 / 2);
            for byte in &outlet.pending()[..step] {
                assert_eq!(*byte, expected);
                expected = expected.wrapping_add(1);
            }
            outlet.head += step;
        }
    }
}
