//! All loops of a VM: while devices are attached to them, as threads to be started, and as their
//! owner sees them.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use podvisor_devices::virtio::{
    Count, Interrupt, Placement, QueueThreadBody, VirtioDevice, Worker,
};
use vmm_sys_util::eventfd::EventFd;

use super::event_loop::{EventLoop, Link};
use super::faults::Faults;
use super::mailbox::Mailbox;

/// The thread of the loop that devices share.
pub(super) const SHARED_LOOP_NAME: &str = "vm-io";

/// Loops under construction, while devices are attached.
#[derive(Debug)]
pub(crate) struct LoopsBuilder {
    shared: EventLoop,
    own: Vec<EventLoop>,
    queues: Vec<NamedQueue>,
    faults: Faults,
}

/// A queue of a device that has a thread of its own, and the name of that.
#[derive(Debug)]
pub(crate) struct NamedQueue {
    pub(crate) name: String,
    pub(crate) body: QueueThreadBody,
}

impl NamedQueue {
    /// Returns those of a device that is about to get its place on a loop.
    pub(crate) fn of(worker: &mut Worker) -> Vec<Self> {
        let bodies = worker.begin_threads().into_iter();
        let named = bodies.map(|body| Self {
            name: format!("vm-{}-q{}", worker.name(), body.queue),
            body,
        });
        named.collect()
    }
}

/// The parts that need threads, besides vCPUs.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) loops: Vec<EventLoop>,
    pub(crate) queues: Vec<NamedQueue>,
}

/// A device's place on a loop, before it has its worker.
#[derive(Debug)]
pub(crate) struct Place {
    /// `None` for the shared one.
    own: Option<usize>,
    /// The link to the worker.
    pub(crate) link: Link,
}

impl LoopsBuilder {
    pub(crate) fn new(faults: Faults) -> io::Result<Self> {
        Ok(Self {
            shared: EventLoop::new(SHARED_LOOP_NAME.to_owned(), faults.clone())?,
            own: Vec::new(),
            queues: Vec::new(),
            faults,
        })
    }

    /// Chooses the loop of a device. [`Self::install`] must follow.
    pub(crate) fn place(&mut self, name: &str, placement: Placement) -> io::Result<Place> {
        let own = match placement {
            Placement::Shared => None,
            Placement::Own => {
                let event_loop = EventLoop::new(format!("vm-{name}"), self.faults.clone())?;
                self.own.push(event_loop);
                Some(self.own.len() - 1)
            }
        };
        let event_loop = self.event_loop(own);
        let link = Link {
            mailbox: event_loop.mailbox(),
            slot: event_loop.reserve(),
        };
        Ok(Place { own, link })
    }

    /// Gives the loop its worker. Returns the counter of the device's faults.
    pub(crate) fn install(
        &mut self,
        place: &Place,
        name: String,
        device: Box<dyn VirtioDevice>,
        irq: Arc<dyn Interrupt>,
        kicks: Vec<Arc<EventFd>>,
    ) -> io::Result<Arc<Count>> {
        let mut worker = Worker::new(name, device, irq);
        self.queues.extend(NamedQueue::of(&mut worker));
        let faults = worker.faults();
        let slot = place.link.slot;
        self.event_loop(place.own).fill(slot, worker, kicks)?;
        Ok(faults)
    }

    fn event_loop(&mut self, own: Option<usize>) -> &mut EventLoop {
        match own {
            Some(index) => &mut self.own[index],
            None => &mut self.shared,
        }
    }

    /// Returns the loops, ready to run, and their owner's view. A loop without devices is left out.
    pub(crate) fn finish(self) -> (Service, Loops) {
        let mut loops = self.own;
        if !self.shared.is_empty() {
            loops.insert(0, self.shared);
        }
        let entries = loops
            .iter()
            .map(|event_loop| (event_loop.name().to_owned(), event_loop.mailbox()))
            .collect();
        let entries = Mutex::new(entries);
        let queues = self.queues;
        (Service { loops, queues }, Loops { entries })
    }
}

/// All loops of a VM, from outside.
pub(crate) struct Loops {
    entries: Mutex<Vec<(String, Arc<Mailbox<EventLoop>>)>>,
}

impl fmt::Debug for Loops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries();
        let names = entries.iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

impl Loops {
    /// Stops all queues of all devices. If `deadline` passes before, or a device cannot be stopped,
    /// everything continues, and the name of its loop is returned.
    pub(crate) fn pause(&self, deadline: Instant) -> Result<(), String> {
        let answers: Vec<(String, Receiver<bool>)> = self
            .entries()
            .iter()
            .map(|(name, mailbox)| {
                let (done, wait) = sync_channel(1);
                mailbox.send(Box::new(move |event_loop| {
                    // The receiver is gone after the deadline.
                    let _ = done.send(event_loop.pause());
                }));
                (name.clone(), wait)
            })
            .collect();
        for (name, wait) in answers {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait.recv_timeout(left) {
                // A loop that is gone no longer serves anything.
                Ok(true) | Err(RecvTimeoutError::Disconnected) => {}
                Ok(false) | Err(RecvTimeoutError::Timeout) => {
                    self.resume();
                    return Err(name);
                }
            }
        }
        Ok(())
    }

    /// Resumes paused devices.
    pub(crate) fn resume(&self) {
        for (_, mailbox) in self.entries().iter() {
            mailbox.send(Box::new(EventLoop::resume));
        }
    }

    /// Ends all loops.
    pub(crate) fn end(&self) {
        for (_, mailbox) in self.entries().iter() {
            mailbox.send(Box::new(EventLoop::end));
        }
    }

    /// Returns the loops that are not gone. A loop closes its mailbox only when it no longer serves
    /// any device: a device that is being removed may still write guest memory.
    pub(super) fn entries(&self) -> MutexGuard<'_, Vec<(String, Arc<Mailbox<EventLoop>>)>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|(_, mailbox)| !mailbox.is_closed());
        entries
    }
}
