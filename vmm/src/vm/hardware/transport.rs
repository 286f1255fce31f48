//! What a transport gets of a device, and what it creates for it: `mmio.rs` and `pci` are the
//! transports.

use std::sync::Arc;

use podvisor_devices::virtio::{DeviceInfo, Interrupt, WorkerLink};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::GuestMemory;
use crate::vm::error::BuildError;

/// What a transport created for a device.
#[derive(Debug)]
pub(crate) struct TransportHandle<R> {
    /// The device's registers, which are on the bus.
    pub(crate) registers: R,
    pub(crate) irq: Arc<dyn Interrupt>,
    /// One eventfd per queue, which KVM writes when the driver notifies it.
    pub(crate) kicks: Vec<Arc<EventFd>>,
}

impl<R> TransportHandle<R> {
    /// Replaces the registers by what `with` makes of them.
    pub(crate) fn map<T>(self, with: impl FnOnce(R) -> T) -> TransportHandle<T> {
        TransportHandle {
            registers: with(self.registers),
            irq: self.irq,
            kicks: self.kicks,
        }
    }
}

/// What a transport needs to connect a device.
#[derive(Debug)]
pub(crate) struct TransportSetup<'a> {
    pub(crate) info: &'a DeviceInfo,
    pub(crate) link: Arc<dyn WorkerLink>,
    pub(crate) mem: &'a GuestMemory,
}

/// Creates eventfds for the notifications of this number of queues.
pub(crate) fn kicks(queues: usize) -> Result<Vec<Arc<EventFd>>, BuildError> {
    let eventfd = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
    (0..queues)
        .map(|_| eventfd().map(Arc::new))
        .collect::<Result<_, _>>()
        .map_err(|source| BuildError::Descriptor {
            what: "a notification eventfd",
            source,
        })
}
