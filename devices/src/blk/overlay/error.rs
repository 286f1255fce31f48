//! Why an overlay cannot be made or used.

use std::io;

/// Why a file cannot be the overlay of a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    /// The host refused.
    #[error("failed to {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// An overlay is made of an empty regular file only.
    #[error("the overlay is not an empty regular file: give it a new one")]
    NotEmpty,
    /// The image's path does not fit into the header.
    #[error("the path of the image has more than 1023 bytes")]
    Name,
    /// The image is larger than an overlay may be.
    #[error("the image has {size} bytes, and an overlay at most {most}")]
    TooLarge {
        /// Its bytes.
        size: u64,
        /// How many it may have.
        most: u64,
    },
    /// The file is of another format.
    #[error("the overlay is not a qcow2 file")]
    NotQcow2,
    /// The file has what this engine does not do.
    #[error(
        "the overlay has {what}, which is not supported: convert it with \
         `qemu-img convert -O qcow2 -B BASE -F raw`"
    )]
    Unsupported {
        /// What it is.
        what: &'static str,
    },
    /// The file stands alone, or over something else than a raw image.
    #[error("the overlay was not made over a raw image")]
    NoRawBase,
    /// It was not closed in order, or was marked as damaged.
    #[error("the overlay is marked as {state}: repair it with `qemu-img check -r all`")]
    Marked {
        /// As what.
        state: &'static str,
    },
    /// Something in the file cannot be.
    #[error("the overlay is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
}

impl Qcow2Error {
    /// The error of `action`.
    pub(super) fn io(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}
