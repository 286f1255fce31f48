//! The memory device (§5.15): guest memory that is plugged and unplugged in blocks while the guest
//! runs.
//!
//! The guest has a region of its address space. The driver plugs in blocks of it until it has as
//! much as its owner requested ([`MemDevice::request`]), and unplugs what it can spare if the owner
//! requests less. Memory of unplugged blocks is given back to the host.
//!
//! For devices and KVM the whole region is guest memory: a driver that uses blocks that it has not
//! plugged in uses more host memory than its owner requested, up to the size of the region. Use is
//! limited by that size, and by the control group of the process.

mod blocks;
mod device;

pub use device::{BLOCK_SIZE, MemDevice, MemRegion};
