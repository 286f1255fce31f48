//! Starting a process in a PID namespace of its own, and its first steps.
#![allow(unsafe_code)] // unshare, close_range, mallopt

use std::io;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::can_change_identity;
use crate::blocking::in_thread;

/// Runs `start`, which starts a process: it is the first of a new PID namespace, in which it
/// sees and signals nobody, and whose end is the end of all that it may have started. Without
/// the privilege, the process stays in this namespace.
///
/// # Errors
/// What `start` fails with, or the kernel makes no thread or namespace.
pub fn spawn<T: Send>(start: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    if !can_change_identity() {
        return start();
    }
    // What the next process of a thread is born into is a property of the thread, which ends.
    in_thread(|| {
        // SAFETY: only the namespace of this thread's children changes; descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWPID)? };
        start()
    })?
}

/// Closes whatever files this process inherited beyond stdin, stdout and stderr: who started it
/// may have been careless. A kernel without the call (before 5.9) leaves them open.
///
/// # Safety
/// No value in this process owns a descriptor above 2, and no other thread runs.
pub(in crate::sandbox) unsafe fn close_inherited() {
    // SAFETY: by the contract of this function, nobody owns what is closed.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
}

/// Arenas of the C library's allocator: threads that move bytes share them.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

/// Has the C library's allocator need no file. Left alone, it reads the number of CPUs from
/// `/sys` once it has nine arenas, which in the jail is the end.
#[cfg(target_env = "gnu")]
pub(in crate::sandbox) fn limit_arenas() {
    // SAFETY: a number for the allocator; it may be set at any time.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
}

/// Other C libraries' allocators read no file.
#[cfg(not(target_env = "gnu"))]
pub(in crate::sandbox) fn limit_arenas() {}
