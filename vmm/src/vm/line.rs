//! Interrupt lines of the I/O APIC and the 8259s that KVM emulates.

use std::sync::Arc;

use kvm_ioctls::VmFd;
use podvisor_devices::virtio::InterruptLine;

/// A line, raised by ioctl from the thread that has the interrupt.
///
/// An irqfd would do it from a kernel thread, since only MSIs are delivered where an eventfd is
/// written: a switch of threads more for each interrupt. And at the VM's end KVM waits for a grace
/// period, about 4 ms, for each irqfd by itself.
#[derive(Debug)]
pub(super) struct Line {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl Line {
    pub(super) fn new(vm: &Arc<VmFd>, gsi: u32) -> Self {
        Self {
            vm: vm.clone(),
            gsi,
        }
    }
}

impl InterruptLine for Line {
    fn raise(&self) {
        for level in [true, false] {
            // It fails only for lines that no interrupt controller has.
            let _ = self.vm.set_irq_line(self.gsi, level);
        }
    }
}
