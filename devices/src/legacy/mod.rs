//! The two devices on I/O ports that a microVM still needs: a serial console for early
//! messages and panics, and the ports by which a guest resets itself or powers off.

pub mod power;
pub mod serial;
