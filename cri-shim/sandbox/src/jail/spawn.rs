//! Starts a process in a PID namespace of its own, and prepares it.
#![allow(unsafe_code)] // unshare, close_range, mallopt

use std::io;

use podvisor_host::blocking::in_thread;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::own_user::can_change_identity;

/// Runs `start`, which starts a process: it is the first of a new PID namespace, in which it cannot
/// see or signal processes outside, and whose processes end with it. Without the privilege, the
/// process stays in this namespace.
///
/// # Errors
/// The error of `start`, or the kernel creates no thread or namespace.
pub fn spawn<T: Send>(start: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    if !can_change_identity() {
        return start();
    }
    // The PID namespace of a thread's next process is a property of the thread, which ends.
    in_thread(|| {
        // SAFETY: only the namespace of this thread's children changes; descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWPID)? };
        start()
    })?
}

/// Closes all files that this process inherited except stdin, stdout and stderr: its parent may
/// have been careless. A kernel without the call (before 5.9) leaves them open.
///
/// # Safety
/// No value in this process owns a descriptor above 2, and no other thread runs.
pub(crate) unsafe fn close_inherited() {
    // SAFETY: by the contract of this function, nothing owns what is closed.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
}

/// Arenas of the C library's allocator: threads that move bytes share them.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

/// Keeps the C library's allocator from having an arena for each thread, of memory that others do
/// not get, and from opening files. By default it reads the number of CPUs from `/sys` once it has
/// nine arenas, which would kill a jailed process.
#[cfg(target_env = "gnu")]
pub fn limit_arenas() {
    // SAFETY: only sets a number of the allocator, which is allowed at any time.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
}

/// Allocators of other C libraries read no file.
#[cfg(not(target_env = "gnu"))]
pub fn limit_arenas() {}
