//! The console device (§5.3) with a single port: what the driver transmits goes to any writer,
//! what a file descriptor brings goes to the driver, and the size is told by configuration.
//!
//! The device interprets nothing: terminals, escape sequences and line endings are the
//! affair of those at its two ends.

mod device;
mod input;

pub use device::{ConsoleDevice, MAX_TRANSMIT};
pub use input::ConsoleError;
