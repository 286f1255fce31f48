//! Errors that keep their kind on the wire.

use protobuf::{EnumOrUnknown, Message};
use ttrpc::Code;

use crate::{api, limits};

const DETAIL_TYPE: &str = "podvisor.agent.v1.ErrorDetail";

/// Why the agent did not carry out a request; see `ErrorKind` in `agent.proto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A field of the request is malformed or out of bounds.
    InvalidArgument,
    /// No container or process of that id.
    NotFound,
    /// The id is in use.
    AlreadyExists,
    /// The container's state does not allow the request.
    WrongState,
    /// A limit of the agent is reached.
    ResourceExhausted,
    /// The image's block device is missing or unusable.
    Image,
    /// The image does not know the user or group.
    UnknownUser,
    /// The command does not exist in the container.
    CommandNotFound,
    /// The command exists and cannot be executed.
    CommandNotExecutable,
    /// Nothing in the guest listens at the port.
    ConnectionRefused,
    /// The process cannot be created as specified, for a reason other than its command.
    LaunchFailed,
    /// Any other failure in the guest, or an answer that is not the agent's.
    Internal,
}

impl ErrorKind {
    /// Returns the exit code with which shells and container engines report this, if there is one.
    #[must_use]
    pub fn shell_code(self) -> Option<u8> {
        match self {
            Self::CommandNotFound => Some(127),
            Self::CommandNotExecutable => Some(126),
            _ => None,
        }
    }

    fn code(self) -> Code {
        match self {
            Self::InvalidArgument | Self::UnknownUser => Code::INVALID_ARGUMENT,
            Self::NotFound | Self::Image | Self::CommandNotFound => Code::NOT_FOUND,
            Self::AlreadyExists => Code::ALREADY_EXISTS,
            Self::WrongState | Self::CommandNotExecutable => Code::FAILED_PRECONDITION,
            Self::ResourceExhausted => Code::RESOURCE_EXHAUSTED,
            Self::ConnectionRefused => Code::UNAVAILABLE,
            Self::LaunchFailed | Self::Internal => Code::INTERNAL,
        }
    }
}

impl From<ErrorKind> for api::ErrorKind {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::ERROR_KIND_INVALID_ARGUMENT,
            ErrorKind::NotFound => Self::ERROR_KIND_NOT_FOUND,
            ErrorKind::AlreadyExists => Self::ERROR_KIND_ALREADY_EXISTS,
            ErrorKind::WrongState => Self::ERROR_KIND_WRONG_STATE,
            ErrorKind::ResourceExhausted => Self::ERROR_KIND_RESOURCE_EXHAUSTED,
            ErrorKind::Image => Self::ERROR_KIND_IMAGE,
            ErrorKind::UnknownUser => Self::ERROR_KIND_UNKNOWN_USER,
            ErrorKind::CommandNotFound => Self::ERROR_KIND_COMMAND_NOT_FOUND,
            ErrorKind::CommandNotExecutable => Self::ERROR_KIND_COMMAND_NOT_EXECUTABLE,
            ErrorKind::ConnectionRefused => Self::ERROR_KIND_CONNECTION_REFUSED,
            ErrorKind::LaunchFailed => Self::ERROR_KIND_LAUNCH_FAILED,
            ErrorKind::Internal => Self::ERROR_KIND_INTERNAL,
        }
    }
}

impl From<api::ErrorKind> for ErrorKind {
    fn from(kind: api::ErrorKind) -> Self {
        use api::ErrorKind as Wire;
        match kind {
            Wire::ERROR_KIND_INVALID_ARGUMENT => Self::InvalidArgument,
            Wire::ERROR_KIND_NOT_FOUND => Self::NotFound,
            Wire::ERROR_KIND_ALREADY_EXISTS => Self::AlreadyExists,
            Wire::ERROR_KIND_WRONG_STATE => Self::WrongState,
            Wire::ERROR_KIND_RESOURCE_EXHAUSTED => Self::ResourceExhausted,
            Wire::ERROR_KIND_IMAGE => Self::Image,
            Wire::ERROR_KIND_UNKNOWN_USER => Self::UnknownUser,
            Wire::ERROR_KIND_COMMAND_NOT_FOUND => Self::CommandNotFound,
            Wire::ERROR_KIND_COMMAND_NOT_EXECUTABLE => Self::CommandNotExecutable,
            Wire::ERROR_KIND_CONNECTION_REFUSED => Self::ConnectionRefused,
            Wire::ERROR_KIND_LAUNCH_FAILED => Self::LaunchFailed,
            Wire::ERROR_KIND_INTERNAL | Wire::ERROR_KIND_UNSPECIFIED => Self::Internal,
        }
    }
}

