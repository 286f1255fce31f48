//! Devices on PCI: what the bus of `podvisor-devices` needs of KVM and of the guest's address
//! space.
//!
//! * [`PciRoot`] is the bus of a VM, accessed by the ports of configuration mechanism 1.
//! * [`Function`] is a device there: its configuration space is accessed by the ports, its BAR
//!   wherever the guest put it.
//! * `windows.rs` keeps BARs on the VM's bus as the guest moves them, and KVM's notification
//!   addresses with them.
//! * `address_writes.rs` takes the guest's writes to the address port from KVM.
//! * `message.rs` delivers MSIs.

mod address_writes;
mod function;
mod message;
mod windows;

use std::sync::Arc;

use kvm_ioctls::VmFd;
use podvisor_devices::legacy::power::PowerRequest;
use podvisor_devices::pci::{ADDRESS_PORT, HostBridge, PORTS, PciBus};
use podvisor_devices::virtio::transport::TransportParts;
use podvisor_devices::virtio::transport::pci::{BAR_SIZE, PciInterrupt, PciTransport};

use super::bus::{Bus, BusDevice};
use super::transport::{TransportHandle, TransportSetup, kicks};
use crate::layout;
use crate::vm::error::BuildError;
use message::Messages;
use windows::Windows;

pub(crate) use address_writes::AddressWrites;
pub(crate) use function::Function;

/// The PCI bus of a VM.
#[derive(Debug)]
pub(crate) struct PciRoot {
    vm: Arc<VmFd>,
    bus: Arc<PciBus>,
    address_writes: Option<Arc<AddressWrites>>,
    windows: Arc<Windows>,
}

impl PciRoot {
    /// Adds an empty bus at its ports.
    pub(crate) fn new(vm: &Arc<VmFd>, bus: &Bus, has_firmware: bool) -> Result<Self, BuildError> {
        let bridge = match has_firmware {
            true => HostBridge::cloud_hypervisor(),
            false => HostBridge::generic(),
        };
        let pci = Arc::new(PciBus::with_bridge(bridge));
        bus.ports
            .insert(ADDRESS_PORT.into(), PORTS.into(), pci.clone())
            .map_err(|error| BuildError::Addresses(Box::new(error)))?;
        Ok(Self {
            vm: vm.clone(),
            address_writes: AddressWrites::collect(vm, &pci).map(Arc::new),
            bus: pci,
            windows: Arc::new(Windows::new(vm, &bus.mmio)),
        })
    }

    /// Creates the function of a device, for `slot` or any free one; [`Self::publish`] adds it to
    /// the bus. Its BAR lies where firmware would have put it, disabled.
    pub(crate) fn connect(
        &self,
        slot: Option<u8>,
        connection: TransportSetup<'_>,
    ) -> Result<TransportHandle<Arc<Function>>, BuildError> {
        let TransportSetup { info, link, mem } = connection;
        let slot = slot
            .or_else(|| self.bus.free_slot())
            .ok_or(BuildError::NoPciSlot)?;
        let kicks = kicks(info.queue_sizes.len())?;
        let messages = Messages::new(&self.vm);
        let irq = Arc::new(PciInterrupt::new(info.queue_sizes.len(), messages));
        let parts = TransportParts {
            info: info.clone(),
            link,
            mem: mem.all().clone(),
            kicks: kicks.clone(),
            writes: mem.writes().clone(),
        };
        let mut transport = PciTransport::new(parts, irq.clone());
        transport.set_bar(bar(slot));
        let function = Arc::new(Function::new(slot, transport, self.windows.clone()));
        let bar: Arc<dyn BusDevice> = function.clone();
        self.windows.add(slot, &bar, kicks.clone());
        Ok(TransportHandle {
            registers: function,
            irq,
            kicks,
        })
    }

    /// Makes a function visible to the guest; its device can already serve it.
    pub(crate) fn publish(&self, function: &Arc<Function>) -> Result<(), BuildError> {
        self.bus
            .insert(function.slot(), function.clone())
            .map_err(|error| BuildError::Addresses(Box::new(error)))
    }

    /// Removes a function from the bus. Accesses that have started may still finish.
    pub(crate) fn disconnect(&self, function: &Function) {
        self.bus.remove(function.slot());
        self.windows.remove(function.slot());
    }

    /// What vCPUs have to apply, if KVM collects it.
    pub(crate) fn address_writes(&self) -> Option<Arc<AddressWrites>> {
        self.address_writes.clone()
    }

    /// `CONFIG_ADDRESS`, for a snapshot: of parked vCPUs.
    pub(crate) fn config_address(&self) -> u32 {
        self.bus.config_address()
    }

    pub(crate) fn set_config_address(&self, address: u32) {
        self.bus.set_config_address(address);
    }
}

/// Returns where the BAR of the function in `slot` lies before the guest moves it.
fn bar(slot: u8) -> u32 {
    // 3 GiB and at most 32 BARs of 16 KiB.
    layout::PCI_BARS_START + u32::from(slot) * BAR_SIZE
}

impl BusDevice for PciBus {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        self.write(offset, data);
        None
    }
}
