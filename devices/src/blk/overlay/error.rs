//! Why an overlay cannot be created or used.

use std::io;

/// Why a file cannot be the overlay of a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    /// An operation on the host failed.
    #[error("failed to {action}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// An overlay can only be created in an empty regular file.
    #[error("the overlay is not an empty regular file: give it a new one")]
    NotEmpty,
    /// The image's path does not fit into the header.
    #[error("the path of the image has more than 1023 bytes")]
    Name,
    /// The image is larger than an overlay may be.
    #[error("the image has {size} bytes, and an overlay at most {most}")]
    TooLarge {
        /// Its size in bytes.
        size: u64,
        /// The maximum size in bytes.
        most: u64,
    },
    /// A disk is not made smaller.
    #[error("the disk has {now} bytes, and is not made smaller: {size} bytes were asked for")]
    Smaller {
        /// The size that was asked for.
        size: u64,
        /// Its size in bytes.
        now: u64,
    },
    /// The file has another format.
    #[error("the overlay is not a qcow2 file")]
    NotQcow2,
    /// The file uses a feature that this engine does not support.
    #[error(
        "the overlay has {what}, which is not supported: convert it with \
         `qemu-img convert -O qcow2 -B BASE -F raw`"
    )]
    Unsupported {
        /// The feature.
        what: &'static str,
    },
    /// The file has no base, or one that is not a raw image.
    #[error("the overlay was not made over a raw image")]
    NoRawBase,
    /// It was not closed properly, or was marked as damaged.
    #[error("the overlay is marked as {state}: repair it with `qemu-img check -r all`")]
    Marked {
        /// The mark.
        state: &'static str,
    },
    /// Something in the file is inconsistent.
    #[error("the overlay is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
}

impl Qcow2Error {
    /// Returns a constructor of the error of `action`.
    pub(super) fn io(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}
