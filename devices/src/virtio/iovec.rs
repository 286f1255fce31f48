//! Safe wrappers for vectored file and socket I/O on guest memory without a copy.
#![allow(unsafe_code)] // preadv, readv and the like on memory that no Rust reference may cover

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// The maximum number of slices per system call. The rest is left to the next call, so that the
/// list fits on the stack.
const BATCH: usize = 256;

/// Reads from `file` at byte `offset` into `slices`, in order, without the first `skip` bytes of
/// the first one, with one system call. Returns the number of bytes read, which may be less than
/// asked for; 0 is the end of the file.
///
/// # Errors
/// Errors of `preadv(2)`; an interrupted call is retried.
pub fn read_at(
    file: BorrowedFd<'_>,
    slices: &[VolatileSlice<'_>],
    skip: usize,
    offset: u64,
) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let mut room = Room::new();
    let iovecs = room.fill(slices, skip);
    let (list, count) = iovecs.as_raw();
    retry(|| {
        // SAFETY: `IoVecs` points to `count` pieces of memory that the slices keep mapped and
        // writable for the length of the call; the kernel is the only one to write through it.
        unsafe { libc::preadv64(file.as_raw_fd(), list, count, offset) }
    })
}

/// Writes `slices`, in order, without the first `skip` bytes of the first one, to `file` at byte
/// `offset`, with one system call. Returns the number of bytes written, which may be less than
/// asked for.
///
/// # Errors
/// Errors of `pwritev(2)`; an interrupted call is retried.
pub fn write_at(
    file: BorrowedFd<'_>,
    slices: &[VolatileSlice<'_>],
    skip: usize,
    offset: u64,
) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let mut room = Room::new();
    let iovecs = room.fill(slices, skip);
    let (list, count) = iovecs.as_raw();
    retry(|| {
        // SAFETY: `IoVecs` points to `count` pieces of memory that the slices keep mapped for the
        // length of the call; pwritev only reads from it.
        unsafe { libc::pwritev64(file.as_raw_fd(), list, count, offset) }
    })
}

/// Reads from a non-blocking socket into `slices`, in order, with one system call. Returns the
/// number of bytes read; 0 is the end of the stream.
///
/// # Errors
/// Errors of `readv(2)`; an interrupted call is retried.
pub fn receive(socket: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut room = Room::new();
    let iovecs = room.fill(slices, 0);
    let (list, count) = iovecs.as_raw();
    retry(|| {
        // SAFETY: `IoVecs` points to `count` pieces of memory that the slices keep mapped and
        // writable for the length of the call; the kernel is the only one to write through it.
        unsafe { libc::readv(socket.as_raw_fd(), list, count) }
    })
}

/// Writes `slices`, in order, to a socket, with one system call that does not wait. Returns the
/// number of bytes written. A closed socket is an error, never a signal.
///
/// # Errors
/// Errors of `sendmsg(2)`; an interrupted call is retried.
pub fn send(socket: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut room = Room::new();
    let iovecs = room.fill(slices, 0);
    // SAFETY: a msghdr of zeroes is a valid one: no name, no data, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.list;
    message.msg_iovlen = iovecs.count;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: the message points to `IoVecs` above, which points to memory that the slices
        // keep mapped for the length of the call; sendmsg only reads from it.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }
    })
}

/// Room for the list of one system call. It stays where it is made: a copy of it would take longer
/// than a short list's use, and so would initializing all of it.
struct Room([MaybeUninit<libc::iovec>; BATCH]);

impl Room {
    const fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; BATCH])
    }

    /// Returns the first slices of a list, without the first `skip` bytes of the first one, in the
    /// form that the kernel takes.
    fn fill<'s>(&'s mut self, slices: &'s [VolatileSlice<'_>], mut skip: usize) -> IoVecs<'s> {
        let mut count = 0usize;
        for (entry, slice) in self.0.iter_mut().zip(slices) {
            let skipped = std::mem::take(&mut skip).min(slice.len());
            let start = slice.ptr_guard_mut().as_ptr();
            entry.write(libc::iovec {
                iov_base: start.wrapping_add(skipped).cast(),
                iov_len: slice.len().saturating_sub(skipped),
            });
            count = count.saturating_add(1);
        }
        IoVecs {
            list: self.0.as_mut_ptr().cast(),
            count,
            _slices: PhantomData,
        }
    }
}

/// `count` initialized entries at `list`, for system calls.
struct IoVecs<'s> {
    list: *mut libc::iovec,
    /// At most `BATCH`.
    count: usize,
    /// The slices keep their memory mapped. (Their `PtrGuard` has an effect only on Xen, which this
    /// crate is not built for.)
    _slices: PhantomData<&'s [VolatileSlice<'s>]>,
}

impl IoVecs<'_> {
    /// Returns the list's address and length.
    fn as_raw(&self) -> (*const libc::iovec, i32) {
        (self.list, i32::try_from(self.count).unwrap_or(0))
    }
}

fn file_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(done) = usize::try_from(call()) {
            return Ok(done);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
