//! Errors of registries.

use super::ManifestError;
use crate::Digest;

/// Why a registry did not provide what was requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// No connection.
    #[error("cannot reach registry {host}; check the name, the network and that the registry runs")]
    Unreachable {
        /// Registry.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The connection cannot be trusted.
    #[error(
        "registry {host} cannot be trusted; if its certificate comes from an authority of your own, add that to the system's (update-ca-certificates) or to the registry's settings"
    )]
    Tls {
        /// Registry.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The server stopped sending, or the connection broke, and repeating did not help.
    #[error("registry {host} broke off the transfer; try again")]
    Transfer {
        /// Registry.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// No such image.
    #[error("registry {host} has no {name}; check the name and the tag")]
    NotFound {
        /// Registry.
        host: String,
        /// What was requested.
        name: String,
    },
    /// A part of an image that the registry has is not there.
    #[error(
        "registry {host} has the manifest of {name}, but not its blob {digest}: the image is \
         incomplete there, and must be pushed again"
    )]
    BlobNotFound {
        /// Registry.
        host: String,
        /// The image.
        name: String,
        /// The blob.
        digest: Digest,
    },
    /// Not allowed.
    #[error(
        "registry {host} does not allow to pull {name}: it does not exist, or you must log in (`docker login {host}`)"
    )]
    Unauthorized {
        /// Registry.
        host: String,
        /// What was requested.
        name: String,
    },
    /// The server has a problem.
    #[error("registry {host} answered {status} for {name}{message}; try again later")]
    Status {
        /// Registry.
        host: String,
        /// What was requested.
        name: String,
        /// HTTP status.
        status: u16,
        /// The server's message, cut, preceded by a colon.
        message: String,
        /// The pause that the server asks for.
        retry_after: Option<std::time::Duration>,
    },
    /// The answer breaks the protocol.
    #[error("registry {host} answered with {what}")]
    Protocol {
        /// Registry.
        host: String,
        /// What is wrong.
        what: String,
    },
    /// A redirect or token server that is refused.
    #[error("registry {host} sends us to {target}, which is refused: {why}")]
    Redirect {
        /// Registry.
        host: String,
        /// The target.
        target: String,
        /// The reason.
        why: &'static str,
    },
    /// The content is not what its digest says.
    #[error(
        "{what} from registry {host} has the digest {actual} instead of {expected}; it is damaged or forged, and was discarded"
    )]
    Digest {
        /// Registry.
        host: String,
        /// Manifest, configuration or layer.
        what: &'static str,
        /// The requested digest.
        expected: Digest,
        /// The digest of the received content.
        actual: Digest,
    },
    /// The content does not have the size that the manifest says.
    #[error(
        "{what} {digest} from registry {host} has {actual} bytes instead of {expected}; it was discarded"
    )]
    Size {
        /// Registry.
        host: String,
        /// Manifest, configuration or layer.
        what: &'static str,
        /// Its digest.
        digest: Digest,
        /// Bytes announced.
        expected: u64,
        /// Bytes offered, or received at least.
        actual: u64,
    },
    /// A document that is longer than allowed.
    #[error("registry {host} sent more than {limit} bytes for {what}; it was discarded")]
    TooLarge {
        /// Registry.
        host: String,
        /// Manifest, configuration or token.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// The reference has a digest that is not supported.
    #[error("the reference's digest cannot be used")]
    ReferenceDigest(#[source] crate::DigestError),
    /// The manifest is not one that can be run.
    #[error("image {name} cannot be used")]
    Manifest {
        /// The image.
        name: String,
        /// The cause.
        #[source]
        source: ManifestError,
    },
    /// A certificate or key file cannot be used.
    #[error("cannot use {} for TLS", .path.display())]
    Certificate {
        /// The file.
        path: std::path::PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The HTTP client cannot be set up.
    #[error("cannot set up HTTP")]
    Setup(#[source] reqwest::Error),
    /// Docker's configuration file cannot be read.
    #[error("cannot read credentials from {}", .path.display())]
    DockerConfig {
        /// The file.
        path: std::path::PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RegistryError {
    /// Returns the same error for a request of a blob of an image.
    pub(super) fn of_blob(self, digest: Digest) -> Self {
        match self {
            Self::NotFound { host, name } => Self::BlobNotFound { host, name, digest },
            error => error,
        }
    }

    /// Returns whether the same request may succeed later or elsewhere: nothing is wrong with the
    /// image itself.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Transfer { .. } => true,
            Self::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }
}
