//! The virtio device trait: a worker that serves queues, and the information that others have about
//! it.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::{
    ConfigSpace, Fault, Progress, Queue, QueueThreads, ReadCounters, RestoreError, SavedDevice,
    StartError,
};

/// Device type numbers (§5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceType {
    /// Network card (§5.1).
    Net,
    /// Block device (§5.2).
    Block,
    /// Console (§5.3).
    Console,
    /// Entropy device (§5.4).
    Entropy,
    /// Memory balloon (§5.5).
    Balloon,
    /// Socket device (§5.10).
    Vsock,
    /// Memory device (§5.15).
    Mem,
    /// File system (§5.11).
    FileSystem,
    /// Persistent memory device (§5.19).
    Pmem,
    /// A program's own device, of the type with this number. On PCI it is at most 63.
    Other(u32),
}

impl DeviceType {
    /// A short name, for logs and counters.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Block => "blk",
            Self::Console => "console",
            Self::Entropy => "rng",
            Self::Balloon => "balloon",
            Self::Vsock => "vsock",
            Self::Mem => "mem",
            Self::FileSystem => "fs",
            Self::Pmem => "pmem",
            Self::Other(_) => "other",
        }
    }

    /// The type's number.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Net => 1,
            Self::Block => 2,
            Self::Console => 3,
            Self::Entropy => 4,
            Self::Balloon => 5,
            Self::Vsock => 19,
            Self::Mem => 24,
            Self::FileSystem => 26,
            Self::Pmem => 27,
            Self::Other(number) => number,
        }
    }
}

/// The information about a device that its transport and owner have without asking its worker.
/// Created once, cheap to clone.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The device's type number.
    pub device_type: DeviceType,
    /// The largest size of each queue, in descriptors; powers of two.
    pub queue_sizes: Vec<u16>,
    /// Device-specific feature bits; the transport adds [`super::features::RING`].
    pub features: u64,
    /// Configuration space.
    pub config: Arc<ConfigSpace>,
    /// Counters.
    pub counters: Arc<dyn ReadCounters>,
}

/// Which event loop a device runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The VM's I/O thread, with other devices: for one that never blocks.
    Shared,
    /// Its own thread: for a device whose backend may block.
    Own,
}

/// A virtio device, apart from its transport.
///
/// It is owned by one event loop, through a [`super::Worker`], which makes all calls.
/// [`Self::start_queue`] and [`Self::stop_queue`] serve activation, reset of the device or of one
/// queue, pause, snapshot and shutdown alike: a queue that is stopped has no chain in flight, and
/// the device touches guest memory only through queues that run.
pub trait VirtioDevice: std::fmt::Debug + Send + Any {
    /// Returns the device's info. The same at every call.
    fn info(&self) -> DeviceInfo;

    /// Returns which event loop it runs on.
    fn placement(&self) -> Placement {
        Placement::Shared
    }

    /// Gives queues threads of their own, and returns those. The caller runs each of
    /// [`QueueThreads::bodies`] on a thread before the queue is started; from then on the device's
    /// event loop does not serve it. Called once; if never, the event loop serves all queues.
    fn queue_threads(&mut self) -> QueueThreads {
        QueueThreads::default()
    }

    /// Whether the event loop waits for notifications of queue `index`: not where the device has
    /// another server of the queue wait for them, such as the kernel. The same at every call.
    fn watches(&self, index: u16) -> bool {
        let _ = index;
        true
    }

    /// Driver and device agreed on these feature bits. Called before the first
    /// [`Self::start_queue`] after a reset.
    fn negotiated(&mut self, features: u64) {
        let _ = features;
    }

    /// Takes a queue and serves it from now on. [`Self::on_queue`] is called for it soon. A
    /// device that needs several queues waits until it has all of them.
    ///
    /// # Errors
    /// If the queue does not exist, or cannot be served. It is dropped then.
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError>;

    /// Completes or puts back the chains of queue `index` that are in flight, and returns the
    /// queue. `None` if it does not run.
    fn stop_queue(&mut self, index: u16) -> Option<Queue>;

    /// Returns whether stopped queues have nothing in flight. `false` if the host side has failed
    /// in a way that it cannot be waited for: then it may touch guest memory although no queue
    /// runs.
    fn is_quiet(&self) -> bool {
        true
    }

    /// Returns whether the [`crate::WriteLog`] is told of all that the device writes to guest
    /// memory, as its queues do. `false` if another server of a queue, such as the kernel, writes
    /// there, too.
    fn logs_writes(&self) -> bool {
        true
    }

    /// The driver reset the device, whose queues are stopped: forgets all state of that driver's
    /// session (connections, say). Only stopping queues, for a pause, keeps it.
    fn reset(&mut self) {}

    /// The driver notified queue `index`. A call for a queue that does not run, or does not
    /// exist, does nothing.
    ///
    /// # Errors
    /// Any [`Fault`] means that the device's queues must be stopped.
    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault>;

    /// A file descriptor that is readable when the host side has work for
    /// [`Self::on_backend`]. It stays the same for the device's lifetime; devices with several, or
    /// whose interest changes, own an epoll instance and return that. It is waited for only while a
    /// queue runs.
    fn backend(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Called when [`Self::backend`] is readable. A device that has more to do keeps it readable.
    ///
    /// # Errors
    /// Any [`Fault`] means that the device's queues must be stopped.
    fn on_backend(&mut self) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }

    /// Returns the device's state beyond its queues, for a snapshot. All queues are stopped.
    fn save(&self) -> SavedDevice {
        SavedDevice::default()
    }

    /// Restores what [`Self::save`] returned, in a device that was created like the saved one and
    /// has not been started. The state is not trusted.
    ///
    /// # Errors
    /// See [`RestoreError`].
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        match saved.of_version(0)? {
            [] => Ok(()),
            _ => Err(RestoreError::Invalid {
                what: "state for a device that keeps none",
            }),
        }
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
