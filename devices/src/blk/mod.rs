//! The block device (§5.2): takes requests from the driver and calls a [`Disk`].
//!
//! * `request.rs` reads a chain's header once and checks what it asks for against the disk.
//! * `engine.rs` carries requests out, in pieces (`flight.rs` is a request in progress);
//!   `server.rs` is an engine with the queues that it serves: all of the device, or one.
//!   `counters.rs` holds its counters.
//! * `device.rs` owns one of these, which the device's event loop serves; `queue_thread.rs` is one
//!   that has its own thread, if the device has several queues and its disk permits it.
//! * `clones.rs` gives the disk to each of them.
//! * `throttle.rs` limits the rate of the device.
//! * `changes.rs` logs what is written, for a disk that is copied meanwhile.
//! * `open.rs` is about files: which may be a disk, and who may write to it.
//! * [`Disk`] is the interface of a backend; [`FileDisk`] is a regular file or block device, read
//!   and written by the calling thread, [`UringDisk`] one that the kernel reads and writes
//!   asynchronously. [`DiskPart`] leaves out the first sectors of another disk.
//! * `overlay/` turns a shared image into a disk that its driver may write ([`Qcow2Disk`]).
//!
//! The device does not know image formats: a backend presents raw sectors.

mod changes;
mod clones;
mod counters;
mod device;
mod disk;
mod engine;
mod file;
mod flight;
mod open;
mod overlay;
mod part;
mod request;
mod server;
mod throttle;
mod uring;

pub use changes::{ChangeLog, flush_disk, read_disk, write_disk, zero_disk};
pub use clones::DiskClones;
pub use device::BlockDevice;
pub use disk::{Completion, Disk, Operation, SECTOR_SIZE, Submitted, Topology};
pub use file::FileDisk;
pub use open::{
    BlockDeviceError, IoEngine, lock_disk, open_disk, open_disk_for_writing, unlock_disk,
};
pub use overlay::{
    OverlayFormat, Qcow2Disk, Qcow2Error, create_grown_overlay, create_overlay, create_qcow2,
    flatten_disk, grow_overlay,
};
pub use part::DiskPart;
pub use uring::UringDisk;
