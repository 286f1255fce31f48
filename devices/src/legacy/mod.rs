//! The devices on I/O ports that a microVM still needs: a serial console for early messages and
//! panics, the ports that a guest uses to reset itself or to power off, and the register by which it
//! is told of events such as its power button.

pub mod events;
pub mod power;
pub mod serial;
