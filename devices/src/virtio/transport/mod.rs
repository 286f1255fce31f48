//! Transports: register accesses of a driver in, commands to the device's worker out.
//!
//! * `core.rs` holds what the driver configures (status, features, queue addresses), one state
//!   machine for all transports.
//! * `mmio.rs` is the register map of virtio over MMIO, and its interrupt.
//! * `pci/` is the equivalent for virtio over PCI.
//!
//! A transport does not know which device it carries; the device does not know which transport
//! carries it.

mod core;
mod half;
mod mmio;
pub mod pci;
mod status;

pub use self::core::{RESET_TIMEOUT, SavedTransport, TransportInterrupt, TransportParts};
pub use mmio::{MmioInterrupt, MmioTransport, QUEUE_NOTIFY, SavedMmio, WINDOW_SIZE};
pub use pci::{PciInterrupt, PciTransport, SavedPci};
pub use status::Status;
