//! Queues with threads of their own.
//!
//! A device with a [`QueueServer`] for each of some queues keeps them as [`QueueThread`]s. Its
//! event loop starts and stops these queues and changes the servers, holding the lock that the
//! thread holds during a turn ([`QueueThread::halt`]). The thread itself waits for notifications of
//! the driver and for its server's backend, with a [`Poller`] as event loops do. After a fault it
//! parks: it serves nothing until its queue is started again. [`QueueThreads`] is what the device's
//! [`Worker`](super::Worker) knows of them, which stops all queues after a fault of one.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Fault, PollEvents, Poller, Progress, Queue, StartError, Wait, Wake};

/// Numbers of what a thread waits for.
const WAKE: u64 = 0;
const KICK: u64 = 1;
const BACKEND: u64 = 2;

/// Serves one queue of a device apart from the device's others. All methods mean what those of
/// [`super::VirtioDevice`] do that are called so; `index` is always that of the one queue.
pub trait QueueServer: fmt::Debug + Send + 'static {
    /// Takes the queue and serves it from now on.
    ///
    /// # Errors
    /// If it cannot be served. It is dropped then.
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError>;

    /// Completes or puts back what is in flight, and returns the queue; `None` if it does not run.
    fn stop_queue(&mut self, index: u16) -> Option<Queue>;

    /// Returns the queue, if it runs.
    fn queue(&mut self, index: u16) -> Option<&Queue>;

    /// Whether a stopped queue has nothing in flight.
    fn is_quiet(&self) -> bool;

    /// The driver notified the queue.
    ///
    /// # Errors
    /// Any [`Fault`] means that all of the device's queues must be stopped.
    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault>;

    /// A descriptor that is readable when there is work for [`Self::on_backend`].
    fn backend(&self) -> Option<BorrowedFd<'_>>;

    /// The backend is readable.
    ///
    /// # Errors
    /// As [`Self::on_queue`].
    fn on_backend(&mut self) -> Result<Progress, Fault>;
}

/// One queue, its server, and what its thread waits for.
#[derive(Debug)]
pub struct QueueThread<S> {
    server: Mutex<Option<S>>,
    /// Taken before `server`, and released by the thread immediately: so a thread that always has
    /// something to do lets others take the lock.
    turnstile: Mutex<()>,
    poller: Poller,
    shared: Shared,
}

/// The part of a thread that does not depend on its server.
#[derive(Debug)]
struct Shared {
    index: u16,
    /// A fault stopped the thread until the queue is started again. Changed under the server's
    /// lock.
    parked: AtomicBool,
    /// The thread has exited, and nobody would serve the queue. Changed under the server's lock.
    exited: AtomicBool,
    /// The fault that the worker has not taken yet. A stop keeps it; a reset drops it.
    fault: Mutex<Option<Fault>>,
    wake: Wake,
    /// Of all threads of the device.
    alarm: Arc<Wake>,
}

/// A queue whose thread is halted.
#[derive(Debug)]
pub struct HaltedQueue<'a, S> {
    thread: &'a QueueThread<S>,
    server: MutexGuard<'a, Option<S>>,
    _turnstile: MutexGuard<'a, ()>,
}

/// The queues of a device that threads serve, as its worker knows them. Empty if there are none.
#[derive(Clone, Debug, Default)]
pub struct QueueThreads {
    threads: Vec<Arc<dyn Serve>>,
    /// Readable if a thread has a new fault; `None` without threads.
    alarm: Option<Arc<Wake>>,
}

/// The work of a thread that serves a single queue.
#[derive(Debug)]
pub struct QueueThreadBody {
    /// The queue's index.
    pub queue: u16,
    thread: Arc<dyn Serve>,
}

impl QueueThreadBody {
    /// Serves the queue whenever it runs, and returns soon after the device was dropped.
    pub fn run(self) {
        self.thread.serve();
    }
}

