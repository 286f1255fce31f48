//! The devices of a VM, and what its owner does with them.
//!
//! * `attach` connects devices to a transport when the VM is built; `plug.rs` does so, and the
//!   reverse, while it runs.
//! * `images.rs` places files that the guest sees as memory.
//! * `handle.rs` are the owner's calls on a device, which its event loop carries out.

pub(crate) mod attach;
pub(crate) mod handle;
pub(crate) mod id;
pub(crate) mod images;
mod plug;

pub use handle::{
    BalloonHandle, BlockHandle, ConsoleHandle, DeviceHandle, FsHandle, HandleError, MemHandle,
    NetHandle, PmemHandle, PortsHandle, VsockHandle,
};
pub use plug::{PlugError, PluggedDevice};
