//! The devices on I/O ports that a microVM still needs: a serial console for early messages and
//! panics, the ports that a guest uses to reset itself or to power off, and the register by which
//! it is told of events such as its power button. A guest that boots by a firmware has two more
//! (`firmware.rs`).

pub mod cmos;
pub mod events;
pub mod firmware;
pub mod pm_timer;
pub mod power;
pub mod serial;
