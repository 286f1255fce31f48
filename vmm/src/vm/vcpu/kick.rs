//! Getting vCPU threads out of guest code, by a signal that is never delivered.
//!
//! Every vCPU thread blocks the kick signal; KVM unblocks it only during `KVM_RUN` (see
//! [`kvm::set_signal_mask`](crate::kvm::set_signal_mask)). A kick that comes a moment too early
//! stays pending and ends the next `KVM_RUN` immediately, so none is lost, and no signal handler is
//! needed.
#![allow(unsafe_code)] // pthread_kill, sigtimedwait

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The kick: a standard signal, for which the kernel always has room (real-time signals count
/// against `RLIMIT_SIGPENDING`, of all processes of a user together), and which is ignored unless a
/// program handles it.
pub(crate) const KICK: i32 = libc::SIGURG;

/// The vCPU threads that run now.
#[derive(Debug, Default)]
pub(crate) struct Kicker {
    threads: Mutex<Vec<libc::pthread_t>>,
}

/// While it lives, its thread is kicked with the others.
#[derive(Debug)]
pub(crate) struct KickGuard {
    kicker: Arc<Kicker>,
    thread: libc::pthread_t,
}

impl Kicker {
    /// Adds the calling thread. A thread checks the request after that: either it sees a request,
    /// or the kick for that request reaches the thread.
    pub(crate) fn register(self: &Arc<Self>) -> KickGuard {
        // SAFETY: no preconditions.
        let thread = unsafe { libc::pthread_self() };
        self.lock().push(thread);
        KickGuard {
            kicker: self.clone(),
            thread,
        }
    }

    /// Makes every vCPU thread leave guest code soon.
    pub(crate) fn kick(&self) {
        self.send(KICK);
    }

    /// Sends a signal to every vCPU thread.
    pub(crate) fn send(&self, signal: i32) {
        for thread in self.lock().iter() {
            // SAFETY: a thread removes itself from the list, under its lock, before it ends.
            unsafe { libc::pthread_kill(*thread, signal) };
        }
    }

    /// Returns the threads that would be kicked now.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> Vec<libc::pthread_t> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<libc::pthread_t>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KickGuard {
    fn drop(&mut self) {
        let thread = self.thread;
        self.kicker.lock().retain(|other| *other != thread);
    }
}

/// A signal that ended `KVM_RUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// The kick.
    Kick,
    /// The host's memory failed at this address of the process.
    MemoryFailure {
        /// The address.
        address: u64,
    },
}

/// Takes a signal that is pending for the calling thread, which blocks both of them.
pub(crate) fn take_pending() -> Option<Pending> {
    await_pending(Duration::ZERO)
}

/// As [`take_pending`], and waits `patience`, of less than a second, for one.
pub(crate) fn await_pending(patience: Duration) -> Option<Pending> {
    let mut set = MaybeUninit::uninit();
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let patience = libc::timespec {
        tv_sec: 0,
        tv_nsec: patience.subsec_nanos().into(),
    };
    // SAFETY: the set is initialised before it is read; the other pointers are valid; a signal
    // number says that the kernel has filled `info`.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), KICK);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGBUS);
        match libc::sigtimedwait(set.as_ptr(), info.as_mut_ptr(), ptr::from_ref(&patience)) {
            KICK => Some(Pending::Kick),
            libc::SIGBUS => Some(Pending::MemoryFailure {
                address: info.assume_init().si_addr().addr() as u64,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::threads::SignalsBlocked;

    #[test]
    fn a_kick_ends_a_wait_and_none_is_taken_twice() {
        std::thread::spawn(|| {
            let kicker = Arc::new(Kicker::default());
            let _kicked = kicker.register();
            let _blocked = SignalsBlocked::new();
            assert_eq!(await_pending(Duration::ZERO), None);
            kicker.kick();
            let long = Duration::from_nanos(999_999_999);
            assert_eq!(await_pending(long), Some(Pending::Kick));
            assert_eq!(await_pending(Duration::from_nanos(1)), None);
        })
        .join()
        .unwrap();
    }
}
