//! Errors of archives.

use std::io;
use std::path::PathBuf;

use crate::{Digest, ManifestError, TarError};

/// Why images cannot be loaded from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The file does not exist, or may not be opened.
    #[error("cannot open {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It cannot be read.
    #[error("cannot read {name:?} of the archive")]
    Read {
        /// The member.
        name: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// An archive could not be written.
    #[error("cannot write the archive")]
    Write {
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is not an archive.
    #[error("not a tar archive, or a damaged one")]
    Tar(#[from] TarError),
    /// It is an archive, but of something else.
    #[error(
        "this holds no image: neither index.json (OCI layout) nor manifest.json (docker save) is in it; `podvisor import` makes an image of a root file system"
    )]
    Unknown,
    /// It is too large, or has too many members.
    #[error("the archive has more than {limit} {what}; raise the limit if you trust it")]
    Limit {
        /// What the limit applies to.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// A part is missing.
    #[error("the archive has no {name}")]
    Missing {
        /// The missing part.
        name: String,
    },
    /// A document is larger than allowed.
    #[error("{name:?} of the archive has {size} bytes, more than {limit}")]
    TooLarge {
        /// The member.
        name: String,
        /// Its length.
        size: u64,
        /// The bound.
        limit: u64,
    },
    /// A document is not JSON of the expected form.
    #[error("{name:?} of the archive is not valid")]
    Json {
        /// The member.
        name: &'static str,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The content of a member does not match the digest in its name.
    #[error("content of the archive has the digest {actual} instead of {expected}")]
    Digest {
        /// From its name.
        expected: Digest,
        /// Computed.
        actual: Digest,
    },
    /// An image in it is not one that can be run.
    #[error("an image of the archive cannot be used")]
    Manifest(#[from] ManifestError),
}
