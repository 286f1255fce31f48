//! What can go wrong, in words for the person who typed the command.

use std::io;
use std::path::{Path, PathBuf};

use oci_spec::distribution::ParseError;

use crate::{
    ArchiveError, Digest, DiskError, ImportError, LayerError, Reference, RegistryError,
    SignatureError,
};

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on images failed. `Display` gives one or two lines that say what to do; the
/// cause is the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The string is not an image reference.
    #[error(
        "{input:?} is not an image reference; write [REGISTRY/]NAME[:TAG][@sha256:DIGEST], all but the tag in lower case"
    )]
    Reference {
        /// What was given.
        input: String,
        /// The rule it breaks.
        #[source]
        source: ParseError,
    },
    /// The store has no such image.
    #[error(
        "no image {name:?} in the store; `podvisor images` lists what there is, `podvisor pull` fetches one"
    )]
    NotFound {
        /// Name, id or digest that was asked for.
        name: String,
    },
    /// The beginning of an id fits several images.
    #[error("{name:?} is the beginning of {count} image ids; give more digits")]
    Ambiguous {
        /// What was given.
        name: String,
        /// How many images it fits.
        count: usize,
    },
    /// The image's file is open in a running sandbox.
    #[error("image {id} is in use by a running sandbox; stop it first")]
    InUse {
        /// The image.
        id: Digest,
    },
    /// Files of the image are missing or changed.
    #[error("image {id} is damaged; remove it by `podvisor rmi {id}` and pull it again")]
    Damaged {
        /// The image.
        id: Digest,
    },
    /// The registry, or what it sent.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// An archive, or what is in it.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A disk image, or the server that has it.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The signature policy refuses the image.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// A root file system, or what is in it.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// One name for several images.
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
        /// Why.
        #[source]
        source: LayerError,
    },
    /// The database cannot be used.
    #[error("cannot use the image database {}; if it is damaged, move it away and pull the images again", .path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<redb::Error>,
    },
    /// [`Cancel`](crate::Cancel) was asked for.
    #[error("cancelled")]
    Cancelled,
    /// The disk under the store is full.
    #[error("no space left for the image store at {}; free some, or remove images by `podvisor rmi`", .path.display())]
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
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// Whether the same call may succeed later: nothing is wrong with the image itself.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_retryable(),
            Self::Disk(error) => error.is_retryable(),
            Self::DiskFull { .. } | Self::Io { .. } => true,
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

/// Parses a reference, docker's short forms included (`busybox` is
/// `docker.io/library/busybox:latest`). What reads as an image's id is no name
/// (github.com/distribution/reference, `ParseAnyReference`), or it could stand for another image.
pub(crate) fn parse_reference(input: &str) -> Result<Reference> {
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
