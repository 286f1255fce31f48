//! The block device (§5.2): requests of the driver in, calls on a [`Disk`] out.
//!
//! * `request.rs` reads a chain's header once and checks what it asks for against the disk.
//! * `device.rs` owns the queue and the requests in flight.
//! * [`Disk`] is what a backend is; [`FileDisk`] is a regular file or block device.
//!
//! The device does not know image formats: a backend presents raw sectors.

mod device;
mod disk;
mod file;
mod request;

pub use device::{BlockDevice, BlockDeviceError};
pub use disk::{Completion, Disk, Operation, Submitted};
pub use file::FileDisk;

/// Bytes per sector of the request header and of `capacity` (§5.2.4), whatever the block size.
pub const SECTOR_SIZE: u64 = 512;
