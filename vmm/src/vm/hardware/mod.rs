//! What devices are attached to.
//!
//! * `bus.rs` dispatches MMIO and port accesses; `line.rs` is an interrupt line.
//! * `mmio.rs` and `pci` are the transports of virtio devices, and `transport.rs` is what both get
//!   and create.
//! * `io` has the event loops that serve devices.
//! * `events.rs` tells the guest of its power button and of a new generation ID.
//! * `firmware.rs` has the ports of a VM that boots by a firmware.

pub(crate) mod bus;
pub(crate) mod events;
pub(crate) mod firmware;
pub(crate) mod io;
pub(crate) mod line;
pub(crate) mod mmio;
pub(crate) mod pci;
pub(crate) mod transport;
