//! What the agent does not accept of a specification. Several rooms read a part of it.

use std::io;
use std::path::PathBuf;

use crate::seccomp::ProfileError;

/// A specification that the agent does not accept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// More than the limit.
    #[error("{what} is larger than {limit} bytes")]
    TooLarge {
        /// The part of the request.
        what: &'static str,
        /// The bound.
        limit: usize,
    },
    /// Not JSON, or JSON of another form.
    #[error("{what} is no OCI runtime specification of its kind")]
    Malformed {
        /// The part of the request.
        what: &'static str,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// It breaks a rule of the agent.
    #[error("OCI runtime specification: {0}")]
    Refused(&'static str),
    /// A path in an image that cannot be a volume. Its message begins with the CRI's word.
    #[error("ImageVolumeMountFailed: the image of a volume has no {path:?} that can be mounted")]
    InImage {
        /// The path in the image.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The links of the root filesystem at a mount's destination cannot be followed.
    #[error("cannot find the destination {path} of a mount in the container's root filesystem")]
    Destination {
        /// The destination.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Its seccomp profile cannot be compiled to a filter.
    #[error(transparent)]
    Seccomp(#[from] ProfileError),
    /// It cannot be stored for libcontainer.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The stored one cannot be read again.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}
