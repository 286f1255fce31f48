//! Vectored file and socket I/O on guest memory without a copy, behind a safe face.
#![allow(unsafe_code)] // preadv, readv and their kin on memory that no Rust reference may cover

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// Reads from `file` at byte `offset` into `slices`, in order, as far as one system call goes.
/// Returns the number of bytes read; 0 is the end of the file.
///
/// # Errors
/// What `preadv(2)` says; an interrupted call is tried again.
pub fn read_at(
    file: BorrowedFd<'_>,
    slices: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let guards: Vec<_> = slices.iter().map(VolatileSlice::ptr_guard_mut).collect();
    let iovecs: Vec<_> = guards
        .iter()
        .map(|g| libc::iovec {
            iov_base: g.as_ptr().cast(),
            iov_len: g.len(),
        })
        .collect();
    let count = iovec_count(&iovecs)?;
    retry(|| {
        // SAFETY: every iovec covers memory that its guard keeps mapped and writable for the
        // length of the call; the kernel is the only one to write through it.
        unsafe { libc::preadv64(file.as_raw_fd(), iovecs.as_ptr(), count, offset) }
    })
}

/// Writes `slices`, in order, to `file` at byte `offset`, as far as one system call goes.
/// Returns the number of bytes written.
///
/// # Errors
/// What `pwritev(2)` says; an interrupted call is tried again.
pub fn write_at(
    file: BorrowedFd<'_>,
    slices: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let guards: Vec<_> = slices.iter().map(VolatileSlice::ptr_guard).collect();
    let iovecs: Vec<_> = guards
        .iter()
        .map(|g| libc::iovec {
            iov_base: g.as_ptr().cast_mut().cast(),
            iov_len: g.len(),
        })
        .collect();
    let count = iovec_count(&iovecs)?;
    retry(|| {
        // SAFETY: every iovec covers memory that its guard keeps mapped for the length of the
        // call; pwritev only reads from it.
        unsafe { libc::pwritev64(file.as_raw_fd(), iovecs.as_ptr(), count, offset) }
    })
}

/// Reads from a non-blocking socket into `slices`, in order, as far as one system call goes.
/// Returns the number of bytes read; 0 is the end of the stream.
///
/// # Errors
/// What `readv(2)` says; an interrupted call is tried again.
pub fn receive(socket: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let guards: Vec<_> = slices.iter().map(VolatileSlice::ptr_guard_mut).collect();
    let iovecs: Vec<_> = guards
        .iter()
        .map(|g| libc::iovec {
            iov_base: g.as_ptr().cast(),
            iov_len: g.len(),
        })
        .collect();
    let count = iovec_count(&iovecs)?;
    retry(|| {
        // SAFETY: every iovec covers memory that its guard keeps mapped and writable for the
        // length of the call; the kernel is the only one to write through it.
        unsafe { libc::readv(socket.as_raw_fd(), iovecs.as_ptr(), count) }
    })
}

/// Writes `slices`, in order, to a socket, as far as one system call goes without waiting.
/// Returns the number of bytes written. A closed socket is an error, never a signal.
///
/// # Errors
/// What `sendmsg(2)` says; an interrupted call is tried again.
pub fn send(socket: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let guards: Vec<_> = slices.iter().map(VolatileSlice::ptr_guard).collect();
    let mut iovecs: Vec<_> = guards
        .iter()
        .map(|g| libc::iovec {
            iov_base: g.as_ptr().cast_mut().cast(),
            iov_len: g.len(),
        })
        .collect();
    // SAFETY: a msghdr of zeroes is a valid one: no name, no data, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: the message points to the iovecs above, each of which covers memory that its
        // guard keeps mapped for the length of the call; sendmsg only reads from it.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }
    })
}

fn file_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn iovec_count(iovecs: &[libc::iovec]) -> io::Result<i32> {
    i32::try_from(iovecs.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
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
