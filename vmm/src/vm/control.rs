//! What the threads of a VM agree on: the state, what they are asked to do, and how the VM ended.
//!
//! One mutex and one condition variable hold it all; vCPU threads check an atomic copy of the
//! request before each `KVM_RUN`, and are kicked out of guest code when it changes.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;

use super::exit::{Poison, VmExit};
use super::state::State;

/// How long to wait before the threads that are waited for are nudged again.
const NUDGE_INTERVAL: Duration = Duration::from_millis(20);

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
pub(crate) enum Outcome {
    Exit(VmExit),
    Poison(Arc<Poison>),
}

#[derive(Debug)]
pub(crate) struct Control {
    request: AtomicU8,
    /// vCPUs stand still between two runs, without being paused.
    is_held: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// Work that a parked vCPU's thread does with its vCPU.
type VcpuCommand = Box<dyn FnOnce(&mut VcpuFd) + Send>;

pub(crate) struct Inner {
    pub(crate) state: State,
    pub(crate) outcome: Option<Outcome>,
    /// Threads of this VM (vCPUs and event loops) that have not ended.
    pub(crate) threads: usize,
    /// Those of them that run vCPUs.
    pub(crate) vcpus: usize,
    /// Those of the vCPUs' threads that are stopped because of [`Request::Pause`].
    pub(crate) parked: usize,
    /// How often a paused VM was resumed.
    pub(crate) resumes: u64,
    /// Written when the VM ends.
    exit_events: Vec<OwnedFd>,
    /// For each vCPU, the commands to execute while it is parked.
    commands: Vec<VecDeque<VcpuCommand>>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("state", &self.state)
            .field("outcome", &self.outcome)
            .field("threads", &self.threads)
            .field("vcpus", &self.vcpus)
            .field("parked", &self.parked)
            .finish_non_exhaustive()
    }
}

