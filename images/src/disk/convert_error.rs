//! Why a file is not a disk image that can be used.

use std::io;

/// Why a file is not a disk image that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The input could not be read, or the compressed data is damaged.
    #[error("the file cannot be read to its end; it is damaged or cut off")]
    Read(#[source] io::Error),
    /// The disk image cannot be written.
    #[error("the disk image cannot be written")]
    Write(#[source] io::Error),
    /// The qcow2 file is not usable.
    #[error("the qcow2 file cannot be used")]
    Qcow2(#[from] Qcow2Error),
    /// A format that is not supported.
    #[error("it is in {0} format; convert it by `qemu-img convert -O qcow2`")]
    Format(&'static str),
    /// The file is empty.
    #[error("it is empty")]
    Empty,
    /// More than allowed.
    #[error("it has more than {limit} bytes of {what}, which is more than is allowed")]
    TooLarge {
        /// Data, disk or file.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// The conversion was cancelled.
    #[error("the conversion was cancelled")]
    Cancelled,
}

/// Why a qcow2 file cannot be used as a disk image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    /// Version 1, or a future one.
    #[error("it is of version {0}; versions 2 and 3 are supported (`qemu-img convert -O qcow2`)")]
    Version(u32),
    /// An overlay over another file.
    #[error(
        "it needs a backing file, and no other file is ever opened for an image; `qemu-img convert -O qcow2` makes one that stands alone"
    )]
    BackingFile,
    /// The data is in another file.
    #[error(
        "its data is in an external file, and no other file is ever opened for an image; `qemu-img convert -O qcow2` makes one that stands alone"
    )]
    ExternalData,
    /// AES or LUKS.
    #[error("it is encrypted; decrypt it by `qemu-img convert`")]
    Encrypted,
    /// QEMU has marked it as corrupt.
    #[error("it is marked as corrupt; repair it by `qemu-img check -r all`")]
    MarkedCorrupt,
    /// Subclusters.
    #[error(
        "it has extended L2 entries, which are not supported; `qemu-img convert -O qcow2 -o extended_l2=off` makes one without"
    )]
    ExtendedL2,
    /// Unknown incompatible features.
    #[error("it needs features that are unknown here (incompatible bits {0:#x})")]
    UnknownFeatures(u64),
    /// A field of the header is invalid.
    #[error("it is damaged: the {0} in its header cannot be right")]
    Header(&'static str),
    /// A disk larger than allowed.
    #[error("its disk has {size} bytes; at most {limit} are allowed")]
    Size {
        /// Bytes of the disk.
        size: u64,
        /// The bound.
        limit: u64,
    },
    /// The clusters are too small for so large a disk.
    #[error("its L1 table is larger than 8 MiB; convert it with larger clusters")]
    L1Size,
    /// The clusters are too small for so large a file.
    #[error("it has more than 2^28 clusters; convert it with larger clusters")]
    Clusters,
    /// A table or cluster is not at a cluster boundary.
    #[error("it is damaged: the {what} at {offset:#x} is not aligned to its clusters")]
    Unaligned {
        /// Table or cluster.
        what: &'static str,
        /// Its offset.
        offset: u64,
    },
    /// Two things overlap.
    #[error("it is damaged: at {offset:#x}, something else is where a {what} should be")]
    Overlap {
        /// Table or cluster.
        what: &'static str,
        /// The offset.
        offset: u64,
    },
    /// Something is beyond the end of the file.
    #[error("it is damaged or cut off: its {what} at {offset:#x} is past its end")]
    PastEnd {
        /// Table or cluster.
        what: &'static str,
        /// Its offset.
        offset: u64,
    },
    /// A version 3 feature in a version 2 file.
    #[error("it is damaged: a zero cluster in a file of version 2")]
    ZeroInVersion2,
    /// A compressed cluster that does not decompress to a cluster.
    #[error("it is damaged: the compressed cluster at {offset:#x} cannot be decompressed")]
    Compressed {
        /// Its offset.
        offset: u64,
    },
}
