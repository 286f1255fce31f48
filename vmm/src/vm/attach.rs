//! Puts devices on the MMIO transport: a window, an interrupt line and notification eventfds
//! each, known to KVM, to the bus and to the device's event loop.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use podvisor_devices::GuestRam;
use podvisor_devices::virtio::transport::{
    MmioInterrupt, MmioTransport, QUEUE_NOTIFY, TransportParts, WINDOW_SIZE,
};
use podvisor_devices::virtio::{DeviceInfo, VirtioDevice};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::error::BuildError;
use super::io::{Link, LoopsBuilder};
use super::line::Line;
use crate::kvm::KvmError;
use crate::layout;

/// What the owner of a VM keeps of a device.
#[derive(Debug)]
pub(crate) struct Attached {
    /// The device type and its number among its like.
    pub(crate) name: String,
    /// The Rust type of the device.
    pub(crate) kind: TypeId,
    pub(crate) info: DeviceInfo,
    pub(crate) link: Link,
    pub(crate) transport: Arc<Mutex<MmioTransport>>,
}

/// The devices of a VM.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    pub(crate) devices: Vec<Attached>,
    /// For the kernel's command line.
    pub(crate) cmdline: Vec<String>,
}

/// The names of devices: the type of each, and its number among its like.
pub(crate) fn names(devices: &[Box<dyn VirtioDevice>]) -> Vec<String> {
    let mut of_type = HashMap::<&str, u32>::new();
    let names = devices.iter().map(|device| {
        let type_name = device.info().device_type.name();
        let number = of_type.entry(type_name).or_default();
        *number += 1;
        format!("{type_name}{}", *number - 1)
    });
    names.collect()
}

pub(crate) fn attach(
    vm: &Arc<VmFd>,
    mem: &GuestRam,
    devices: Vec<Box<dyn VirtioDevice>>,
    bus: &Bus,
    loops: &mut LoopsBuilder,
) -> Result<Attachments, BuildError> {
    let mut attachments = Attachments::default();
    let names = names(&devices);
    for ((slot, device), name) in (0u32..).zip(devices).zip(names) {
        let info = device.info();
        let window = layout::VIRTIO_MMIO_START + u64::from(slot) * WINDOW_SIZE;
        let gsi = layout::FIRST_GSI + slot;

        let kicks = notifications(vm, window, info.queue_sizes.len())?;
        let irq = Arc::new(MmioInterrupt::new(Line::new(vm, gsi)));

        let event_loop = |source| BuildError::Descriptor {
            what: "an event loop",
            source,
        };
        let place = loops.place(&name, device.placement()).map_err(event_loop)?;
        let parts = TransportParts {
            info: info.clone(),
            link: Arc::new(place.link.clone()),
            mem: mem.clone(),
            kicks: kicks.clone(),
        };
        let transport = Arc::new(Mutex::new(MmioTransport::new(parts, irq.clone())));
        bus.mmio
            .insert(window, WINDOW_SIZE, transport.clone())
            .map_err(|error| BuildError::Addresses(Box::new(error)))?;
        let kind = std::any::Any::type_id(&*device);
        loops
            .install(&place, name.clone(), device, irq, kicks)
            .map_err(event_loop)?;
        attachments.devices.push(Attached {
            name,
            kind,
            info,
            link: place.link,
            transport,
        });
        attachments
            .cmdline
            .push(format!("virtio_mmio.device=4K@{window:#x}:{gsi}"));
    }
    Ok(attachments)
}

/// One eventfd per queue, which KVM writes instead of an exit when the driver notifies it.
fn notifications(vm: &VmFd, window: u64, queues: usize) -> Result<Vec<Arc<EventFd>>, BuildError> {
    let address = IoEventAddress::Mmio(window + QUEUE_NOTIFY);
    let register = KvmError::ioctl("KVM_IOEVENTFD");
    let kicks = (0..queues)
        .map(|_| eventfd("a notification eventfd").map(Arc::new))
        .collect::<Result<Vec<_>, _>>()?;
    // Where one queue is all there is, any value means it: KVM need not decode the guest's
    // instruction then, which is its fast path for MMIO.
    if let [only] = kicks.as_slice() {
        vm.register_ioevent(only, &address, NoDatamatch)
            .map_err(register)?;
    } else {
        for (queue, kick) in (0u32..).zip(&kicks) {
            vm.register_ioevent(kick, &address, queue)
                .map_err(KvmError::ioctl("KVM_IOEVENTFD"))?;
        }
    }
    Ok(kicks)
}

fn eventfd(what: &'static str) -> Result<EventFd, BuildError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
        .map_err(|source| BuildError::Descriptor { what, source })
}
