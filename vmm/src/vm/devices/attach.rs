//! Attaches devices to a transport: registers on the bus, interrupts and notifications known to
//! KVM, and a worker on an event loop.
//!
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use kvm_ioctls::VmFd;
use podvisor_devices::virtio::transport::MmioTransport;
use podvisor_devices::virtio::{
    Count, Counter, DeviceInfo, Placement, QueueState, ReadCounters, RestoreError, VirtioDevice,
};

use crate::boot::MmioWindow;
use crate::memory::GuestMemory;
use crate::snapshot::SavedRegisters;
use crate::vm::error::BuildError;
use crate::vm::hardware::bus::Bus;
use crate::vm::hardware::io::{Link, LoopsBuilder};
use crate::vm::hardware::mmio;
use crate::vm::hardware::pci::{Function, PciRoot};
use crate::vm::hardware::transport::{TransportHandle, TransportSetup};

/// The registers of a device.
#[derive(Clone, Debug)]
pub(crate) enum TransportRegisters {
    Mmio(Arc<Mutex<MmioTransport>>),
    Pci(Arc<Function>),
}

impl TransportRegisters {
    pub(crate) fn save(&self) -> SavedRegisters {
        match self {
            Self::Mmio(mmio) => {
                let mut mmio = mmio.lock().unwrap_or_else(PoisonError::into_inner);
                SavedRegisters::Mmio(mmio.save())
            }
            Self::Pci(function) => SavedRegisters::Pci(function.slot(), function.save()),
        }
    }

    pub(crate) fn restore(
        &self,
        saved: &SavedRegisters,
        running: &[(u16, QueueState)],
    ) -> Result<(), RestoreError> {
        match (self, saved) {
            (Self::Mmio(mmio), SavedRegisters::Mmio(saved)) => {
                let mut mmio = mmio.lock().unwrap_or_else(PoisonError::into_inner);
                mmio.restore(saved, running)
            }
            (Self::Pci(function), SavedRegisters::Pci(_, saved)) => {
                function.restore(saved, running)
            }
            _ => Err(RestoreError::Invalid {
                what: "registers of another transport",
            }),
        }
    }
}

/// The state that the VM keeps of a device.
#[derive(Debug)]
pub(crate) struct AttachedDevice {
    /// The program's id, or the device type and its number among devices of that type.
    pub(crate) name: String,
    /// The Rust type of the device.
    pub(crate) kind: TypeId,
    pub(crate) info: DeviceInfo,
    pub(crate) counters: Arc<CountersWithFaults>,
    pub(crate) link: Link,
    /// Whether it was built on the shared loop and has not got its own since.
    pub(crate) shares_loop: AtomicBool,
    pub(crate) registers: TransportRegisters,
}

/// A device's own counters, and how often it was parked until a reset.
#[derive(Debug)]
pub(crate) struct CountersWithFaults {
    own: Arc<dyn ReadCounters>,
    faults: Arc<Count>,
}

impl CountersWithFaults {
    pub(crate) fn new(info: &DeviceInfo, faults: Arc<Count>) -> Self {
        Self {
            own: info.counters.clone(),
            faults,
        }
    }
}

impl ReadCounters for CountersWithFaults {
    fn read(&self) -> Vec<Counter> {
        let mut all = self.own.read();
        all.push(self.faults.named("faults"));
        all
    }
}

/// The devices of a VM.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    pub(crate) devices: Vec<AttachedDevice>,
    /// Parameters for the kernel's command line.
    pub(crate) cmdline: Vec<String>,
    /// The windows of devices on MMIO.
    pub(crate) windows: Vec<MmioWindow>,
}

/// A device to be attached.
#[derive(Debug)]
pub(crate) struct NewDevice {
    pub(crate) name: String,
    pub(crate) device: Box<dyn VirtioDevice>,
    /// The slot on PCI; `None` for any free one.
    pub(crate) slot: Option<u8>,
}

/// A device that the program gives a VM.
#[derive(Debug)]
pub(crate) struct GivenDevice {
    /// The id that the program has chosen, if it has.
    pub(crate) id: Option<String>,
    pub(crate) device: Box<dyn VirtioDevice>,
}

/// Names the devices of a new VM: by their ids, and those without one by the type of each and its
/// number among those of that type.
pub(crate) fn named(devices: Vec<GivenDevice>) -> Vec<NewDevice> {
    let mut of_type = HashMap::<&str, u32>::new();
    let named = devices.into_iter().map(|GivenDevice { id, device }| {
        let name = id.unwrap_or_else(|| {
            let type_name = device.info().device_type.name();
            let number = of_type.entry(type_name).or_default();
            *number += 1;
            format!("{type_name}{}", *number - 1)
        });
        NewDevice {
            name,
            device,
            slot: None,
        }
    });
    named.collect()
}

/// The places where devices are attached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttachContext<'a> {
    pub(crate) vm: &'a Arc<VmFd>,
    pub(crate) mem: &'a GuestMemory,
    pub(crate) bus: &'a Bus,
    /// `None` if devices are on MMIO.
    pub(crate) pci: Option<&'a PciRoot>,
}

pub(crate) fn attach(
    board: AttachContext<'_>,
    devices: Vec<NewDevice>,
    loops: &mut LoopsBuilder,
) -> Result<Attachments, BuildError> {
    let mut attachments = Attachments::default();
    if board.pci.is_some() {
        // Linux then looks for no other mechanism, and does not probe this one.
        attachments.cmdline.push("pci=conf1".to_owned());
    }
    for (number, new) in (0u32..).zip(devices) {
        let NewDevice { name, device, slot } = new;
        let info = device.info();
        let event_loop = |source| BuildError::Descriptor {
            what: "an event loop",
            source,
        };
        let place = loops.place(&name, device.placement()).map_err(event_loop)?;
        let connection = TransportSetup {
            info: &info,
            link: Arc::new(place.link.clone()),
            mem: board.mem,
        };
        let TransportHandle {
            registers,
            irq,
            kicks,
        } = match board.pci {
            Some(pci) => pci.connect(slot, connection)?.map(TransportRegisters::Pci),
            None => {
                let window = mmio::window(number);
                attachments.cmdline.push(mmio::parameter(window));
                attachments.windows.push(window);
                let made = mmio::connect(board.vm, board.bus, window, connection)?;
                made.map(TransportRegisters::Mmio)
            }
        };
        let kind = std::any::Any::type_id(&*device);
        let shares_loop = AtomicBool::new(device.placement() == Placement::Shared);
        let faults = loops
            .install(&place, name.clone(), device, irq, kicks)
            .map_err(event_loop)?;
        if let (Some(pci), TransportRegisters::Pci(function)) = (board.pci, &registers) {
            pci.publish(function)?;
        }
        attachments.devices.push(AttachedDevice {
            name,
            kind,
            counters: Arc::new(CountersWithFaults::new(&info, faults)),
            info,
            link: place.link,
            shares_loop,
            registers,
        });
    }
    Ok(attachments)
}
