//! How threads of a VM are started: their stack, and the signals that they block.
#![allow(unsafe_code)] // pthread_sigmask, gettid, tgkill

use std::mem::MaybeUninit;
use std::ptr;
use std::thread;

/// Stack of each thread. Devices and exits need a few KiB; the usual 2 MiB would become a huge page
/// that is zeroed needlessly.
pub(crate) const STACK_SIZE: usize = 256 << 10;

/// Runs `there` on another thread while `here` runs on this one, or after it if no more threads can
/// be created. That thread is gone when this returns: only a single-threaded process may create a
/// user namespace.
pub(crate) fn in_parallel<A: Send, B>(
    name: &str,
    there: impl Fn() -> A + Sync,
    here: impl FnOnce() -> B,
) -> (A, B) {
    thread::scope(|scope| {
        let builder = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_SIZE);
        let blocked = SignalsBlocked::new();
        let spawned = builder.spawn_scoped(scope, || (own_id(), there()));
        drop(blocked);
        let here = here();
        let there = match spawned {
            Ok(thread) => gone(thread.join()),
            Err(_) => there(),
        };
        (there, here)
    })
}

/// Waits until the kernel does not count a thread any more that was joined, a moment earlier. The
/// thread returned its ID and a result.
fn gone<T>(joined: thread::Result<(libc::pid_t, T)>) -> T {
    let (id, result) = joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    while is_counted(id) {
        thread::yield_now();
    }
    result
}

/// Work that runs on a thread of its own until its result is needed, or it is dropped. That thread
/// is gone then.
#[derive(Debug)]
pub(crate) struct Ahead<T>(Option<thread::JoinHandle<(libc::pid_t, T)>>);

impl<T: Send + 'static> Ahead<T> {
    /// Begins it; if no more threads can be created, there is no result.
    pub(crate) fn begin(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let builder = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_SIZE);
        let blocked = SignalsBlocked::new();
        let spawned = builder.spawn(|| (own_id(), work()));
        drop(blocked);
        Self(spawned.ok())
    }
}

impl<T> Ahead<T> {
    /// Waits for the result.
    pub(crate) fn take(mut self) -> Option<T> {
        self.0.take().map(|thread| gone(thread.join()))
    }
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been reported on that thread.
            let joined = thread.join();
            if joined.is_ok() {
                drop(gone(joined));
            }
        }
    }
}

/// Returns this thread's ID.
fn own_id() -> libc::pid_t {
    // SAFETY: it takes no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Returns whether this process has a thread with this ID.
fn is_counted(id: libc::pid_t) -> bool {
    // SAFETY: signal 0 is not sent; the call only reports whether it could be.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, 0) == 0 }
}

/// Returns the name of a thread.
pub(crate) fn name<T>(thread: &thread::JoinHandle<T>) -> String {
    thread.thread().name().unwrap_or("unnamed").to_owned()
}

/// While it lives, every signal is blocked in the thread that created it. Threads started meanwhile
/// inherit that permanently: signals of the process are for the threads of the program that uses
/// this library, and the kick of a vCPU must never reach its thread with the signal unblocked.
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
        // SAFETY: `before` is a mask that `pthread_sigmask` returned.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::signal::get_blocked_signals;

    #[test]
    fn a_thread_for_work_in_parallel_is_gone_after_it() {
        for _ in 0..200 {
            let (there, here) = in_parallel("there", own_id, own_id);
            assert_ne!(there, here);
            assert!(is_counted(here) && !is_counted(there));
        }
    }

    #[test]
    fn a_thread_for_work_ahead_is_gone_after_it() {
        for _ in 0..200 {
            let there = Ahead::begin("ahead", own_id).take().unwrap();
            assert!(there != own_id() && !is_counted(there));
            let (sender, receiver) = std::sync::mpsc::channel();
            let dropped = Ahead::begin("ahead", move || sender.send(own_id()));
            let there = receiver.recv().unwrap();
            drop(dropped);
            assert!(!is_counted(there));
        }
    }

    #[test]
    fn threads_inherit_the_mask_and_the_caller_gets_its_own_back() {
        let before = get_blocked_signals().unwrap();
        let guard = SignalsBlocked::new();
        let inherited = std::thread::spawn(|| get_blocked_signals().unwrap())
            .join()
            .unwrap();
        drop(guard);
        assert!(
            inherited.contains(&crate::vm::vcpu::kick::KICK) && inherited.contains(&libc::SIGINT)
        );
        assert_eq!(get_blocked_signals().unwrap(), before);
    }
}
