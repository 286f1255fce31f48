//! A queue with its own thread and engine.
//!
//! The device's event loop starts and stops the queue and changes the disk, holding the lock that
//! the thread holds during a turn. The thread itself waits for notifications of the driver and for
//! the disk, and reports a fault to the event loop, which then stops all queues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, epoll, eventfd};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::server::Server;
use crate::virtio::{Fault, Progress, Queue, StartError};

/// Identifiers in the epoll instance.
const WAKE: u64 = 0;
const KICK: u64 = 1;
const BACKEND: u64 = 2;

/// Wakes the event loop of a device with queue threads.
#[derive(Debug)]
pub(super) struct QueueEvents {
    epoll: OwnedFd,
    raised: Arc<Signal>,
}

impl QueueEvents {
    pub(super) fn new(backend: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let alarm = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            raised: Arc::new(Signal::new()?),
        };
        alarm.add(alarm.raised.0.as_fd())?;
        alarm.watch(backend)?;
        Ok(alarm)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Also waits for the disk of the event loop's own queue.
    pub(super) fn watch(&self, backend: Option<BorrowedFd<'_>>) -> io::Result<()> {
        backend.map_or(Ok(()), |fd| self.add(fd))
    }

    /// Stops waiting for a disk that is about to be replaced.
    pub(super) fn forget(&self, backend: Option<BorrowedFd<'_>>) {
        if let Some(fd) = backend {
            // It was added, or adding it failed.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// Whether a thread has a new fault.
    pub(super) fn is_raised(&self) -> bool {
        self.raised.take()
    }
}

/// An eventfd that wakes its reader.
#[derive(Debug)]
struct Signal(OwnedFd);

impl Signal {
    fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC,
        )?))
    }

    fn give(&self) {
        // It fails only when 2^64 - 2 signals are pending.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// One queue, its engine, and the descriptors that its thread waits for.
#[derive(Debug)]
pub(super) struct QueueThread {
    index: u16,
    /// `None` once the device was dropped.
    server: Mutex<Option<Server>>,
    /// Taken before `server`, and released by the thread immediately: so a thread that always has
    /// something to do lets others take the lock.
    turnstile: Mutex<()>,
    /// A fault stopped the thread until the queue is started again. Changed under `server`'s lock.
    parked: AtomicBool,
    /// The thread has exited, and nobody would serve the queue. Changed under `server`'s lock.
    exited: AtomicBool,
    /// The fault that the event loop has not taken yet. A stop keeps it; a reset drops it.
    fault: Mutex<Option<Fault>>,
    epoll: Epoll,
    wake: Signal,
    alarm: Arc<Signal>,
}

/// A queue whose thread is halted.
pub(super) struct StoppedQueueThread<'a> {
    thread: &'a QueueThread,
    server: MutexGuard<'a, Option<Server>>,
    _turnstile: MutexGuard<'a, ()>,
}

impl QueueThread {
    pub(super) fn new(index: u16, server: Server, alarm: &QueueEvents) -> io::Result<Self> {
        let thread = Self {
            index,
            server: Mutex::new(Some(server)),
            turnstile: Mutex::new(()),
            parked: AtomicBool::new(false),
            exited: AtomicBool::new(false),
            fault: Mutex::new(None),
            epoll: Epoll::new()?,
            wake: Signal::new()?,
            alarm: alarm.raised.clone(),
        };
        watch(&thread.epoll, thread.wake.0.as_raw_fd(), WAKE)?;
        Ok(thread)
    }

