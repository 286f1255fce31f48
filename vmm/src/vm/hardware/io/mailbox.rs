//! Commands for a loop, and the eventfd that wakes it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use podvisor_devices::virtio::Wake;

/// Work that a loop `L` does between two turns of its devices.
pub(super) type LoopCommand<L> = Box<dyn FnOnce(&mut L) + Send>;

/// Commands in the order in which they were sent.
pub(super) struct Mailbox<L> {
    /// `None` if the loop is gone.
    commands: Mutex<Option<VecDeque<LoopCommand<L>>>>,
    pending: AtomicBool,
    /// Whether a thread executes commands, or is about to.
    served: AtomicBool,
    wake: Wake,
}

impl<L> fmt::Debug for Mailbox<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl<L> Mailbox<L> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            commands: Mutex::new(Some(VecDeque::new())),
            pending: AtomicBool::new(false),
            served: AtomicBool::new(false),
            wake: Wake::new()?,
        })
    }

    /// Appends a command; `false`, without appending it, if the loop is gone.
    pub(super) fn send(&self, command: LoopCommand<L>) -> bool {
        let mut commands = self.lock();
        let Some(list) = commands.as_mut() else {
            return false;
        };
        list.push_back(command);
        // A loop that has yet to take the others is awake.
        if !self.pending.swap(true, Ordering::SeqCst) {
            self.wake.wake();
        }
        true
    }

    /// Called before the loop runs.
    pub(super) fn serve(&self) {
        self.served.store(true, Ordering::SeqCst);
    }

    /// Returns whether the loop runs, or has run.
    pub(super) fn is_served(&self) -> bool {
        self.served.load(Ordering::SeqCst)
    }

    /// Returns whether [`Self::take`] would return commands, without a lock.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Takes all commands.
    pub(super) fn take(&self) -> VecDeque<LoopCommand<L>> {
        let mut commands = self.lock();
        if self.pending.swap(false, Ordering::SeqCst) {
            self.wake.take();
        }
        commands.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Called when the loop is gone: waiting commands are dropped, which their senders notice, and
    /// no more are accepted.
    pub(super) fn close(&self) {
        let waiting = self.lock().take();
        // Outside of the lock: dropping a command may run anything.
        drop(waiting);
    }

    /// Returns whether the loop is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Returns the eventfd, which is readable if a command was sent.
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<LoopCommand<L>>>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
