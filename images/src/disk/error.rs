//! Errors of disk images, besides those in the content of a file.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{Checksum, ConvertError};

/// Why there is no disk image. URLs are shown without their query, which may contain secrets.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The string is not the URL of a disk image.
    #[error("{input:?} is not the URL of a disk image: {why}; write https://HOST/PATH")]
    Url {
        /// The input.
        input: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Plain HTTP, where anyone on the path can change the content.
    #[error(
        "{url} is plain HTTP, by which anybody on the way can change the image; use HTTPS, or give the file's checksum (--checksum sha256:…)"
    )]
    Insecure {
        /// The URL.
        url: String,
    },
    /// No connection.
    #[error("cannot reach {host}; check the name, the network and that the server runs")]
    Unreachable {
        /// The server.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The connection cannot be trusted.
    #[error(
        "{host} cannot be trusted; if its certificate comes from an authority of your own, add that to the system's (update-ca-certificates)"
    )]
    Tls {
        /// The server.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The server stopped sending, or the connection broke, and repeating did not help.
    #[error("{host} broke off the transfer; try again")]
    Transfer {
        /// The server.
        host: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The answer breaks the protocol.
    #[error("{host} answered with {what}")]
    Protocol {
        /// The server.
        host: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A redirect that is refused.
    #[error("{host} sends us to {target}, which is refused: {why}")]
    Redirect {
        /// The server.
        host: String,
        /// The target.
        target: String,
        /// The reason.
        why: &'static str,
    },
    /// A certificate or key file cannot be used.
    #[error("cannot use {} for TLS", .path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The HTTP client cannot be set up.
    #[error("cannot set up HTTP")]
    Setup(#[source] reqwest::Error),
    /// No such file.
    #[error("there is no {url}; check the URL")]
    NotFound {
        /// The URL.
        url: String,
    },
    /// Not allowed.
    #[error(
        "the server does not allow to fetch {url}; put credentials into it: https://USER:PASSWORD@HOST/…"
    )]
    Unauthorized {
        /// The URL.
        url: String,
    },
    /// The server has a problem.
    #[error("the server answered {status} for {url}; try again later")]
    Status {
        /// The URL.
        url: String,
        /// HTTP status.
        status: u16,
        /// The pause that the server asks for.
        retry_after: Option<Duration>,
    },
    /// The end of the file is not known.
    #[error(
        "the server does not tell how long {url} is, so that a part of it cannot be told from all of it; give the file's checksum (--checksum sha256:…)"
    )]
    NoLength {
        /// The URL.
        url: String,
    },
    /// The file is not the expected one.
    #[error(
        "{url} has the checksum {actual} instead of {expected}; it is damaged, forged or newer than the checksum, and was discarded"
    )]
    Checksum {
        /// The URL.
        url: String,
        /// The expected checksum.
        expected: Box<Checksum>,
        /// The checksum of the received file.
        actual: Box<Checksum>,
    },
    /// The file exists, but it is not a disk image, or not one that can be used.
    #[error("{name} is not a usable disk image")]
    Unusable {
        /// URL, or image and file in it.
        name: String,
        /// The cause.
        #[source]
        source: ConvertError,
    },
    /// An image without a disk.
    #[error("image {image} has no disk: there is no file in its directory /disk")]
    NoDisk {
        /// The image.
        image: String,
    },
    /// An image with several files where a disk should be.
    #[error("image {image} has {count} files in its directory /disk instead of one: {names}")]
    SeveralDisks {
        /// The image.
        image: String,
        /// Number of files.
        count: usize,
        /// Their names, at most ten.
        names: String,
    },
    /// The image's own file system cannot be read.
    #[error("the file system of image {image} cannot be read; remove the image and pull it again")]
    FileSystem {
        /// The image.
        image: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl DiskError {
    /// Returns whether the same request may succeed later: nothing is wrong with the disk image
    /// itself.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Transfer { .. } => true,
            Self::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }
}