impl QueueThreads {
    /// Creates a thread for each of these queues. The device keeps them, and the other value is
    /// what [`super::VirtioDevice::queue_threads`] returns.
    ///
    /// # Errors
    /// If there can be no more descriptors.
    pub fn new<S: QueueServer>(
        servers: impl IntoIterator<Item = (u16, S)>,
    ) -> io::Result<(Vec<Arc<QueueThread<S>>>, Self)> {
        let mut servers = servers.into_iter().peekable();
        if servers.peek().is_none() {
            return Ok((Vec::new(), Self::default()));
        }
        let alarm = Arc::new(Wake::new()?);
        let threads = servers.map(|(index, server)| {
            let thread = QueueThread::new(index, server, alarm.clone())?;
            Ok(Arc::new(thread))
        });
        let threads = threads.collect::<io::Result<Vec<_>>>()?;
        let known = Self {
            threads: threads.iter().map(|thread| thread.clone() as _).collect(),
            alarm: Some(alarm),
        };
        Ok((threads, known))
    }

    /// What is to be run, each on a thread, before the queues are started.
    #[must_use]
    pub fn bodies(&self) -> Vec<QueueThreadBody> {
        let body = |thread: &Arc<dyn Serve>| QueueThreadBody {
            queue: thread.shared().index,
            thread: thread.clone(),
        };
        self.threads.iter().map(body).collect()
    }

    /// Makes the thread of this queue look at it; `false` if it has none.
    pub(crate) fn wake(&self, index: u16) -> bool {
        let thread = self.thread(index);
        if let Some(thread) = thread {
            thread.shared().wake.wake();
        }
        thread.is_some()
    }

    /// Whether this queue has a thread.
    pub(crate) fn serve(&self, index: u16) -> bool {
        self.thread(index).is_some()
    }

    /// The descriptor that is readable when a thread has a new fault.
    pub(crate) fn alarm(&self) -> Option<BorrowedFd<'_>> {
        self.alarm.as_ref().map(|alarm| alarm.as_fd())
    }

    /// Takes the alarm: whether a thread has a new fault.
    pub(crate) fn is_raised(&self) -> bool {
        self.alarm.as_ref().is_some_and(|alarm| alarm.take())
    }

    /// Takes the faults that threads met and that were not taken before; returns the first.
    pub(crate) fn take_fault(&self) -> Option<Fault> {
        let mut first = None;
        for thread in &self.threads {
            first = first.or(lock(&thread.shared().fault).take());
        }
        first
    }

    fn thread(&self, index: u16) -> Option<&Arc<dyn Serve>> {
        let mut threads = self.threads.iter();
        threads.find(|thread| thread.shared().index == index)
    }
}

/// A thread, whatever its server is.
trait Serve: fmt::Debug + Send + Sync {
    fn shared(&self) -> &Shared;

    /// Serves the queue until its device is dropped or events cannot be waited for.
    fn serve(&self);
}

impl<S: QueueServer> Serve for QueueThread<S> {
    fn shared(&self) -> &Shared {
        &self.shared
    }

    fn serve(&self) {
        let mut events = PollEvents::default();
        let mut again = false;
        loop {
            let ready = match self.wait(again, &mut events) {
                Ok(ready) => ready,
                Err(error) => {
                    let _server = lock(&self.server);
                    self.shared.exited.store(true, Ordering::SeqCst);
                    let fault = Fault::host("failed to wait for queue events", error);
                    return self.shared.park(fault);
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
                    self.forget(server);
                    self.shared.park(fault);
                    false
                }
            };
        }
    }
}

impl Shared {
    fn park(&self, fault: Fault) {
        self.parked.store(true, Ordering::SeqCst);
        *lock(&self.fault) = Some(fault);
        self.alarm.wake();
    }
}

impl<S: QueueServer> QueueThread<S> {
    fn new(index: u16, server: S, alarm: Arc<Wake>) -> io::Result<Self> {
        let (poller, wake) = (Poller::new()?, Wake::new()?);
        poller.add(&wake, WAKE)?;
        Ok(Self {
            server: Mutex::new(Some(server)),
            turnstile: Mutex::new(()),
            poller,
            shared: Shared {
                index,
                parked: AtomicBool::new(false),
                exited: AtomicBool::new(false),
                fault: Mutex::new(None),
                wake,
                alarm,
            },
        })
    }

