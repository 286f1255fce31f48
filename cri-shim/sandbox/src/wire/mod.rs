//! The messages on the control socket of a sandbox: frames of JSON with descriptors, and the
//! requests and answers in them. Both ends are podvisor, but maybe of different versions: a newer
//! daemon finds the sandboxes that an older one has started. New fields have a default; a change
//! that an older peer would misread raises [`CONTROL_VERSION`].

mod boot;
mod frame;
mod launch;
mod message;

pub(super) use boot::BootHeader;
pub use frame::FrameError;
pub(super) use frame::{Frame, FrameReader, FrameWriter, MAX_FDS, MAX_FRAME};
pub(super) use launch::{LAUNCH_VERSION, LaunchHeader, LaunchReply, NicHeader};
pub(super) use message::{
    Answer, CONTROL_SOCKET, CONTROL_VERSION, Call, CreateHeader, DeviceHeader, DeviceKind,
    ExecHeader, Greeting, Numbered, Refusal, Reply, Request, StdioHeader,
};
