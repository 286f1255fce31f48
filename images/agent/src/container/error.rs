//! Errors of containers, and their conversion for the host.

use std::io;

use libcgroups::v2::manager::V2ManagerError;
use libcontainer::error::LibcontainerError;
use podvisor_agent_protocol::{AgentError, ErrorKind, InvalidId};

use super::files::disk::DiskError;
use super::files::fill::FillError;
use super::files::memory::MemoryError;
use super::files::nodes::NodeError;
use super::files::rootfs::RootfsError;
use super::limit::TooMany;
use super::process::launch::LaunchError;
use super::spec_error::SpecError;
use super::users::namespace::NamespaceError;
use super::users::user::UserError;
use crate::causes::with_causes;
use crate::cgroup::devices::DeviceError;
use crate::launcher::Failure;

/// Result of an operation on containers.
pub type Result<T> = std::result::Result<T, ContainerError>;

/// An operation on containers failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The request's id is invalid.
    #[error(transparent)]
    Id(#[from] InvalidId),
    /// No such container or process.
    #[error("no container or process {0:?}")]
    NotFound(String),
    /// The id is in use.
    #[error("{0:?} exists already: delete it or choose another id")]
    Exists(String),
    /// Not possible in the current state.
    #[error("container {id:?} is {state}")]
    WrongState {
        /// The container or process.
        id: String,
        /// Its state.
        state: &'static str,
    },
    /// A limit is reached.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// The image or its overlay cannot be mounted.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The contents of a volume cannot be copied.
    #[error(transparent)]
    Fill(#[from] FillError),
    /// The user cannot be resolved.
    #[error(transparent)]
    User(#[from] UserError),
    /// Its user namespace does not have an id, or cannot be created.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The specification is invalid or refused.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The rules for its devices cannot be applied.
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// Its devices cannot be found or created.
    #[error(transparent)]
    Nodes(#[from] NodeError),
    /// The process cannot be created.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// libcontainer fails to start it.
    #[error("cannot start container {id:?}")]
    Start {
        /// The container.
        id: String,
        /// The cause.
        #[source]
        source: LibcontainerError,
    },
    /// The kernel does not accept its new limits.
    #[error("cannot change the limits of container {id:?}")]
    Limits {
        /// The container.
        id: String,
        /// The cause.
        #[source]
        source: Box<V2ManagerError>,
    },
    /// If applied, the limit would get its processes killed.
    #[error(
        "memory limit ({limit}) below current usage ({used}), both in bytes: nothing was changed"
    )]
    MemoryInUse {
        /// The requested limit, in bytes.
        limit: u64,
        /// Memory that cannot be reclaimed, in bytes.
        used: u64,
    },
    /// An operation in the guest failed.
    #[error("cannot {action}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl ContainerError {
    /// Returns the kind of the error, for the host.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Id(_)
            | Self::Spec(
                SpecError::TooLarge { .. }
                | SpecError::Malformed { .. }
                | SpecError::Refused(_)
                | SpecError::InImage { .. }
                | SpecError::Destination { .. }
                | SpecError::Seccomp(_),
            )
            | Self::User(UserError::Malformed(_))
            | Self::Namespace(NamespaceError::NotMapped { .. })
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
            Self::TooMany(_) | Self::Namespace(NamespaceError::TooMany(_)) => {
                ErrorKind::ResourceExhausted
            }
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
            // For example because it was killed at its memory limit.
            Self::Launch(LaunchError::Silent) => ErrorKind::LaunchFailed,
            Self::Rootfs(RootfsError::Mount { .. })
            | Self::Fill(_)
            | Self::Namespace(NamespaceError::Make(_))
            | Self::Nodes(_)
            | Self::Spec(SpecError::Write { .. } | SpecError::Read { .. })
            | Self::Devices(DeviceError::Kernel(_))
            | Self::Launch(_)
            | Self::Start { .. }
            | Self::Limits { .. }
            | Self::Io { .. } => ErrorKind::Internal,
        }
    }
}

impl From<MemoryError> for ContainerError {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Spec(error) => error.into(),
            MemoryError::Namespace(error) => error.into(),
            MemoryError::Mount(error) => error.into(),
            MemoryError::TooMany(error) => error.into(),
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