    /// Waits until the thread's turn is over, and keeps it from the next one.
    pub fn halt(&self) -> HaltedQueue<'_, S> {
        let turnstile = lock(&self.turnstile);
        HaltedQueue {
            thread: self,
            server: lock(&self.server),
            _turnstile: turnstile,
        }
    }

    /// What the thread waits on.
    #[cfg(test)]
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    fn turn(&self, server: &mut S, ready: &Ready) -> Result<Progress, Fault> {
        if ready.wake {
            self.shared.wake.take();
        }
        if self.shared.parked.load(Ordering::SeqCst) {
            return Ok(Progress::Idle);
        }
        let mut progress = Progress::Idle;
        if ready.backend {
            progress = server.on_backend()?;
        }
        if ready.queue {
            progress = server.on_queue(self.shared.index)?;
        }
        Ok(progress)
    }

    /// Returns what is to be done; does not wait if there is more to do, `again`.
    fn wait(&self, again: bool, events: &mut PollEvents) -> io::Result<Ready> {
        let wait = match again {
            true => Wait::Nonblocking,
            false => Wait::Blocking,
        };
        let mut ready = Ready {
            queue: again,
            ..Ready::default()
        };
        for event in self.poller.wait(wait, events)? {
            match event {
                BACKEND => ready.backend = true,
                other => {
                    ready.queue = true;
                    ready.wake |= other == WAKE;
                }
            }
        }
        Ok(ready)
    }

    fn add_backend(&self, server: &S) {
        let added = server.backend().map(|fd| self.poller.add(&fd, BACKEND));
        if let Some(Err(error)) = added {
            let queue = self.shared.index;
            tracing::error!(queue, %error, "failed to wait for a queue's backend");
        }
    }

    fn forget_backend(&self, server: &S) {
        if let Some(fd) = server.backend() {
            // It was added, or adding it failed.
            let _ = self.poller.remove(&fd);
        }
    }

    fn forget(&self, server: &mut S) {
        self.forget_backend(server);
        if let Some(queue) = server.queue(self.shared.index) {
            // As above.
            let _ = self.poller.remove(queue.kick());
        }
    }
}

impl<S: QueueServer> HaltedQueue<'_, S> {
    /// The server; `None` after [`Self::end`].
    pub fn server(&mut self) -> Option<&mut S> {
        self.server.as_mut()
    }

    /// Whether a stopped queue has nothing in flight.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let server = self.server.as_ref();
        server.is_none_or(QueueServer::is_quiet)
    }

    /// Starts the queue on the thread.
    ///
    /// # Errors
    /// The server's, or if the thread has exited or cannot wait for the driver.
    pub fn start(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        let QueueThread { poller, shared, .. } = self.thread;
        if shared.exited.load(Ordering::SeqCst) {
            let source = io::Error::other("its thread has exited");
            return Err(StartError::Host { index, source });
        }
        let server = self.server.as_mut();
        let server = server.ok_or(StartError::NoSuchQueue { index })?;
        server.start_queue(queue)?;
        shared.parked.store(false, Ordering::SeqCst);
        if let Some(queue) = server.queue(index)
            && let Err(source) = poller.add_kick(queue.kick(), KICK)
        {
            server.stop_queue(index);
            return Err(StartError::Host { index, source });
        }
        self.thread.add_backend(server);
        // Chains may have been made available before.
        shared.wake.wake();
        Ok(())
    }

    /// Stops the queue and returns it; `None` if it does not run.
    pub fn stop(&mut self) -> Option<Queue> {
        let index = self.thread.shared.index;
        let server = self.server.as_mut()?;
        server.queue(index)?;
        self.thread.forget(server);
        server.stop_queue(index)
    }

    /// Runs `work`, which may change the server's backend.
    pub fn change(&mut self, work: impl FnOnce(&mut S)) {
        let QueueThread { shared, .. } = self.thread;
        let Some(server) = &mut *self.server else {
            return;
        };
        self.thread.forget_backend(server);
        work(server);
        if server.queue(shared.index).is_some() && !shared.parked.load(Ordering::SeqCst) {
            self.thread.add_backend(server);
        }
    }

    /// Drops the server, and makes the thread exit.
    pub fn end(mut self) {
        *self.server = None;
        self.thread.shared.wake.wake();
    }
}

/// What a thread was woken for.
#[derive(Debug, Default)]
struct Ready {
    wake: bool,
    /// The queue is to be looked at.
    queue: bool,
    backend: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
