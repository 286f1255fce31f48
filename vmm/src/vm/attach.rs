//! Puts devices on the MMIO transport: a window, an interrupt line and notification eventfds
//! each, known to KVM, to the bus and to the I/O thread.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use podvisor_devices::GuestRam;
use podvisor_devices::virtio::VirtioDevice;
use podvisor_devices::virtio::transport::{MmioInterrupt, MmioTransport, WINDOW_SIZE};
use vmm_sys_util::eventfd::EventFd;

use super::error::BuildError;
use super::io_thread::{DeviceRunner, Faults};
use crate::kvm::KvmError;
use crate::layout;

/// Offset of the `QueueNotify` register in a window (virtio 1.3 §4.2.2).
const QUEUE_NOTIFY: u64 = 0x50;

/// The devices of a VM, from three sides.
#[derive(Default)]
pub(crate) struct Attached {
    /// For the bus, in the order of their windows.
    pub(crate) transports: Vec<Mutex<MmioTransport>>,
    /// For the I/O thread.
    pub(crate) runners: Vec<DeviceRunner>,
    /// For the kernel's command line.
    pub(crate) announcements: Vec<String>,
}

pub(crate) fn attach(
    vm: &VmFd,
    mem: &GuestRam,
    devices: &[Arc<Mutex<dyn VirtioDevice>>],
    faults: &Faults,
) -> Result<Attached, BuildError> {
    let mut attached = Attached::default();
    let mut of_type = HashMap::<&str, u32>::new();
    for (slot, device) in (0u32..).zip(devices) {
        let (kind, queues) = {
            let device = device.lock().unwrap_or_else(PoisonError::into_inner);
            (device.device_type().name(), device.queue_sizes().len())
        };
        let window = layout::VIRTIO_MMIO_START + u64::from(slot) * WINDOW_SIZE;
        let gsi = layout::FIRST_GSI + slot;

        let line = eventfd("an interrupt eventfd")?;
        vm.register_irqfd(&line, gsi)
            .map_err(KvmError::ioctl("KVM_IRQFD"))?;
        let kicks = notifications(vm, window, queues)?;
        let for_transport = kicks.iter().map(clone).collect::<Result<Vec<_>, _>>()?;

        let irq = Arc::new(MmioInterrupt::new(line));
        let transport = MmioTransport::new(device.clone(), mem.clone(), irq.clone(), for_transport);
        attached.transports.push(Mutex::new(transport));
        let number = of_type.entry(kind).or_default();
        let name = format!("{kind}{number}");
        *number += 1;
        let runner = DeviceRunner::new(name, device.clone(), irq, kicks, faults.clone());
        attached.runners.push(runner);
        attached
            .announcements
            .push(format!("virtio_mmio.device=4K@{window:#x}:{gsi}"));
    }
    Ok(attached)
}

/// One eventfd per queue, which KVM writes instead of an exit when the driver notifies it.
fn notifications(vm: &VmFd, window: u64, queues: usize) -> Result<Vec<EventFd>, BuildError> {
    let address = IoEventAddress::Mmio(window + QUEUE_NOTIFY);
    let register = KvmError::ioctl("KVM_IOEVENTFD");
    let kicks = (0..queues)
        .map(|_| eventfd("a notification eventfd"))
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

fn clone(fd: &EventFd) -> Result<EventFd, BuildError> {
    fd.try_clone().map_err(|source| BuildError::Descriptor {
        what: "a second notification eventfd",
        source,
    })
}
