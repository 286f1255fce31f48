//! The virtio core: queues, chains, faults, and the two traits that devices and transports
//! meet at.
//!
//! * [`Queue`] hands out each available descriptor chain once, as a [`Chain`] that was walked
//!   and bounded when it was taken; the driver cannot change it afterwards.
//! * [`VirtioDevice`] is what a device implements. It owns its queues between
//!   [`VirtioDevice::start`] and [`VirtioDevice::stop`].
//! * [`transport`] turns register accesses into that pair of calls.
//!
//! Clauses are those of the Virtual I/O Device specification, version 1.3.

mod chain;
mod device;
mod fault;
mod interrupt;
pub mod iovec;
mod queue;
mod rate_limit;
pub mod transport;

pub use chain::{Chain, ChainError, MAX_SEGMENTS, Segment};
pub use device::{Counter, DeviceType, Progress, Resources, StartError, VirtioDevice, read_config};
pub use fault::{Fault, GuestFault, HostFault};
pub use interrupt::Interrupt;
pub use queue::{Queue, QueueConfig, QueueConfigError, QueueFault};
pub use rate_limit::RateLimit;

/// Feature bits that belong to the ring and the transport rather than to a device (§6).
pub mod features {
    /// Descriptors may point to tables of descriptors (`VIRTIO_F_INDIRECT_DESC`).
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// `used_event` and `avail_event` are in use (`VIRTIO_F_EVENT_IDX`).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The device follows virtio 1.0 or later (`VIRTIO_F_VERSION_1`); always required here.
    pub const VERSION_1: u64 = 1 << 32;
    /// What every transport offers on behalf of every device.
    pub const RING: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1;
}
