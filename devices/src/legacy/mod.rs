//! The two devices on I/O ports that a microVM still needs: a serial console for early
//! messages and panics, and the ports that a guest uses to reset itself or to power off.

pub mod power;
pub mod serial;
