//! The devices of a VM.
//!
//! * `attach.rs` connects devices to a transport when the VM is built; `id.rs` has their names.
//! * `images.rs` places files that the guest sees as memory.
//! * `handle.rs` are the owner's calls on a device, which its event loop carries out.

pub(crate) mod attach;
pub(crate) mod handle;
pub(crate) mod id;
pub(crate) mod images;

pub use handle::{
    BalloonHandle, BlockHandle, ConsoleHandle, DeviceHandle, FsHandle, HandleError, MemHandle,
    NetHandle, PmemHandle, PortsHandle, VsockHandle,
};
