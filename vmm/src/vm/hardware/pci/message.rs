//! Message signaled interrupts.

use std::sync::Arc;

use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use podvisor_devices::pci::MessageInterrupt;

/// Sends MSIs by ioctl, from the thread that has the interrupt: docs/adr/0026.
#[derive(Debug)]
pub(super) struct Messages {
    vm: Arc<VmFd>,
}

impl Messages {
    pub(super) fn new(vm: &Arc<VmFd>) -> Self {
        Self { vm: vm.clone() }
    }
}

impl MessageInterrupt for Messages {
    fn send(&self, address: u64, data: u32) {
        let [a, b, c, d, e, f, g, h] = address.to_le_bytes();
        let message = kvm_msi {
            address_lo: u32::from_le_bytes([a, b, c, d]),
            address_hi: u32::from_le_bytes([e, f, g, h]),
            data,
            ..Default::default()
        };
        // It fails if the guest wrote a message that no local APIC accepts.
        let _ = self.vm.signal_msi(message);
    }
}
