//! The virtio core: queues, descriptor chains, faults, and the interface between devices and
//! transports.
//!
//! * [`Queue`] hands out each available descriptor chain once, as a [`Chain`] that was walked
//!   and bounded when it was taken; the driver cannot change it afterwards.
//! * [`VirtioDevice`] is what a device implements. It owns each of its queues between
//!   [`VirtioDevice::start_queue`] and [`VirtioDevice::stop_queue`].
//! * [`Worker`] is a device as its event loop owns it. All calls to the device go through it: other
//!   threads send a [`Command`] over a [`WorkerLink`].
//! * [`QueueThread`] serves a single queue apart from its device's event loop, for devices that
//!   want that; [`Poller`] is what such threads and event loops wait with.
//! * [`DeviceInfo`] is the part of the device that can be read without asking the worker:
//!   configuration space, counters, features. None of it waits for the device's work.
//! * [`transport`] turns register accesses into commands.
//!
//! Clauses are those of the Virtual I/O Device specification, version 1.3.

mod chain;
mod config_space;
mod counters;
mod descriptors;
mod device;
mod fault;
mod interrupt;
pub mod iovec;
mod poller;
mod progress;
mod queue;
mod queue_error;
mod queue_thread;
mod queues;
mod rate;
mod rate_limit;
mod read_only;
mod region;
mod release;
mod saved;
mod spare;
pub mod transport;
mod worker;

pub use crate::restore::RestoreError;
pub use chain::{Chain, ChainError, MAX_SEGMENTS, Segment};
pub use config_space::ConfigSpace;
pub(crate) use counters::Latency;
pub use counters::{Count, Counter, ReadCounters};
pub use device::{DeviceInfo, DeviceType, Placement, VirtioDevice};
pub use fault::{Fault, GuestFault, HostFault};
pub use interrupt::{Interrupt, InterruptLine};
pub use poller::{PollEvents, Poller, Wait, Wake};
pub use progress::{Progress, StartError};
pub(crate) use queue::MAX_TURN;
pub use queue::{Queue, QueueConfig, QueueResources, QueueState};
pub use queue_error::{QueueConfigError, QueueFault};
pub use queue_thread::{HaltedQueue, QueueServer, QueueThread, QueueThreadBody, QueueThreads};
pub(crate) use queues::Queues;
pub(crate) use rate::Limiter;
pub use rate::Rate;
pub use rate_limit::RateLimit;
pub use release::release;
pub use saved::{SavedConfig, SavedDevice};
pub(crate) use spare::SpareList;
pub use worker::{Command, Worker, WorkerLink};

/// Feature bits that belong to the ring and the transport rather than to a device (§6).
pub mod features {
    /// Descriptors may point to tables of descriptors (`VIRTIO_F_INDIRECT_DESC`).
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// `used_event` and `avail_event` are in use (`VIRTIO_F_EVENT_IDX`).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The device follows virtio 1.0 or later (`VIRTIO_F_VERSION_1`); always required here.
    pub const VERSION_1: u64 = 1 << 32;
    /// The bits that every transport offers for every device.
    pub const RING: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1;
}