    /// Waits until the thread's turn is over.
    pub(super) fn halt(&self) -> StoppedQueueThread<'_> {
        let turnstile = lock(&self.turnstile);
        StoppedQueueThread {
            thread: self,
            server: lock(&self.server),
            _turnstile: turnstile,
        }
    }

    /// Makes the thread look at its queue.
    pub(super) fn wake(&self) {
        self.wake.give();
    }

    /// The descriptor that the thread waits on.
    #[cfg(test)]
    pub(super) fn epoll(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Takes the fault that stopped the thread, if the event loop has not had it yet.
    pub(super) fn take_fault(&self) -> Option<Fault> {
        lock(&self.fault).take()
    }

    /// Serves the queue whenever it runs, until the device is dropped or events cannot be waited
    /// for.
    pub(super) fn run(&self) {
        let mut again = false;
        loop {
            let ready = match self.wait(again) {
                Ok(ready) => ready,
                Err(error) => {
                    let _server = lock(&self.server);
                    self.exited.store(true, Ordering::SeqCst);
                    return self.fail(Fault::host("failed to wait for queue events", error));
                }
            };
            drop(lock(&self.turnstile));
            let mut place = lock(&self.server);
            let Some(server) = &mut *place else {
                return;
            };
            again = match self.turn(server, &ready) {
                Ok(progress) => progress == Progress::More,
                Err(fault) => {
                    // This queue is not served before it is started again.
                    self.unwatch(server);
                    self.fail(fault);
                    false
                }
            };
        }
    }

    fn fail(&self, fault: Fault) {
        self.parked.store(true, Ordering::SeqCst);
        *lock(&self.fault) = Some(fault);
        self.alarm.give();
    }

    fn turn(&self, server: &mut Server, ready: &Ready) -> Result<Progress, Fault> {
        if ready.wake {
            self.wake.take();
        }
        if self.parked.load(Ordering::SeqCst) {
            return Ok(Progress::Idle);
        }
        if ready.kick
            && let Some(queue) = server.queue(self.index)
        {
            let _ = queue.kick().read();
        }
        let mut progress = Progress::Idle;
        if ready.backend {
            progress = server.on_backend()?;
        }
        if ready.wake || ready.kick || ready.again {
            progress = server.on_queue(self.index)?;
        }
        Ok(progress)
    }

    /// Returns the events that are ready; does not wait if called `again`.
    fn wait(&self, again: bool) -> io::Result<Ready> {
        let mut events = [EpollEvent::default(); 3];
        let timeout = if again { 0 } else { -1 };
        let count = match self.epoll.wait(timeout, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        let mut ready = Ready {
            again,
            ..Ready::default()
        };
        for event in events.iter().take(count) {
            match event.data() {
                WAKE => ready.wake = true,
                KICK => ready.kick = true,
                _ => ready.backend = true,
            }
        }
        Ok(ready)
    }

    fn watch_backend(&self, server: &Server) {
        let backend = server.backend();
        let watched = backend.map(|fd| watch(&self.epoll, fd.as_raw_fd(), BACKEND));
        if let Some(Err(error)) = watched {
            tracing::error!(%error, "disk: failed to watch for completions");
        }
    }

    fn unwatch(&self, server: &mut Server) {
        let backend = server.backend().map(|fd| fd.as_raw_fd());
        let queue = server.queue(self.index);
        let kick = queue.map(|queue| queue.kick().as_raw_fd());
        for fd in backend.into_iter().chain(kick) {
            forget(&self.epoll, fd);
        }
    }
}

impl StoppedQueueThread<'_> {
    pub(super) fn server(&mut self) -> Option<&mut Server> {
        self.server.as_mut()
    }

    pub(super) fn is_quiet(&self) -> bool {
        let server = self.server.as_ref();
        server.is_none_or(|server| server.engine.is_quiet())
    }

    /// Starts the queue on the thread.
    pub(super) fn start(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        let thread = self.thread;
        if thread.exited.load(Ordering::SeqCst) {
            let source = io::Error::other("its thread has exited");
            return Err(StartError::Host { index, source });
        }
        let server = self.server.as_mut();
        let server = server.ok_or(StartError::NoSuchQueue { index })?;
        server.start(queue)?;
        thread.parked.store(false, Ordering::SeqCst);
        if let Some(queue) = server.queue(index) {
            let watched = watch(&thread.epoll, queue.kick().as_raw_fd(), KICK);
            if let Err(source) = watched {
                server.stop(index);
                return Err(StartError::Host { index, source });
            }
        }
        thread.watch_backend(server);
        thread.wake();
        Ok(())
    }

    pub(super) fn stop(&mut self) -> Option<Queue> {
        let thread = self.thread;
        let server = self.server.as_mut()?;
        server.queue(thread.index)?;
        thread.unwatch(server);
        server.stop(thread.index)
    }

    /// Runs `work`, which may change what the server waits for.
    pub(super) fn change(&mut self, work: impl FnOnce(&mut Server)) {
        let thread = self.thread;
        let Some(server) = &mut *self.server else {
            return;
        };
        if let Some(fd) = server.backend() {
            forget(&thread.epoll, fd.as_raw_fd());
        }
        work(server);
        if server.queue(thread.index).is_some() && !thread.parked.load(Ordering::SeqCst) {
            thread.watch_backend(server);
        }
    }

    /// Closes the disk, and makes the thread exit.
    pub(super) fn end(mut self) {
        *self.server = None;
        self.thread.wake();
    }
}

/// The events that a thread was woken for.
#[derive(Debug, Default)]
struct Ready {
    wake: bool,
    kick: bool,
    backend: bool,
    again: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(epoll: &Epoll, fd: RawFd, id: u64) -> io::Result<()> {
    epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, id))
}

fn forget(epoll: &Epoll, fd: RawFd) {
    // It was added, or adding it failed.
    let _ = epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
}
