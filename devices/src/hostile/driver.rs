//! The driver's side of either transport.

use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::pci::MessageInterrupt;
use crate::testing::DirectLink;
use crate::virtio::VirtioDevice;
use crate::virtio::transport::pci::{DEVICE, NOTIFY, NOTIFY_MULTIPLIER};
use crate::virtio::transport::{
    MmioInterrupt, MmioTransport, PciInterrupt, PciTransport, TransportParts,
};
use crate::{GuestRam, WriteLog};

/// The transport of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum On {
    Mmio,
    Pci,
}

/// Registers of virtio over MMIO (§4.2.2), which a driver here also uses to name those of PCI.
pub(super) mod reg {
    pub(crate) const FEATURES: u64 = 0x10;
    pub(crate) const FEATURES_SEL: u64 = 0x14;
    pub(crate) const DRIVER_FEATURES: u64 = 0x20;
    pub(crate) const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub(crate) const QUEUE_SEL: u64 = 0x30;
    pub(crate) const QUEUE_SIZE_MAX: u64 = 0x34;
    pub(crate) const QUEUE_SIZE: u64 = 0x38;
    pub(crate) const QUEUE_READY: u64 = 0x44;
    pub(crate) const QUEUE_NOTIFY: u64 = 0x50;
    pub(crate) const STATUS: u64 = 0x70;
    pub(crate) const DESC: u64 = 0x80;
    pub(crate) const DRIVER: u64 = 0x90;
    pub(crate) const DEVICE: u64 = 0xa0;
    pub(crate) const CONFIG: u64 = 0x100;
}

/// Registers of either transport.
pub(super) enum Driver {
    Mmio(Box<MmioTransport>),
    Pci(Box<PciTransport>),
}

#[derive(Debug)]
struct Nobody;

impl MessageInterrupt for Nobody {
    fn send(&self, _: u64, _: u32) {}
}

impl Driver {
    pub(super) fn new(
        on: On,
        device: Box<dyn VirtioDevice>,
        mem: &GuestRam,
        kicks: &[Arc<EventFd>],
    ) -> (Self, DirectLink) {
        let info = device.info();
        let parts = |worker: &DirectLink| TransportParts {
            info: info.clone(),
            link: Arc::new(worker.clone()),
            mem: mem.clone(),
            kicks: kicks.to_vec(),
            writes: WriteLog::default(),
        };
        match on {
            On::Mmio => {
                let line = EventFd::new(EFD_NONBLOCK).unwrap();
                let irq = Arc::new(MmioInterrupt::new(line));
                let worker = DirectLink::new(device, irq.clone());
                let mmio = MmioTransport::new(parts(&worker), irq);
                (Self::Mmio(Box::new(mmio)), worker)
            }
            On::Pci => {
                let irq = Arc::new(PciInterrupt::new(info.queue_sizes.len(), Nobody));
                let worker = DirectLink::new(device, irq.clone());
                let pci = PciTransport::new(parts(&worker), irq);
                (Self::Pci(Box::new(pci)), worker)
            }
        }
    }

    /// Writes a register. If it is narrower on PCI and the value does not fit, its largest value is
    /// written instead, which is just as wrong.
    pub(super) fn set(&mut self, register: u64, value: u32) {
        match self {
            Self::Mmio(mmio) => mmio.write(register, &value.to_le_bytes()),
            Self::Pci(pci) => {
                let (offset, width) = match register {
                    reg::QUEUE_NOTIFY => {
                        let queue = u64::from(value) * u64::from(NOTIFY_MULTIPLIER);
                        (NOTIFY.saturating_add(queue), 2)
                    }
                    other => on_pci(other),
                };
                let value = match width {
                    1 => value.min(0xff),
                    2 => value.min(0xffff),
                    _ => value,
                };
                pci.write_bar(offset, &value.to_le_bytes()[..width]);
            }
        }
    }

    /// Reads a register.
    pub(super) fn get(&mut self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        match self {
            Self::Mmio(mmio) => mmio.read(register, &mut bytes),
            Self::Pci(pci) => {
                let (offset, width) = on_pci(register);
                pci.read_bar(offset, &mut bytes[..width]);
            }
        }
        u32::from_le_bytes(bytes)
    }

    /// Reads any bytes at any offset.
    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) {
        match self {
            Self::Mmio(mmio) => mmio.read(offset, data),
            Self::Pci(pci) => pci.read_bar(offset, data),
        }
    }

    /// Writes any bytes at any offset.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        match self {
            Self::Mmio(mmio) => mmio.write(offset, data),
            Self::Pci(pci) => pci.write_bar(offset, data),
        }
    }

    /// The offset of configuration space, and how much room there is for it.
    pub(super) fn config(&self) -> (u64, u64) {
        match self {
            Self::Mmio(_) => (reg::CONFIG, 0x1000),
            Self::Pci(_) => (DEVICE, NOTIFY - DEVICE),
        }
    }
}

/// Offset and width of a register in the BAR (§4.1.4.3).
fn on_pci(register: u64) -> (u64, usize) {
    match register {
        reg::FEATURES_SEL => (0x00, 4),
        reg::FEATURES => (0x04, 4),
        reg::DRIVER_FEATURES_SEL => (0x08, 4),
        reg::DRIVER_FEATURES => (0x0c, 4),
        reg::QUEUE_SEL => (0x16, 2),
        reg::QUEUE_SIZE_MAX | reg::QUEUE_SIZE => (0x18, 2),
        reg::QUEUE_READY => (0x1c, 2),
        reg::STATUS => (0x14, 1),
        reg::DESC..0x88 => (0x20 + (register - reg::DESC), 4),
        reg::DRIVER..0x98 => (0x28 + (register - reg::DRIVER), 4),
        reg::DEVICE..0xa8 => (0x30 + (register - reg::DEVICE), 4),
        other => panic!("no register {other:#x}"),
    }
}
