//! Console devices (§5.3). [`ConsoleDevice`] is one with a single port: output of the driver goes to any writer, input
//! from a file descriptor goes to the driver, and the size is in the configuration space.
//!
//! [`PortsDevice`] has several ports with names, for programs (`ports`).
//!
//! Neither interprets the data: terminals, escape sequences and line endings are handled by the two
//! ends.

mod device;
mod input;
mod ports;

pub use device::{ConsoleDevice, MAX_TRANSMIT};
pub use input::ConsoleError;
pub use ports::{MAX_PORTS, PortsDevice, PortsError};
