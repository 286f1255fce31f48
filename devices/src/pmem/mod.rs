//! The persistent memory device (§5.19): a file that is part of the guest's address space.
//!
//! The guest finds the file's bytes at guest physical addresses, and its vCPUs read them there:
//! without a request, a copy, or a page in the guest's own memory. The host's page cache of the
//! file serves all guests that map it. The whole region is read-only: there is nothing to flush,
//! and the device's only request succeeds immediately.
//!
//! # How data enters and leaves
//!
//! [`PmemDevice`] provides a file and the length of its region; the owner of the guest's address
//! space maps the file, sets the region's address ([`PmemDevice::place`]), and ensures that no vCPU
//! can write there. Devices may be asked to read from the region (if a guest program writes data
//! that it has mapped from the file to a disk), but never write there: see
//! [`Queue::ram`](crate::virtio::Queue::ram).

mod device;
mod file;

pub use device::{PmemDevice, PmemRegion, Refusals};
pub use file::{PMEM_ALIGNMENT, PmemError};
