//! Why a claim was not filled.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use podvisor_images::{ChecksumError, ConvertError, DiskError, Error, Qcow2Error};

use super::upload::FormError;
use crate::certificates::files::Unusable;
use crate::copy::StreamError;

/// Why a claim was not filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The source has no disk that can be used.
    #[error("failed to get the disk image")]
    Source(#[source] Box<Error>),
    /// The disk is larger than its claim.
    #[error(
        "virtual image size is larger than the reported available storage, {room} bytes; ask for \
         a larger claim"
    )]
    TooLarge {
        /// Bytes that there is room for.
        room: u64,
        /// What was found to be too large.
        #[source]
        source: Box<Error>,
    },
    /// The disk to copy is larger than its copy's claim.
    #[error(
        "the source has {size} bytes, which is more than the {room} bytes that the copy may have; \
         ask for a larger claim"
    )]
    Larger {
        /// Bytes of the source.
        size: u64,
        /// Bytes that there is room for.
        room: u64,
    },
    /// The checksum is none.
    #[error("failed to read the checksum")]
    Checksum(#[source] ChecksumError),
    /// The URL has no host.
    #[error("the source's URL has no host; write https://HOST/PATH")]
    Url,
    /// A file of the target or of the options cannot be used.
    #[error("failed to {what} {}", .path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// There is no room for a disk.
    #[error(
        "the volume at {} has {free} bytes free, which is no room for a disk; ask for a larger \
         claim", .path.display()
    )]
    NoRoom {
        /// The volume.
        path: PathBuf,
        /// Its free bytes.
        free: u64,
    },
    /// The certificates for uploads cannot be used.
    #[error("failed to use {} for uploads; delete the pod and its Secret", .path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nobody can upload.
    #[error("failed to listen on {address} for an upload")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// An upload is not the form that it says to be.
    #[error("failed to read the form of an upload")]
    Form(#[source] FormError),
    /// What arrives is no copy of a disk.
    #[error("failed to take the copy")]
    Copy(#[source] StreamError),
    /// The process was told to end.
    #[error("the import was told to end before it was done; it begins again with its next pod")]
    Stopped,
}

impl From<Unusable> for ImportError {
    fn from(Unusable { path, source }: Unusable) -> Self {
        Self::Credentials { path, source }
    }
}

impl ImportError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }

    /// The error of a source whose disk may have `room` bytes.
    pub(super) fn source(error: Error, room: u64) -> Self {
        let is_too_large = match &error {
            Error::Disk(DiskError::Unusable { source, .. }) => matches!(
                source,
                ConvertError::TooLarge { .. } | ConvertError::Qcow2(Qcow2Error::Size { .. })
            ),
            _ => false,
        };
        let source = Box::new(error);
        if is_too_large {
            Self::TooLarge { room, source }
        } else {
            Self::Source(source)
        }
    }
}
