//! The memory device (§5.15): guest memory that comes and goes in blocks while the guest runs.
//!
//! The guest has a region of its address space, of which the driver plugs blocks in until it has as
//! much as its owner asked for ([`MemDevice::request`]), and unplugs what it can spare when the
//! owner asks for less. Memory of blocks that are unplugged goes back to the host.
//!
//! All of the region is guest memory, as far as devices and KVM are concerned: a driver that uses
//! blocks that it has not plugged in uses host memory that its owner did not ask it to have, up to
//! the size of the region. That size is the limit, and so is the control group of the process.

mod blocks;
mod device;

pub use device::{BLOCK_SIZE, MemDevice, MemRegion};
