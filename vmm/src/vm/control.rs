//! What the threads of a VM agree on: the state, what they are asked to do, and how the VM ended.
//!
//! One mutex and one condition variable hold it all; vCPU threads look at an atomic copy of the
//! request before each `KVM_RUN`, and are kicked out of guest code when it changes.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::exit::{Exit, Poison};
use super::state::State;

/// What the threads are asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Request {
    Run = 0,
    Pause = 1,
    End = 2,
}

impl Request {
    fn from_bits(bits: u8) -> Self {
        match bits {
            0 => Self::Run,
            1 => Self::Pause,
            _ => Self::End,
        }
    }
}

/// How a VM ended.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Exit(Exit),
    Poison(Arc<Poison>),
}

#[derive(Debug)]
pub(crate) struct Control {
    request: AtomicU8,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) state: State,
    pub(crate) ending: Option<Ending>,
    /// Threads of this VM (vCPUs and I/O) that have not ended.
    pub(crate) threads: usize,
    /// Those of them that stand still because of [`Request::Pause`].
    pub(crate) parked: usize,
}

impl Control {
    pub(crate) fn new() -> Self {
        Self {
            request: AtomicU8::new(Request::Run as u8),
            inner: Mutex::new(Inner {
                state: State::Created,
                ending: None,
                threads: 0,
                parked: 0,
            }),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the fields consistent, even one that panicked.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What threads are asked to do, without the lock.
    pub(crate) fn request(&self) -> Request {
        Request::from_bits(self.request.load(Ordering::SeqCst))
    }

    /// Asks the threads to do something; the caller kicks them afterwards. An end is for ever.
    pub(crate) fn ask(&self, _proof: &mut MutexGuard<'_, Inner>, request: Request) {
        if self.request() != Request::End {
            self.request.store(request as u8, Ordering::SeqCst);
        }
        self.changed.notify_all();
    }

    /// Waits until `done`.
    pub(crate) fn wait_until<'a>(
        &'a self,
        guard: MutexGuard<'a, Inner>,
        mut done: impl FnMut(&Inner) -> bool,
    ) -> MutexGuard<'a, Inner> {
        self.changed
            .wait_while(guard, |inner| !done(inner))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Called by a thread of the VM between two steps: stands still while a pause is asked
    /// for. `false` means that the thread must end.
    pub(crate) fn checkpoint(&self) -> bool {
        match self.request() {
            Request::Run => return true,
            Request::End => return false,
            Request::Pause => {}
        }
        let mut inner = self.lock();
        inner.parked += 1;
        self.changed.notify_all();
        inner = self.wait_until(inner, |_| self.request() != Request::Pause);
        inner.parked -= 1;
        self.changed.notify_all();
        self.request() == Request::Run
    }

    /// The first ending counts. `true` when it is this one.
    pub(crate) fn end(&self, ending: Ending) -> bool {
        let mut inner = self.lock();
        if inner.ending.is_some() {
            return false;
        }
        inner.state = match ending {
            Ending::Exit(_) => State::Stopped,
            Ending::Poison(_) => State::Poisoned,
        };
        inner.ending = Some(ending);
        self.ask(&mut inner, Request::End);
        true
    }

    /// A thread of the VM has ended.
    pub(crate) fn thread_ended(&self) {
        let mut inner = self.lock();
        inner.threads = inner.threads.saturating_sub(1);
        self.changed.notify_all();
    }
}
