//! The guest's writes to `CONFIG_ADDRESS`, which KVM collects.
//!
//! An access to configuration space is two accesses to ports: the first one only says what the
//! second one is for. So KVM keeps writes of the address in a ring (`KVM_CAP_COALESCED_PIO`, Linux
//! 5.0), and there is an exit for the second access alone. A scan of the bus has half as many
//! exits.

use std::sync::{Arc, Mutex, PoisonError};

use kvm_ioctls::{Cap, IoEventAddress, VcpuFd, VmFd};
use podvisor_devices::pci::{ADDRESS_PORT, PciBus};

/// Ports of `CONFIG_ADDRESS`.
const ADDRESS_PORTS: u32 = 4;

/// KVM's ring has fewer entries: it is a page.
const RING_ENTRIES: usize = 4096 / size_of::<kvm_bindings::kvm_coalesced_mmio>();

/// The writes of all vCPUs of a VM, oldest first.
#[derive(Debug)]
pub(crate) struct AddressWrites {
    bus: Arc<PciBus>,
    /// Held while the ring is read: each vCPU maps the same one.
    reading: Mutex<()>,
}

impl AddressWrites {
    /// Makes KVM collect writes. `None` if it does not: each one is an exit then.
    pub(super) fn collect(vm: &VmFd, bus: &Arc<PciBus>) -> Option<Self> {
        if !vm.check_extension(Cap::CoalescedPio) {
            return None;
        }
        let address = IoEventAddress::Pio(ADDRESS_PORT.into());
        match vm.register_coalesced_mmio(address, ADDRESS_PORTS) {
            Ok(()) => Some(Self {
                bus: bus.clone(),
                reading: Mutex::new(()),
            }),
            Err(error) => {
                tracing::debug!(%error, "KVM does not collect writes of PCI addresses");
                None
            }
        }
    }

    /// Applies what has been collected until now. A vCPU's thread calls it before it handles an
    /// access to a port, and before it parks.
    pub(crate) fn apply(&self, vcpu: &mut VcpuFd) -> Result<(), kvm_ioctls::Error> {
        vcpu.map_coalesced_mmio_ring()?;
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        // Other vCPUs may add to the ring all the time, but this one's writes are in it already.
        for _ in 0..RING_ENTRIES {
            let Some(write) = vcpu.coalesced_mmio_read()? else {
                break;
            };
            let offset = write.phys_addr.wrapping_sub(ADDRESS_PORT.into());
            let len = usize::try_from(write.len).unwrap_or(usize::MAX);
            self.bus.write(offset, write.data.get(..len).unwrap_or(&[]));
        }
        Ok(())
    }
}
