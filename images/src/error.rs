//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

use oci_spec::distribution::ParseError;

use crate::{
    ArchiveError, Digest, DiskError, ImportError, LayerError, Reference, RegistryError,
    SignatureError,
};

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on images failed. `Display` gives one line that says what failed, on what; the
/// cause is the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The string is not an image reference.
    #[error(
        "{input:?} is not an image reference; write [REGISTRY/]NAME[:TAG][@sha256:DIGEST], all but the tag in lower case"
    )]
    Reference {
        /// The input.
        input: String,
        /// The rule that it breaks.
        #[source]
        source: ParseError,
    },
    /// The store has no such image.
    #[error("no image {name:?} in the store")]
    NotFound {
        /// The name, id or digest that was requested.
        name: String,
    },
    /// An id prefix matches several images.
    #[error("{name:?} is the beginning of {count} image ids; give more digits")]
    Ambiguous {
        /// The prefix.
        name: String,
        /// Number of images that it matches.
        count: usize,
    },
    /// The image's file is open in a running sandbox.
    #[error("image {id} is in use by a running sandbox; stop it first")]
    InUse {
        /// The image.
        id: Digest,
    },
    /// Files of the image are missing or changed.
    #[error("image {id} is damaged")]
    Damaged {
        /// The image.
        id: Digest,
    },
    /// A failure of a registry, or in what it sent.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A failure of an archive, or in its content.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A failure of a disk image, or of the server that has it.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The signature policy refuses the image.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// A failure of a root file system, or in its content.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// One name was given for several images.
    #[error(
        "the archive has {count} images, so they cannot all be named {name:?}; leave the name out"
    )]
    SeveralImages {
        /// The name.
        name: String,
        /// Number of images.
        count: usize,
    },
    /// A layer cannot be part of an image.
    #[error("layer {layer} cannot be unpacked")]
    Layer {
        /// Digest of the layer as fetched.
        layer: Digest,
        /// The cause.
        #[source]
        source: LayerError,
    },
    /// The store's copy of a layer went bad and was removed.
    #[error("layer {layer} was damaged in the store and has been removed; pull or load it again")]
    DamagedLayer {
        /// Digest of the layer as fetched.
        layer: Digest,
        /// How it showed.
        #[source]
        source: LayerError,
    },
    /// The database cannot be used.
    #[error("cannot use the image database {}; if it is damaged, move it away and pull the images again", .path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<redb::Error>,
    },
    /// An image has no file of that path.
    #[error("image {image} has no file {path:?}; correct the path, which may not be a link")]
    NoFile {
        /// The image.
        image: String,
        /// The path in it.
        path: String,
    },
    /// A file of an image is larger than what it is for.
    #[error("{path:?} in the image has {size} bytes: at most {most} are copied")]
    FileTooLarge {
        /// The path in the image.
        path: String,
        /// The file's length.
        size: u64,
        /// The limit.
        most: u64,
    },
    /// The operation was cancelled by [`Cancel`](crate::Cancel).
    #[error("cancelled")]
    Cancelled,
    /// The disk under the store is full.
    #[error("no space left for the image store at {}", .path.display())]
    DiskFull {
        /// The file that could not be written.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The operating system refused a file operation.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// Returns whether the same call may succeed later: nothing is wrong with the image itself.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_retryable(),
            Self::Disk(error) => error.is_retryable(),
            Self::DamagedLayer { .. } | Self::DiskFull { .. } | Self::Io { .. } => true,
            _ => false,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, source }
            }
            _ => Self::Io {
                action,
                path,
                source,
            },
        }
    }
}

/// Parses a reference, Docker's short forms included (`busybox` is
/// `docker.io/library/busybox:latest`). A string that reads as an image's id is not a name
/// (github.com/distribution/reference, `ParseAnyReference`), because it could otherwise stand for
/// another image.
///
/// # Errors
/// [`Error::Reference`] with the rule that `input` breaks.
pub fn parse_reference(input: &str) -> Result<Reference> {
    let digits = input.strip_prefix("sha256:").unwrap_or(input);
    let parsed = match Digest::from_hex(digits) {
        Ok(_) => Err(ParseError::ReferenceInvalidFormat),
        Err(_) => crate::reference::parse(input),
    };
    parsed.map_err(|source| Error::Reference {
        input: input.chars().take(300).collect(),
        source,
    })
}