impl Control {
    pub(crate) fn new() -> Self {
        Self {
            request: AtomicU8::new(Request::Run as u8),
            is_held: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                state: State::Created,
                outcome: None,
                threads: 0,
                vcpus: 0,
                parked: 0,
                resumes: 0,
                exit_events: Vec::new(),
                commands: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the fields consistent, even one that panicked.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what threads are asked to do, without the lock.
    pub(crate) fn request(&self) -> Request {
        Request::from_bits(self.request.load(Ordering::SeqCst))
    }

    /// Asks the threads to do something; the caller kicks them afterwards. An end is permanent.
    pub(crate) fn ask(&self, _proof: &mut MutexGuard<'_, Inner>, request: Request) {
        if self.request() != Request::End {
            self.request.store(request as u8, Ordering::SeqCst);
        }
        self.changed.notify_all();
    }

    /// Holds the vCPUs, or lets them go on; who holds them kicks them afterwards.
    pub(crate) fn hold(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::SeqCst);
        let inner = self.lock();
        self.changed.notify_all();
        drop(inner);
    }

    /// Called by a vCPU's thread before it enters the guest: waits while vCPUs are held, unless it
    /// is asked for something else.
    pub(crate) fn wait_while_held(&self) {
        let is_held = || self.is_held.load(Ordering::SeqCst);
        if is_held() {
            let inner = self.lock();
            drop(self.wait_until(inner, |_| !is_held() || self.request() != Request::Run));
        }
    }

    /// Waits until `done` returns true.
    pub(crate) fn wait_until<'a>(
        &'a self,
        guard: MutexGuard<'a, Inner>,
        mut done: impl FnMut(&Inner) -> bool,
    ) -> MutexGuard<'a, Inner> {
        self.changed
            .wait_while(guard, |inner| !done(inner))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Self::wait_until`], until `deadline` at most, and calls `nudge` from time to time
    /// meanwhile. `false` if it was not `done` by then.
    pub(crate) fn wait_deadline<'a>(
        &'a self,
        mut guard: MutexGuard<'a, Inner>,
        deadline: Instant,
        nudge: impl Fn(),
        mut done: impl FnMut(&Inner) -> bool,
    ) -> (MutexGuard<'a, Inner>, bool) {
        loop {
            if done(&guard) {
                return (guard, true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (guard, false);
            }
            let waited = self.changed.wait_timeout(guard, left.min(NUDGE_INTERVAL));
            let (next, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            guard = next;
            if timeout.timed_out() {
                nudge();
            }
        }
    }

    /// Called by a vCPU's thread that was asked to pause: stops and executes commands until it is
    /// asked for something else. `false` means that the thread must end.
    pub(crate) fn park(&self, id: u8, vcpu: &mut VcpuFd) -> bool {
        let id = usize::from(id);
        let mut inner = self.lock();
        inner.parked += 1;
        self.changed.notify_all();
        loop {
            inner = self.wait_until(inner, |inner| {
                self.request() != Request::Pause
                    || inner.commands.get(id).is_some_and(|list| !list.is_empty())
            });
            if self.request() != Request::Pause {
                break;
            }
            let commands = inner.commands.get_mut(id).map(std::mem::take);
            drop(inner);
            for command in commands.unwrap_or_default() {
                command(vcpu);
            }
            inner = self.lock();
        }
        inner.parked -= 1;
        // Callers must not wait for commands that are no longer executed.
        let dropped = inner.commands.get_mut(id).map(std::mem::take);
        self.changed.notify_all();
        drop(inner);
        drop(dropped);
        // The request may be another pause by now.
        self.request() != Request::End
    }

    /// Runs `work` with each vCPU, on its thread. All are parked, and stay so meanwhile. `None` if
    /// the VM ends before all have done it.
    pub(crate) fn with_vcpus<R: Send + 'static>(
        &self,
        work: impl Fn(&mut VcpuFd) -> R + Send + Sync + 'static,
    ) -> Option<Vec<R>> {
        let work = Arc::new(work);
        let answers: Vec<Receiver<R>> = {
            let mut inner = self.lock();
            if inner.outcome.is_some() {
                return None;
            }
            let count = inner.vcpus;
            inner.commands.resize_with(count, VecDeque::new);
            let answers = inner.commands.iter_mut().map(|list| {
                let (done, wait) = sync_channel(1);
                let work = work.clone();
                list.push_back(Box::new(move |vcpu: &mut VcpuFd| {
                    // The receiver is gone once the VM has ended.
                    let _ = done.send(work(vcpu));
                }));
                wait
            });
            let answers = answers.collect();
            self.changed.notify_all();
            answers
        };
        answers
            .into_iter()
            .map(|answer| answer.recv().ok())
            .collect()
    }

    /// Sets the outcome, of which the first counts. `true` if it is this one.
    pub(crate) fn end(&self, outcome: Outcome) -> bool {
        let mut inner = self.lock();
        if inner.outcome.is_some() {
            return false;
        }
        inner.state = match outcome {
            Outcome::Exit(_) => State::Stopped,
            Outcome::Poison(_) => State::Poisoned,
        };
        inner.outcome = Some(outcome);
        for event in &inner.exit_events {
            tell(event);
        }
        self.ask(&mut inner, Request::End);
        true
    }

    /// Sets the outcome of a VM that runs on another host: it counts even if somebody has stopped
    /// it here since it was given away. `true` if the VM had not ended.
    pub(crate) fn end_as_moved(&self) -> bool {
        let moved = Outcome::Exit(VmExit::Moved);
        let is_first = self.end(moved.clone());
        if !is_first {
            self.lock().outcome = Some(moved);
        }
        is_first
    }

    /// Has `event` written when the VM ends, or now if it has ended.
    pub(crate) fn add_exit_event(&self, event: OwnedFd) {
        let mut inner = self.lock();
        if inner.outcome.is_some() {
            tell(&event);
        } else {
            inner.exit_events.push(event);
        }
    }

    /// Records that a thread of the VM has ended.
    pub(crate) fn thread_ended(&self, is_vcpu: bool) {
        let mut inner = self.lock();
        inner.vcpus = inner.vcpus.saturating_sub(usize::from(is_vcpu));
        inner.threads = inner.threads.saturating_sub(1);
        self.changed.notify_all();
    }
}

/// Writes an eventfd, which fails only after 2⁶⁴ writes.
fn tell(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
