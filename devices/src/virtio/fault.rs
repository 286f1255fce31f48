//! Faults of a device: either the guest broke the protocol and its device is parked, or the host
//! side failed and the device's owner is notified.

use std::io;

use super::{ChainError, QueueFault};

/// Why a device stopped serving its queues.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The driver broke the specification. The device is parked with `DEVICE_NEEDS_RESET`
    /// (§2.1.1); the VM keeps running and the driver may reset the device.
    #[error("the guest's driver broke the virtio protocol")]
    Guest(#[source] GuestFault),
    /// The host side of the device failed: the device's owner is notified.
    #[error("the host side of the device failed")]
    Host(#[source] HostFault),
}

/// A driver's mistake.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestFault {
    /// In the ring.
    #[error("the virtqueue is not usable")]
    Queue(#[source] QueueFault),
    /// In the buffers of a chain.
    #[error("a descriptor chain has the wrong shape")]
    Chain(#[source] ChainError),
    /// In the device's own protocol.
    #[error("{0}")]
    Protocol(&'static str),
}

/// A failure on the host.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct HostFault {
    /// What was attempted, and on what.
    pub what: &'static str,
    /// The operating system's answer.
    #[source]
    pub source: io::Error,
}

impl Fault {
    /// A violation of the device's own protocol.
    #[must_use]
    pub fn protocol(what: &'static str) -> Self {
        Self::Guest(GuestFault::Protocol(what))
    }

    /// A failure of the host while doing `what`.
    #[must_use]
    pub fn host(what: &'static str, source: io::Error) -> Self {
        Self::Host(HostFault { what, source })
    }
}

impl From<QueueFault> for Fault {
    fn from(fault: QueueFault) -> Self {
        Self::Guest(GuestFault::Queue(fault))
    }
}

impl From<ChainError> for Fault {
    fn from(error: ChainError) -> Self {
        Self::Guest(GuestFault::Chain(error))
    }
}
