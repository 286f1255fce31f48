//! What is wrong with an archive.

use std::io;
use std::path::PathBuf;

use crate::{Digest, ManifestError, TarError};

/// Why images cannot be loaded from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// No such file, or not allowed.
    #[error("cannot open {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot be read.
    #[error("cannot read {name:?} of the archive")]
    Read {
        /// The member.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An archive could not be written.
    #[error("cannot write the archive")]
    Write {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no archive.
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
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// A part is missing.
    #[error("the archive has no {name}")]
    Missing {
        /// What.
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
    /// A document is not what it should be.
    #[error("{name:?} of the archive is not valid")]
    Json {
        /// The member.
        name: &'static str,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A member is not what its name says.
    #[error("content of the archive has the digest {actual} instead of {expected}")]
    Digest {
        /// By its name.
        expected: Digest,
        /// Computed.
        actual: Digest,
    },
    /// An image in it is none that can be run.
    #[error("an image of the archive cannot be used")]
    Manifest(#[from] ManifestError),
}
