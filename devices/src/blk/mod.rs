//! The block device (§5.2): requests of the driver in, calls on a [`Disk`] out.
//!
//! * `request.rs` reads a chain's header once and checks what it asks for against the disk.
//! * `engine.rs` carries requests out, in pieces (`flight.rs` is one at work); `server.rs` is an
//!   engine with the queues that it serves: all of the device, or one. `counters.rs` is what it
//!   counts.
//! * `device.rs` owns one of these, which the device's event loop serves; `lane.rs` is one that a
//!   thread of its own does, where the device has several queues and its disk permits it.
//! * `copies.rs` gives each of them the disk.
//! * `pace.rs` keeps the device to a rate.
//! * `open.rs` is about files: what may be a disk, and who may write it.
//! * [`Disk`] is what a backend is; [`FileDisk`] is a regular file or block device, read and
//!   written by the calling thread, [`UringDisk`] one that the kernel works on by itself.
//! * `overlay/` makes a shared image a disk that its driver may write ([`Qcow2Disk`]).
//!
//! The device does not know image formats: a backend presents raw sectors.

mod copies;
mod counters;
mod device;
mod disk;
mod engine;
mod file;
mod flight;
mod lane;
mod open;
mod overlay;
mod pace;
mod request;
mod server;
mod uring;

pub use copies::DiskCopies;
pub use device::BlockDevice;
pub use disk::{Completion, Disk, Operation, Submitted};
pub use file::FileDisk;
pub use open::{BlockDeviceError, IoEngine, open_disk, open_disk_for_writing};
pub use overlay::{OverlayFormat, Qcow2Disk, Qcow2Error, create_overlay, create_qcow2};
pub use uring::UringDisk;

/// Bytes per sector of the request header and of `capacity` (§5.2.4), whatever the block size.
pub const SECTOR_SIZE: u64 = 512;

/// Whole sectors of a disk.
fn sectors(disk: &dyn Disk) -> u64 {
    disk.len().checked_div(SECTOR_SIZE).unwrap_or(0)
}
