//! One loop: its workers, the events that wake it, and commands between their turns.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use podvisor_devices::virtio::{
    Command, DeviceType, HostFault, PollEvents, Poller, Progress, Wait, Worker, WorkerLink,
};
use podvisor_devices::vsock::VsockDevice;
use vmm_sys_util::eventfd::EventFd;

use super::faults::{self, Faults};
use super::mailbox::Mailbox;

/// Event data of the mailbox.
const MAILBOX: u64 = u64::MAX;
/// Low half of the event data of a device's backend; queues have their index there.
const BACKEND: u32 = u32::MAX;
/// The same of the threads of its queues.
const ALARM: u32 = u32::MAX - 1;

/// What a device is called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Queue(u16),
    Backend,
    /// A fault on a thread of a queue.
    Alarm,
}

/// A worker and the descriptors that wake it.
#[derive(Debug)]
struct Slot {
    worker: Worker,
    kicks: Vec<Arc<EventFd>>,
    backend_polled: bool,
}

/// See the module's documentation. Created on one thread, then moved to its own.
#[derive(Debug)]
pub(crate) struct EventLoop {
    name: String,
    mailbox: Arc<Mailbox<Self>>,
    poller: Poller,
    /// By numbers that are never reused: handles of a removed device must not reach another one.
    slots: BTreeMap<usize, Slot>,
    /// The number of the next place.
    next_slot: usize,
    /// The new places of devices that were moved to their own loop.
    moved: HashMap<usize, Link>,
    /// Sources that used up their share and are called again after the others, each once.
    again: VecDeque<(usize, Source)>,
    paused: bool,
    ended: bool,
    faults: Faults,
}

