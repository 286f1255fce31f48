//! A minimal PCI bus: one bus of 32 device numbers behind configuration mechanism 1, functions with
//! one memory BAR, and MSI-X.
//!
//! * [`PciBus`] answers the ports 0xCF8 and 0xCFC and finds the function that is meant.
//! * [`PciConfig`] is the configuration space of a function, as bytes and as which bits of them the
//!   guest may write.
//! * [`Msix`] is a function's table of vectors and what is pending.
//!
//! Not here: bridges, more than one function per device, I/O BARs, INTx, power management, and the
//! PCI Express configuration space. Where a BAR lies in the guest's address space is for the owner
//! of that to see to.
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
