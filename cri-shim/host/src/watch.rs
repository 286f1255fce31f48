//! Registers descriptors with the event loop.
#![allow(unsafe_code)] // One call whose condition the type system cannot hold.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the event loop, to wait until it is readable.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    watched(fd, Interest::READABLE)
}

/// Registers a descriptor with the event loop, to wait until it is readable or writable.
pub fn both(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    watched(fd, Interest::READABLE | Interest::WRITABLE)
}

fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the value owns its descriptor, which stays the same and open until it is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    watched.map_err(Into::into)
}