impl EventLoop {
    pub(super) fn new(name: String, faults: Faults) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let poller = Poller::new()?;
        poller.add(&mailbox.wake_fd(), MAILBOX)?;
        Ok(Self {
            name,
            mailbox,
            poller,
            slots: BTreeMap::new(),
            next_slot: 0,
            moved: HashMap::new(),
            again: VecDeque::new(),
            paused: false,
            ended: false,
            faults,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn mailbox(&self) -> Arc<Mailbox<Self>> {
        self.mailbox.clone()
    }

    /// Called before a thread runs it: from then on handles may ask it for something.
    pub(crate) fn begin(&self) {
        self.mailbox.serve();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns whether one of its devices is of this type.
    pub(crate) fn serves(&self, device_type: DeviceType) -> bool {
        let mut devices = self.slots.values();
        devices.any(|slot| slot.worker.device().info().device_type == device_type)
    }

    /// Returns whether one of its devices creates sockets and uses paths of the host.
    pub(crate) fn uses_paths(&self) -> bool {
        let mut devices = self.slots.values();
        devices.any(|slot| {
            let device: &dyn Any = slot.worker.device();
            let vsock = device.downcast_ref::<VsockDevice>();
            vsock.is_some_and(VsockDevice::uses_paths)
        })
    }

    /// Reserves a place for a worker and returns its number.
    pub(super) fn reserve(&mut self) -> usize {
        let number = self.next_slot;
        self.next_slot = number.wrapping_add(1);
        number
    }

    /// Puts a worker, whose queues are notified by `kicks`, into the place that was reserved for
    /// it.
    pub(super) fn fill(
        &mut self,
        index: usize,
        mut worker: Worker,
        kicks: Vec<Arc<EventFd>>,
    ) -> io::Result<()> {
        self.watch(index, &worker, &kicks)?;
        if self.paused {
            // Nothing of it has run.
            let _ = worker.pause();
        }
        let slot = Slot {
            worker,
            kicks,
            backend_polled: false,
        };
        self.slots.insert(index, slot);
        Ok(())
    }

    /// Removes a device, after completing everything in flight. Returns its link if it is on
    /// another loop.
    pub(super) fn remove(&mut self, index: usize) -> Option<Link> {
        if let Some(mut slot) = self.take(index) {
            slot.worker.stop();
        }
        self.moved.remove(&index)
    }

    /// Moves a device to the place that another loop has reserved for it. Commands that arrive here
    /// for it are forwarded, in their order.
    pub(super) fn move_to(&mut self, index: usize, to: Link) {
        let Some(mut slot) = self.take(index) else {
            return;
        };
        let (_, failed) = slot.worker.pause();
        if let Some(fault) = failed {
            self.keep_fault(slot.worker.name(), fault);
        }
        slot.backend_polled = false;
        let Link { mailbox, slot: at } = to.clone();
        mailbox.send(Box::new(move |event_loop| event_loop.add_slot(at, slot)));
        self.moved.insert(index, to);
    }

    fn add_slot(&mut self, index: usize, mut slot: Slot) {
        if let Err(error) = self.watch(index, &slot.worker, &slot.kicks) {
            let device = slot.worker.name();
            tracing::error!(device, %error, "failed to watch a device's ioeventfds");
        }
        let goes_on = !self.paused && slot.worker.resume();
        self.slots.insert(index, slot);
        if goes_on {
            self.look_at_queues(index);
        }
        self.poll_backend(index);
    }

    /// Takes a device out of its slot, so that this loop gets no more of its events.
    fn take(&mut self, index: usize) -> Option<Slot> {
        let slot = self.slots.remove(&index)?;
        // They were added, or adding them failed.
        for (_, kick) in watched(&slot.worker, &slot.kicks) {
            let _ = self.poller.remove(&**kick);
        }
        let backend = slot.worker.device().backend();
        let others = backend.filter(|_| slot.backend_polled).into_iter();
        for fd in others.chain(slot.worker.alarm()) {
            let _ = self.poller.remove(&fd);
        }
        Some(slot)
    }

    /// Waits for the notifications of a worker's queues, and for faults of those with threads.
    fn watch(&self, index: usize, worker: &Worker, kicks: &[Arc<EventFd>]) -> io::Result<()> {
        for (queue, kick) in watched(worker, kicks) {
            self.poller.add_kick(kick, data(index, queue))?;
        }
        let alarm = worker.alarm();
        alarm.map_or(Ok(()), |fd| self.poller.add(&fd, data(index, ALARM)))
    }

    fn slot(&self, index: usize) -> Option<&Slot> {
        self.slots.get(&index)
    }

    fn slot_mut(&mut self, index: usize) -> Option<&mut Slot> {
        self.slots.get_mut(&index)
    }

    /// Serves the devices until [`Self::end`], then drains them.
    ///
    /// # Errors
    /// Fails if the kernel cannot report events: the devices are no longer served.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = PollEvents::default();
        let mut result = Ok(());
        while !self.ended && result.is_ok() {
            result = self.turn(&mut events);
        }
        for slot in self.slots.values_mut() {
            slot.worker.stop();
        }
        result
    }

    /// Waits for something to do and does it.
    fn turn(&mut self, events: &mut PollEvents) -> io::Result<()> {
        if self.paused {
            wait_readable(self.mailbox.wake_fd())?;
            self.commands();
            return Ok(());
        }
        let wait = match self.again.is_empty() {
            true => Wait::Blocking,
            false => Wait::Nonblocking,
        };
        let ready = self.poller.wait(wait, events)?;
        // Sources that were queued before come after those that were just notified.
        let before = self.again.len();
        for event in ready {
            self.on_event(event);
            if !self.may_serve() {
                return Ok(());
            }
        }
        for _ in 0..before {
            if let Some((slot, source)) = self.again.pop_front() {
                self.serve(slot, source);
            }
            if !self.may_serve() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Executes commands that came meanwhile; `false` if devices must be stopped now.
    fn may_serve(&mut self) -> bool {
        if self.mailbox.is_pending() {
            self.commands();
        }
        !self.paused && !self.ended
    }

    fn commands(&mut self) {
        for command in self.mailbox.take() {
            command(self);
        }
    }

    fn on_event(&mut self, data: u64) {
        if data == MAILBOX {
            self.commands();
            return;
        }
        let [.., a, b, c, d] = data.to_be_bytes();
        let low = u32::from_be_bytes([a, b, c, d]);
        let slot = usize::try_from(data >> 32).unwrap_or(usize::MAX);
        let source = match low {
            BACKEND => Source::Backend,
            ALARM => Source::Alarm,
            queue => Source::Queue(u16::try_from(queue).unwrap_or(u16::MAX)),
        };
        self.serve(slot, source);
    }

    fn serve(&mut self, index: usize, source: Source) {
        let Some(slot) = self.slot_mut(index) else {
            return;
        };
        let result = match source {
            Source::Queue(queue) => slot.worker.on_queue(queue),
            Source::Backend => slot.worker.on_backend(),
            Source::Alarm => slot.worker.on_alarm(),
        };
        match result {
            Ok(Progress::Idle) => {}
            Ok(Progress::More) => self.call_again(index, source),
            Err(fault) => {
                let name = slot.worker.name().to_owned();
                self.keep_fault(&name, fault);
            }
        }
        self.poll_backend(index);
    }

    fn call_again(&mut self, slot: usize, source: Source) {
        if !self.again.contains(&(slot, source)) {
            self.again.push_back((slot, source));
        }
    }

    fn keep_fault(&self, device: &str, fault: HostFault) {
        faults::keep(&self.faults, device, fault);
    }

    /// Keeps the backend registered exactly while the device is serving.
    fn poll_backend(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(&index) else {
            return;
        };
        let wanted = slot.worker.is_serving();
        if wanted == slot.backend_polled {
            return;
        }
        let Some(fd) = slot.worker.device().backend() else {
            return;
        };
        let result = match wanted {
            true => self.poller.add(&fd, data(index, BACKEND)),
            false => self.poller.remove(&fd),
        };
        match result {
            Ok(()) => slot.backend_polled = wanted,
            Err(error) => {
                tracing::error!(device = slot.worker.name(), %error, "epoll on a backend failed");
            }
        }
    }

    // ---- Commands ----

    /// Executes a command for one worker.
    pub(super) fn command(&mut self, index: usize, command: Command) {
        let Some(slot) = self.slot_mut(index) else {
            if let Some(link) = self.moved.get(&index) {
                link.try_send(command);
            }
            return;
        };
        // A backend that is about to be replaced must not stay registered.
        let polled = slot.backend_polled;
        let fd = |slot: &Slot| slot.worker.device().backend().map(|fd| fd.as_raw_fd());
        let before = fd(slot);
        let served = slot.worker.is_serving();
        command(&mut slot.worker);
        if polled && fd(slot) != before {
            slot.backend_polled = false;
        }
        if slot.worker.is_serving() && !served {
            self.look_at_queues(index);
        }
        self.poll_backend(index);
    }

    /// Chains may have been made available before the queues ran.
    fn look_at_queues(&mut self, index: usize) {
        let count = self.slot(index).map_or(0, |slot| slot.worker.queue_count());
        for queue in 0..count {
            self.call_again(index, Source::Queue(queue));
        }
    }

    /// Stops all queues: nothing is in flight until [`Self::resume`]. `false` if a device cannot
    /// guarantee that.
    pub(crate) fn pause(&mut self) -> bool {
        self.paused = true;
        self.again.clear();
        let mut quiet = true;
        let mut failed = Vec::new();
        for slot in self.slots.values_mut() {
            let (is_quiet, fault) = slot.worker.pause();
            quiet &= is_quiet;
            failed.extend(fault.map(|fault| (slot.worker.name().to_owned(), fault)));
        }
        for (device, fault) in failed {
            self.keep_fault(&device, fault);
        }
        quiet
    }

    pub(super) fn resume(&mut self) {
        if !std::mem::take(&mut self.paused) {
            return;
        }
        let all: Vec<usize> = self.slots.keys().copied().collect();
        for index in all {
            let resumed = self
                .slot_mut(index)
                .is_some_and(|slot| slot.worker.resume());
            if resumed {
                self.look_at_queues(index);
            }
            self.poll_backend(index);
        }
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.mailbox.close();
    }
}

/// The link to one worker: its loop's mailbox, and its place there.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(super) mailbox: Arc<Mailbox<EventLoop>>,
    pub(super) slot: usize,
}

impl Link {
    /// Returns whether the loop has started: before that, commands wait.
    pub(crate) fn has_begun(&self) -> bool {
        self.mailbox.is_served()
    }

    /// Sends a command; `false` if the loop is gone.
    pub(crate) fn try_send(&self, command: Command) -> bool {
        let slot = self.slot;
        self.mailbox.send(Box::new(move |event_loop| {
            event_loop.command(slot, command)
        }))
    }

    /// Moves the worker to a place that another loop has reserved for it. This link stays valid.
    pub(crate) fn move_to(&self, to: Self) {
        let slot = self.slot;
        self.mailbox
            .send(Box::new(move |event_loop| event_loop.move_to(slot, to)));
    }
}

impl WorkerLink for Link {
    fn send(&self, command: Command) {
        self.try_send(command);
    }
}

/// The notifications that the loop waits for, with their queues.
fn watched<'a>(
    worker: &'a Worker,
    kicks: &'a [Arc<EventFd>],
) -> impl Iterator<Item = (u32, &'a Arc<EventFd>)> {
    let watched = |(queue, _): &(u16, _)| worker.watches(*queue);
    let all = (0u16..).zip(kicks).filter(watched);
    all.map(|(queue, kick)| (queue.into(), kick))
}

fn data(slot: usize, low: u32) -> u64 {
    // There are far fewer devices than 2^32.
    (slot as u64) << 32 | u64::from(low)
}

/// Waits only for an eventfd.
fn wait_readable(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut fds = [rustix::event::PollFd::new(
        &fd,
        rustix::event::PollFlags::IN,
    )];
    match rustix::event::poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
