//! The MMIO transport: a window, an interrupt line and notification eventfds for each device.

use std::sync::{Arc, Mutex};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use podvisor_devices::virtio::transport::{
    MmioInterrupt, MmioTransport, QUEUE_NOTIFY, TransportParts, WINDOW_SIZE,
};
use vmm_sys_util::eventfd::EventFd;

use super::{Connected, Connection, Registers};
use crate::kvm::KvmError;
use crate::layout;
use crate::vm::bus::Bus;
use crate::vm::error::BuildError;
use crate::vm::line::Line;

/// Makes the registers of device `number`, and the parameter by which Linux finds them.
pub(super) fn connect(
    vm: &Arc<VmFd>,
    bus: &Bus,
    number: u32,
    connection: Connection<'_>,
) -> Result<(Connected, String), BuildError> {
    let Connection { info, link, mem } = connection;
    let window = layout::VIRTIO_MMIO_START + u64::from(number) * WINDOW_SIZE;
    let gsi = layout::FIRST_GSI + number;
    let kicks = super::kicks(info.queue_sizes.len())?;
    register(vm, window, &kicks)?;
    let irq = Arc::new(MmioInterrupt::new(Line::new(vm, gsi)));
    let parts = TransportParts {
        info: info.clone(),
        link,
        mem: mem.clone(),
        kicks: kicks.clone(),
    };
    let transport = Arc::new(Mutex::new(MmioTransport::new(parts, irq.clone())));
    bus.mmio
        .insert(window, WINDOW_SIZE, transport.clone())
        .map_err(|error| BuildError::Addresses(Box::new(error)))?;
    let connected = Connected {
        registers: Registers::Mmio(transport),
        irq,
        kicks,
    };
    Ok((
        connected,
        format!("virtio_mmio.device=4K@{window:#x}:{gsi}"),
    ))
}

/// Has KVM write these eventfds instead of leaving the guest when its driver notifies a queue.
fn register(vm: &VmFd, window: u64, kicks: &[Arc<EventFd>]) -> Result<(), KvmError> {
    let address = IoEventAddress::Mmio(window + QUEUE_NOTIFY);
    // Where one queue is all there is, any value means it: KVM need not decode the guest's
    // instruction then, which is its fast path for MMIO.
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
