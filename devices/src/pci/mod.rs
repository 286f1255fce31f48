//! A minimal PCI bus: one bus of 32 device numbers with configuration mechanism 1, functions with
//! one memory BAR, and MSI-X.
//!
//! * [`PciBus`] handles the ports 0xCF8 and 0xCFC and finds the addressed function.
//! * [`PciConfig`] is the configuration space of a function: its bytes, and which of their bits the
//!   guest may write.
//! * [`Msix`] is a function's vector table and its pending bits.
//!
//! Not supported: bridges, more than one function per device, I/O BARs, INTx, power management, and
//! the PCI Express configuration space. The owner of the guest's address space assigns the
//! addresses of BARs.
//!
//! Clauses are those of the PCI Local Bus Specification, revision 3.0.

mod bus;
mod config;
mod msix;

pub use bus::{
    ADDRESS_PORT, HostBridge, PORTS, PciAddress, PciBus, PciBusError, PciFunction, SLOTS,
};
pub use config::{COMMAND_BUS_MASTER, COMMAND_MEMORY, PciConfig, PciIds};
pub use msix::{
    MAX_VECTORS, MSIX_CAPABILITY, MSIX_CAPABILITY_LEN, MessageInterrupt, Msix, NO_VECTOR, SavedMsix,
};
