//! The signal mask of a VM's threads.
#![allow(unsafe_code)] // pthread_sigmask

use std::mem::MaybeUninit;
use std::ptr;

/// While it lives, every signal is blocked in the thread that made it. Threads started meanwhile
/// inherit that for good: signals of the process are for the threads of the program that uses
/// this library, and the kick of a vCPU must never find its thread with the signal open.
#[derive(Debug)]
pub(crate) struct SignalsBlocked {
    before: libc::sigset_t,
    /// The mask belongs to one thread: not `Send`.
    _thread: std::marker::PhantomData<*const ()>,
}

impl SignalsBlocked {
    pub(crate) fn new() -> Self {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: `sigfillset` initialises `all` before it is read, `pthread_sigmask`
        // initialises `before`; with valid pointers and a valid `how` neither fails.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Self {
            before,
            _thread: std::marker::PhantomData,
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` is a mask that `pthread_sigmask` gave out.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::signal::{SIGRTMIN, get_blocked_signals};

    #[test]
    fn threads_inherit_the_mask_and_the_caller_gets_its_own_back() {
        let before = get_blocked_signals().unwrap();
        let guard = SignalsBlocked::new();
        let inherited = std::thread::spawn(|| get_blocked_signals().unwrap())
            .join()
            .unwrap();
        drop(guard);
        assert!(inherited.contains(&SIGRTMIN()) && inherited.contains(&libc::SIGINT));
        assert_eq!(get_blocked_signals().unwrap(), before);
    }
}
