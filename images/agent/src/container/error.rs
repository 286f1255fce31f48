//! What can go wrong with a container, and how the host is told.

use std::io;

use libcgroups::v2::manager::V2ManagerError;
use libcontainer::error::LibcontainerError;
use podvisor_agent_protocol::{AgentError, ErrorKind, InvalidId};

use super::devices::DeviceError;
use super::disk::DiskError;
use super::fill::FillError;
use super::launch::LaunchError;
use super::nodes::NodeError;
use super::rootfs::RootfsError;
use super::spec::SpecError;
use super::user::UserError;
use super::users::IdKind;
use crate::guest::with_causes;
use crate::launcher::Failure;

/// Result of an operation on containers.
pub type Result<T> = std::result::Result<T, ContainerError>;

/// An operation on containers failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The request's id is none.
    #[error(transparent)]
    Id(#[from] InvalidId),
    /// No such container or process.
    #[error("no container or process {0:?}")]
    NotFound(String),
    /// The id is taken.
    #[error("{0:?} exists already: delete it or choose another id")]
    Exists(String),
    /// Not possible now.
    #[error("container {id:?} is {state}")]
    WrongState {
        /// Which.
        id: String,
        /// Why not.
        state: &'static str,
    },
    /// A bound is reached.
    #[error("the guest has {limit} {what}, its limit: delete some")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many there may be.
        limit: usize,
    },
    /// The image or its overlay.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The contents of a volume.
    #[error(transparent)]
    Fill(#[from] FillError),
    /// The user.
    #[error(transparent)]
    User(#[from] UserError),
    /// It has no number in the guest.
    #[error("{kind} {id} is not mapped in the container's user namespace: choose one that is")]
    NotMapped {
        /// Whose it is.
        kind: IdKind,
        /// In the container.
        id: u32,
    },
    /// The specification.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// What its devices may be used for.
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// Its devices.
    #[error(transparent)]
    Nodes(#[from] NodeError),
    /// The process.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// libcontainer does not start it.
    #[error("cannot start container {id:?}")]
    Start {
        /// Which.
        id: String,
        /// Why.
        #[source]
        source: LibcontainerError,
    },
    /// The kernel does not take its new limits.
    #[error("cannot change the limits of container {id:?}")]
    Limits {
        /// Which.
        id: String,
        /// Why.
        #[source]
        source: Box<V2ManagerError>,
    },
    /// Put into force, the limit would have its processes killed.
    #[error(
        "memory limit ({limit}) below current usage ({used}), both in bytes: nothing was changed"
    )]
    MemoryInUse {
        /// What is wanted, in bytes.
        limit: u64,
        /// What cannot be reclaimed, in bytes.
        used: u64,
    },
    /// The guest lacks something.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl ContainerError {
    /// What the host decides by.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Id(_)
            | Self::Spec(
                SpecError::TooLarge { .. }
                | SpecError::Malformed { .. }
                | SpecError::Refused(_)
                | SpecError::InImage { .. }
                | SpecError::Seccomp(_),
            )
            | Self::User(UserError::Malformed(_))
            | Self::NotMapped { .. }
            | Self::Rootfs(RootfsError::Disk(DiskError::InvalidSerial(_)))
            | Self::Devices(DeviceError::Rule { .. } | DeviceError::TooMany)
            | Self::Nodes(
                NodeError::TooMany
                | NodeError::Invalid { .. }
                | NodeError::Disk(DiskError::InvalidSerial(_)),
            )
            | Self::Launch(LaunchError::Streams(_)) => ErrorKind::InvalidArgument,
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::Exists(_) | Self::Launch(LaunchError::StreamInUse(_)) => ErrorKind::AlreadyExists,
            Self::WrongState { .. } | Self::MemoryInUse { .. } => ErrorKind::WrongState,
            Self::TooMany { .. } => ErrorKind::ResourceExhausted,
            Self::Rootfs(RootfsError::Disk(_) | RootfsError::Image { .. })
            | Self::User(UserError::Database { .. }) => ErrorKind::Image,
            Self::User(UserError::UnknownUser(_) | UserError::UnknownGroup(_)) => {
                ErrorKind::UnknownUser
            }
            Self::Launch(LaunchError::Reported { failure, .. }) => match failure {
                Failure::CommandNotFound => ErrorKind::CommandNotFound,
                Failure::CommandNotExecutable => ErrorKind::CommandNotExecutable,
                Failure::Other => ErrorKind::LaunchFailed,
            },
            // As of one that is killed by its limit of memory.
            Self::Launch(LaunchError::Silent) => ErrorKind::LaunchFailed,
            Self::Rootfs(RootfsError::Mount { .. })
            | Self::Fill(_)
            | Self::Nodes(_)
            | Self::Spec(SpecError::Write { .. })
            | Self::Devices(DeviceError::Kernel(_))
            | Self::Launch(_)
            | Self::Start { .. }
            | Self::Limits { .. }
            | Self::Io { .. } => ErrorKind::Internal,
        }
    }
}

impl From<ContainerError> for AgentError {
    fn from(error: ContainerError) -> Self {
        Self::new(error.kind(), with_causes(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_gets_every_cause_once() {
        let source = io::Error::from_raw_os_error(libc::ENOSPC);
        let path = "/x".into();
        let error = ContainerError::from(RootfsError::Mount {
            action: "create",
            path,
            source,
        });
        let sent = AgentError::from(error);
        assert_eq!(sent.kind, ErrorKind::Internal);
        assert_eq!(
            sent.message,
            "cannot create /x: No space left on device (os error 28)"
        );
    }

    #[test]
    fn what_a_process_could_not_be_made_for_keeps_its_kind() {
        let reported = |failure| LaunchError::Reported {
            failure,
            message: "command \"x\" not found".into(),
        };
        for (error, kind) in [
            (
                reported(Failure::CommandNotFound),
                ErrorKind::CommandNotFound,
            ),
            (reported(Failure::Other), ErrorKind::LaunchFailed),
            (LaunchError::Silent, ErrorKind::LaunchFailed),
            (LaunchError::Timeout, ErrorKind::Internal),
        ] {
            let error = AgentError::from(ContainerError::from(error));
            assert_eq!(error.kind, kind, "{error}");
        }
    }
}
