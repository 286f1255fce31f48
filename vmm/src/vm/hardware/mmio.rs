//! The MMIO transport: a window, an interrupt line and notification eventfds for each device.

use std::sync::{Arc, Mutex};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use podvisor_devices::virtio::transport::{
    MmioInterrupt, MmioTransport, QUEUE_NOTIFY, TransportParts, WINDOW_SIZE,
};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::line::Line;
use super::transport::{TransportHandle, TransportSetup, kicks};
use crate::boot::MmioWindow;
use crate::kvm::KvmError;
use crate::layout;
use crate::vm::error::BuildError;

/// Returns the window of device `number`.
pub(crate) fn window(number: u32) -> MmioWindow {
    let size = WINDOW_SIZE as u32;
    MmioWindow {
        address: layout::VIRTIO_MMIO_START as u32 + number * size,
        size,
        gsi: layout::FIRST_GSI + number,
    }
}

/// Returns the kernel parameter by which Linux finds a device.
pub(crate) fn parameter(window: MmioWindow) -> String {
    let MmioWindow { address, size, gsi } = window;
    format!("virtio_mmio.device={}K@{address:#x}:{gsi}", size >> 10)
}

/// Creates the registers of a device.
pub(crate) fn connect(
    vm: &Arc<VmFd>,
    bus: &Bus,
    window: MmioWindow,
    connection: TransportSetup<'_>,
) -> Result<TransportHandle<Arc<Mutex<MmioTransport>>>, BuildError> {
    let TransportSetup { info, link, mem } = connection;
    let address = u64::from(window.address);
    let kicks = kicks(info.queue_sizes.len())?;
    register(vm, address, &kicks)?;
    let irq = Arc::new(MmioInterrupt::new(Line::new(vm, window.gsi)));
    let parts = TransportParts {
        info: info.clone(),
        link,
        mem: mem.all().clone(),
        kicks: kicks.clone(),
        writes: mem.writes().clone(),
    };
    let transport = Arc::new(Mutex::new(MmioTransport::new(parts, irq.clone())));
    bus.mmio
        .insert(address, WINDOW_SIZE, transport.clone())
        .map_err(|error| BuildError::Addresses(Box::new(error)))?;
    Ok(TransportHandle {
        registers: transport,
        irq,
        kicks,
    })
}

/// Makes KVM write these eventfds instead of leaving the guest when its driver notifies a queue.
fn register(vm: &VmFd, window: u64, kicks: &[Arc<EventFd>]) -> Result<(), KvmError> {
    let address = IoEventAddress::Mmio(window + QUEUE_NOTIFY);
    // If there is only one queue, any value means it: KVM then need not decode the guest's
    // instruction, which is its fast path for MMIO.
    if let [only] = kicks {
        return vm
            .register_ioevent(only, &address, NoDatamatch)
            .map_err(KvmError::ioctl("KVM_IOEVENTFD"));
    }
    for (queue, kick) in (0u32..).zip(kicks) {
        vm.register_ioevent(kick, &address, queue)
            .map_err(KvmError::ioctl("KVM_IOEVENTFD"))?;
    }
    Ok(())
}
