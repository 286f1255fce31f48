//! Why a sandbox refuses a request.

use podvisor_agent_protocol::ErrorKind;
use serde::{Deserialize, Serialize};

/// The reason why a request was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RefusalKind {
    /// Something in the request is malformed or out of bounds.
    InvalidArgument,
    /// No container or process has that id.
    NotFound,
    /// The id is in use.
    AlreadyExists,
    /// The container's state does not allow it.
    WrongState,
    /// A limit is reached: of containers, processes, or disks for images.
    ResourceExhausted,
    /// The image is not usable.
    Image,
    /// The image does not know the user or group.
    UnknownUser,
    /// The command does not exist in the container.
    CommandNotFound,
    /// The command exists but cannot be executed.
    CommandNotExecutable,
    /// The guest has an operating system of its own, and no agent that could do it.
    NoAgent,
    /// The process cannot be created as specified, for another reason than its command.
    LaunchFailed,
    /// Anything else that failed in the sandbox or its guest, or that only a newer podvisor knows.
    #[serde(other)]
    Internal,
}

impl From<ErrorKind> for RefusalKind {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::NotFound => Self::NotFound,
            ErrorKind::AlreadyExists => Self::AlreadyExists,
            ErrorKind::WrongState => Self::WrongState,
            ErrorKind::ResourceExhausted => Self::ResourceExhausted,
            ErrorKind::Image => Self::Image,
            ErrorKind::UnknownUser => Self::UnknownUser,
            ErrorKind::CommandNotFound => Self::CommandNotFound,
            ErrorKind::CommandNotExecutable => Self::CommandNotExecutable,
            ErrorKind::LaunchFailed => Self::LaunchFailed,
            _ => Self::Internal,
        }
    }
}
