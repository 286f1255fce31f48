//! Conversion of qcow2 to raw as the file arrives, front to back (QEMU's docs/interop/qcow2.txt).
//!
//! The tables that map clusters may be anywhere in the file. Until a table is known, clusters are
//! kept at the end of the output file itself, after the disk, at their own offset in the qcow2
//! file; as soon as the table is known, they are moved from there to their place and their space is
//! freed, and those still to come are planned for and are written directly to their place. So no
//! other file is needed, and hardly more space than the disk itself: in files of `qemu-img convert`
//! each table precedes its clusters, and only tables are ever kept.
//!
//! Supported are versions 2 and 3: cluster sizes from 512 bytes to 2 MiB, deflate and zstd, zero
//! clusters. Refcounts are not read, so they may be wrong (the dirty bit, lazy refcounts); neither
//! are internal snapshots and bitmaps. Refused are files that need another file or a key, and
//! anything that no valid file contains: the variants of [`Qcow2Error`].

#[cfg(test)]
mod build;
mod claims;
mod clusters;
mod convert;
mod header;
mod plan;
#[cfg(test)]
pub(super) mod tests;

pub(super) use convert::convert;
pub(super) use header::MAGIC;

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