/// An error of the agent, as both sides see it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct AgentError {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// One line for users, at most [`limits::ERROR_BYTES`] bytes and without control characters.
    pub message: String,
}

impl AgentError {
    /// Creates an error; a message that exceeds these limits is cut and cleaned, since parts of it
    /// come from the other side.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let mut message: String = message.into();
        if message.len() > limits::ERROR_BYTES {
            message.truncate(message.floor_char_boundary(limits::ERROR_BYTES));
        }
        if message.contains(char::is_control) {
            // Replaces each by one byte, so that the limit still holds.
            message = message.replace(char::is_control, " ");
        }
        Self { kind, message }
    }
}

impl From<AgentError> for ttrpc::Error {
    fn from(error: AgentError) -> Self {
        let mut detail = api::ErrorDetail::new();
        detail.kind = EnumOrUnknown::new(error.kind.into());
        let mut status = ttrpc::get_status(error.kind.code(), error.message);
        let mut any = ttrpc::proto::Any::new();
        any.type_url = DETAIL_TYPE.to_owned();
        // Encoding one enum into memory cannot fail; without it the kind is Internal.
        any.value = detail.write_to_bytes().unwrap_or_default();
        status.details.push(any);
        Self::RpcStatus(status)
    }
}

impl From<ttrpc::Error> for AgentError {
    /// Any other error (a closed connection, for example) is `Internal`.
    fn from(error: ttrpc::Error) -> Self {
        let ttrpc::Error::RpcStatus(status) = error else {
            return Self::new(ErrorKind::Internal, format!("the guest's agent: {error}"));
        };
        let kind = status
            .details
            .iter()
            .find(|any| any.type_url == DETAIL_TYPE)
            .and_then(|any| api::ErrorDetail::parse_from_bytes(&any.value).ok())
            .and_then(|detail| detail.kind.enum_value().ok())
            .map_or(ErrorKind::Internal, ErrorKind::from);
        Self::new(kind, status.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [ErrorKind; 12] = [
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::AlreadyExists,
        ErrorKind::WrongState,
        ErrorKind::ResourceExhausted,
        ErrorKind::Image,
        ErrorKind::UnknownUser,
        ErrorKind::CommandNotFound,
        ErrorKind::CommandNotExecutable,
        ErrorKind::ConnectionRefused,
        ErrorKind::LaunchFailed,
        ErrorKind::Internal,
    ];

    #[test]
    fn every_kind_survives_the_wire() {
        for kind in KINDS {
            let error = AgentError::new(kind, "no such thing");
            assert_eq!(AgentError::from(ttrpc::Error::from(error.clone())), error);
        }
    }

    #[test]
    fn a_lost_connection_is_internal() {
        let error = AgentError::from(ttrpc::Error::RemoteClosed);
        assert_eq!(error.kind, ErrorKind::Internal);
    }

    #[test]
    fn a_status_with_a_forged_detail_is_internal() {
        let mut status = ttrpc::get_status(Code::NOT_FOUND, "x");
        let mut any = ttrpc::proto::Any::new();
        any.type_url = DETAIL_TYPE.to_owned();
        any.value = vec![0xff; 40];
        status.details.push(any);
        assert_eq!(
            AgentError::from(ttrpc::Error::RpcStatus(status)).kind,
            ErrorKind::Internal
        );
    }

    proptest! {
        #[test]
        fn messages_are_bounded_and_have_no_control_characters(text in ".{0,3000}\\PC*[\\x00-\\x20\\x80-\\x9f]{0,3000}") {
            let message = AgentError::new(ErrorKind::Internal, text).message;
            prop_assert!(message.len() <= limits::ERROR_BYTES);
            prop_assert!(!message.contains(char::is_control));
        }
    }
}
