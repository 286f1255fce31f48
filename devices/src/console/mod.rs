//! The console device (§5.3) with a single port: output of the driver goes to any writer, input
//! from a file descriptor goes to the driver, and the size is in the configuration space.
//!
//! The device does not interpret the data: terminals, escape sequences and line endings are handled
//! by its two ends.

mod device;
mod input;

pub use device::{ConsoleDevice, MAX_TRANSMIT};
pub use input::ConsoleError;
