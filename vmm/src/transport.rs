//! The bus of a VM's virtio devices.

use crate::layout;

/// The bus on which a VM's virtio devices sit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// virtio over MMIO (virtio 1.3 §4.2): the shortest boot. Devices are listed on the kernel's
    /// command line and in the ACPI tables, and exist for the VM's lifetime.
    #[default]
    Mmio,
    /// virtio over PCI (virtio 1.3 §4.1), with MSI-X: an interrupt costs the guest no exits. The
    /// guest scans the bus at boot. Its kernel needs PCI, MSI and `virtio_pci`.
    Pci,
}

impl Transport {
    /// The maximum number of devices: MMIO has one interrupt line for each, PCI one device number
    /// for each, next to the host bridge's.
    pub(crate) fn max_devices(self) -> usize {
        match self {
            Self::Mmio => (layout::GSI_END - layout::FIRST_GSI) as usize,
            Self::Pci => usize::from(podvisor_devices::pci::SLOTS) - 1,
        }
    }
}
