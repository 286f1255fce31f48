//! Errors of calls, and their gRPC statuses.

use std::error::Error as _;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tonic::{Code, Status};

use super::cdi::CdiError;
use super::spec::SpecFault;
use super::state::StateError;
use super::vm_spec::{AnnotationErrors, VmiError};
use crate::cni::CniError;
use crate::launch::BeginError;
use crate::sandbox::{AttachError, RefusalKind, SandboxError};
use crate::streaming::{StreamingError, TokenError};

/// Longest message of a status, in characters: gRPC puts it into a header.
const MESSAGE_CHARS: usize = 2000;

/// The kind of object that a call names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Pod,
    Container,
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pod => "pod sandbox",
            Self::Container => "container",
        })
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CriError {
    /// The request contradicts itself or the API.
    #[error("invalid {field}: {reason}")]
    Invalid {
        /// The field's path in the request.
        field: &'static str,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// A request that no virtual machine can grant.
    #[error("{field} is not supported: {reason}")]
    Refused {
        /// The field's path in the request.
        field: &'static str,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// Annotations of a pod that is a virtual machine are wrong.
    #[error("invalid config.annotations: {0}")]
    Annotations(AnnotationErrors),
    /// The VirtualMachineInstance of which a pod was made cannot run here.
    #[error(transparent)]
    Vmi(VmiError),
    /// A pod that is a virtual machine has its container already.
    #[error(
        "a virtual machine is the only container of its pod, which has {other} already: init \
         containers and sidecars are containers, too"
    )]
    SecondContainer {
        /// The container that is there.
        other: String,
    },
    /// A volume that only a process of the host's root could serve.
    #[error(
        "failed to mount the volume {} with the users of the pod's process, which is nobody on the \
         node. Unless `require` has mapped-users, the pod is ended, and its kubelet makes the pod \
         anew with a process that is the host's root",
        .path.display()
    )]
    HostUsers {
        /// The volume's path on the node.
        path: PathBuf,
        /// Why that process cannot.
        #[source]
        source: AttachError,
    },
    /// A guest does not accept a connection.
    #[error(
        "failed to connect to {address} in the virtual machine: see that a service listens there, \
         and not at localhost alone"
    )]
    GuestPort {
        /// The address and port.
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// There is no such object.
    #[error("no {kind} {id:?}")]
    NotFound {
        /// The kind of object.
        kind: ObjectKind,
        /// Its id or name.
        id: String,
    },
    /// The container's image is not on this node.
    #[error("image {name:?} is not on this node; pull it first")]
    NoImage {
        /// The image.
        name: String,
    },
    /// The prefix of an id matches several.
    #[error("{id:?} is the beginning of several {kind} ids; give more of it")]
    Ambiguous {
        /// The kind of object.
        kind: ObjectKind,
        /// The prefix.
        id: String,
    },
    /// The name is taken.
    #[error("{kind} name {name:?} is used by {id}; remove that one first")]
    NameTaken {
        /// The kind of object.
        kind: ObjectKind,
        /// The name.
        name: String,
        /// The id of the object that has it.
        id: String,
    },
    /// The network of a pod has no address.
    #[error(
        "the CNI plugins gave the pod no address (\"ips\" of the result is empty): give the \
         network an \"ipam\""
    )]
    NoAddress,
    /// The kernel for the guests of a runtime handler is missing.
    #[error(
        "no pod of the runtime handler {handler:?} can be run: the kernel of its guests, {}, is \
         missing; put it there, or change `kernel` in the settings and restart podvisor",
        .kernel.display()
    )]
    NoKernel {
        /// The handler's name.
        handler: String,
        /// The file.
        kernel: PathBuf,
    },
    /// The object is not in the state that the call requires.
    #[error("{kind} {id} is {state}; {wanted}")]
    WrongState {
        /// The kind of object.
        kind: ObjectKind,
        /// Its id.
        id: String,
        /// The state that it is in.
        state: &'static str,
        /// What the call requires.
        wanted: &'static str,
    },
    /// Another daemon owns the state directory.
    #[error(
        "the state directory {} belongs to another daemon, {owner}: stop that one, or use another \
         --state",
        .dir.display()
    )]
    StateOwned {
        /// The directory.
        dir: PathBuf,
        /// The owner, in words.
        owner: String,
    },
    /// The pods of the state directory are of another root.
    #[error(
        "the pods in the state directory {} are of the root {}, and would be ended: serve with \
         that --root, or remove its pods first",
        .dir.display(),
        .root.display()
    )]
    StateOfRoot {
        /// The directory.
        dir: PathBuf,
        /// The other root.
        root: PathBuf,
    },
    /// It took longer than the caller allows.
    #[error("{what} did not end within {seconds} s and was killed")]
    Deadline {
        /// The operation.
        what: &'static str,
        /// The caller's limit.
        seconds: i64,
    },
    /// The container's process cannot be created: for example, its command is not in its image, or
    /// a mount fails.
    #[error("container {id} cannot be started: {message}")]
    CannotStart {
        /// The container.
        id: String,
        /// The error that the guest reported.
        message: String,
    },
    /// The guest did not end a killed container.
    #[error("container {id} does not end after SIGKILL; stop its pod sandbox")]
    Unkillable {
        /// The container.
        id: String,
    },
    /// The guest did not get the memory that it should have.
    #[error(
        "the guest of pod sandbox {id} has {} MiB of memory and did not take the {} MiB that \
         its containers' limits ask for; try again, or lower them",
        .has >> 20, .wanted >> 20
    )]
    NoRoom {
        /// The pod.
        id: String,
        /// Bytes.
        wanted: u64,
        /// Bytes.
        has: u64,
    },
    /// Limits that the guest can never have.
    #[error(
        "the guest of pod sandbox {id} can have {most} at most, and the new limits are for \
         {wanted}; raise `{setting}` in the settings for new pods, or lower the limits"
    )]
    BeyondGrowth {
        /// The pod.
        id: String,
        /// What would allow more.
        setting: &'static str,
        /// What they come to.
        wanted: String,
        /// What there can be.
        most: String,
    },
    /// The machine has not given memory back yet.
    #[error(
        "the machine of pod sandbox {id} takes {} MiB of the node's memory, and {} MiB are what \
         its limits leave its guest; try again, or end what uses it",
        .taken >> 20, .wanted >> 20
    )]
    Keeps {
        /// The pod.
        id: String,
        /// Bytes of the guest.
        wanted: u64,
        /// Bytes.
        taken: u64,
    },
    /// An image cannot be mounted as a volume. Its message begins with the reason that the API has
    /// for it (`k8s.io/cri-api/pkg/errors`).
    #[error("ImageVolumeMountFailed")]
    ImageVolume(#[source] Box<CriError>),
    /// The specification of a container.
    #[error(transparent)]
    Spec(#[from] SpecFault),
    /// Devices by the Container Device Interface.
    #[error("CDI device injection failed")]
    Cdi(#[from] CdiError),
    /// The pod's network.
    #[error(transparent)]
    Network(#[from] CniError),
    /// The virtual machine, or its agent.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The store of images.
    #[error(transparent)]
    Image(#[from] podvisor_images::Error),
    /// The database of pods.
    #[error(transparent)]
    State(#[from] StateError),
    /// The kernel or initramfs of guests.
    #[error(transparent)]
    Assets(#[from] crate::machine::AssetError),
    /// A file of the host.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The host's kernel did not provide random numbers, pipes or threads.
    #[error("cannot {action}")]
    Host {
        /// The operation.
        action: &'static str,
        #[source]
        source: io::Error,
    },
    /// Streams for a client.
    #[error(transparent)]
    Streams(#[from] StreamingError),
    /// The answer of another call that did the same work.
    #[error("{}", .0.message())]
    Shared(Status),
}

impl CriError {
    pub(super) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Invalid { field, reason }
    }

    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    pub(super) fn host(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { action, source }
    }

    /// Returns whether the named object does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        self.code() == Code::NotFound
    }

    /// Returns whether a record could not be written because its disk is full.
    pub(super) fn is_disk_full(&self) -> bool {
        matches!(self, Self::State(_)) && self.code() == Code::ResourceExhausted
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. }
            | Self::Refused { .. }
            | Self::CannotStart { .. }
            | Self::Ambiguous { .. }
            | Self::Spec(_) => Code::InvalidArgument,
            Self::NotFound { .. } | Self::NoImage { .. } => Code::NotFound,
            Self::NameTaken { .. } => Code::AlreadyExists,
            Self::GuestPort { .. } => Code::Unavailable,
            Self::Annotations(_) | Self::Vmi(_) | Self::SecondContainer { .. } => {
                Code::InvalidArgument
            }
            Self::NoKernel { .. }
            | Self::WrongState { .. }
            | Self::HostUsers { .. }
            | Self::StateOwned { .. }
            | Self::StateOfRoot { .. } => Code::FailedPrecondition,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::NoRoom { .. } | Self::BeyondGrowth { .. } | Self::Keeps { .. } => {
                Code::ResourceExhausted
            }
            Self::Streams(StreamingError::Invalid(_)) => Code::InvalidArgument,
            Self::Streams(StreamingError::Token(TokenError::TooMany)) => Code::ResourceExhausted,
            Self::Streams(_) => Code::Internal,
            Self::Network(error) => network_code(error),
            Self::Sandbox(error) => sandbox_code(error),
            Self::Image(error) => image_code(error),
            Self::Assets(_) => Code::FailedPrecondition,
            Self::Io { source, .. } | Self::Host { source, .. } => file_code(Some(source.kind())),
            Self::State(error) => file_code(error.io_kind()),
            Self::Unkillable { .. } | Self::NoAddress => Code::Internal,
            Self::ImageVolume(error) => error.code(),
            Self::Cdi(error) => cdi_code(error),
            Self::Shared(status) => status.code(),
        }
    }
}

fn file_code(kind: Option<io::ErrorKind>) -> Code {
    match kind {
        Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => Code::ResourceExhausted,
        _ => Code::Internal,
    }
}

fn cdi_code(error: &CdiError) -> Code {
    match error {
        CdiError::InvalidName { .. }
        | CdiError::TooManyDevices { .. }
        | CdiError::Refused { .. }
        | CdiError::Invalid { .. } => Code::InvalidArgument,
        // A driver may define them later.
        CdiError::Unresolvable { .. }
        | CdiError::TooManyFiles { .. }
        | CdiError::Missing { .. } => Code::FailedPrecondition,
        CdiError::Io { source, .. } => file_code(Some(source.kind())),
    }
}

fn network_code(error: &CniError) -> Code {
    match error {
        CniError::InvalidIdentity { .. } => Code::InvalidArgument,
        // CNI's own code 11: try again later.
        CniError::NoConfiguration { .. }
        | CniError::InvalidConfiguration { .. }
        | CniError::NoPlugin { .. }
        | CniError::Failed { code: 11, .. } => Code::Unavailable,
        CniError::Hangs { .. } | CniError::StillRuns { .. } => Code::DeadlineExceeded,
        CniError::Io { source, .. } | CniError::Configure { source, .. } => {
            file_code(Some(source.kind()))
        }
        _ => Code::Internal,
    }
}

fn sandbox_code(error: &SandboxError) -> Code {
    match error.kind() {
        Some(RefusalKind::NotFound) => Code::NotFound,
        Some(RefusalKind::AlreadyExists) => Code::AlreadyExists,
        Some(RefusalKind::WrongState) => Code::FailedPrecondition,
        Some(RefusalKind::ResourceExhausted) => Code::ResourceExhausted,
        Some(
            RefusalKind::InvalidArgument
            | RefusalKind::UnknownUser
            | RefusalKind::CommandNotFound
            | RefusalKind::CommandNotExecutable,
        ) => Code::InvalidArgument,
        Some(RefusalKind::NoAgent) => Code::Unimplemented,
        _ if error.is_gone() => Code::FailedPrecondition,
        _ => Code::Internal,
    }
}

fn image_code(error: &podvisor_images::Error) -> Code {
    use podvisor_images::Error;
    match error {
        Error::NotFound { .. } => Code::NotFound,
        Error::Reference { .. }
        | Error::Ambiguous { .. }
        | Error::NoFile { .. }
        | Error::FileTooLarge { .. } => Code::InvalidArgument,
        Error::InUse { .. } => Code::FailedPrecondition,
        Error::DiskFull { .. } => Code::ResourceExhausted,
        Error::Cancelled => Code::Cancelled,
        Error::Signature(_) => Code::PermissionDenied,
        // This node's, not a registry's.
        Error::Io { source, .. } => file_code(Some(source.kind())),
        Error::DamagedLayer { .. } => Code::Unknown,
        error if error.is_retryable() => Code::Unavailable,
        _ => Code::Unknown,
    }
}

impl From<BeginError> for CriError {
    fn from(error: BeginError) -> Self {
        match error {
            BeginError::Network(error) => error.into(),
            BeginError::Machine(error) => error.into(),
        }
    }
}

impl From<CriError> for Status {
    fn from(error: CriError) -> Self {
        let code = error.code();
        let mut text = error.to_string();
        let mut next = error.source();
        while let Some(cause) = next {
            let cause_text = cause.to_string();
            // Some libraries repeat their cause in their own text.
            if !text.ends_with(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            next = cause.source();
        }
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        let text: String = text.chars().map(clean).take(MESSAGE_CHARS).collect();
        Self::new(code, text)
    }
}

/// Result of a call.
pub(crate) type Result<T, E = CriError> = std::result::Result<T, E>;
