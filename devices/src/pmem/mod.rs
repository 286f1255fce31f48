//! The persistent memory device (§5.19): a file that is part of the guest's address space.
//!
//! The guest finds the file's bytes at guest physical addresses, and its processors read them
//! there: no request, no copy, no page of the guest's own. What the host has of the file in its
//! page cache serves all guests that have it. Here the region is read-only throughout: there is
//! nothing to flush, and the one request of the device is answered without work.
//!
//! # How data enters and leaves
//!
//! [`PmemDevice`] brings a file and says how long its region is; whoever owns the guest's address
//! space maps the file, gives the region a place ([`PmemDevice::place`]), and sees to it that no
//! processor of the guest can write there. Devices may be told to read from the region (a program
//! of the guest writes to a disk what it has mapped from the file), and never write there: see
//! [`Queue::ram`](crate::virtio::Queue::ram).

mod device;
mod file;

pub use device::{PmemDevice, PmemRegion, Refusals};
pub use file::{PMEM_ALIGNMENT, PmemError};
