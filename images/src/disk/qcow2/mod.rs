//! qcow2 to raw as the file comes, front to back (QEMU's docs/interop/qcow2.txt).
//!
//! The tables that say where a cluster belongs may stand anywhere in the file. While a table is not
//! known yet, what comes is kept at the end of the output file itself, behind the disk, at its own
//! offset in the qcow2 file; as soon as the table is known, clusters move from there to their place
//! and their space is given back, and those still to come are planned for and go straight to their
//! place. So no other file is needed, and hardly more space than the disk itself: what `qemu-img
//! convert` writes has each table in front of its clusters, and nothing but tables is ever kept.
//!
//! Read are versions 2 and 3: cluster sizes from 512 bytes to 2 MiB, deflate and zstd, zero
//! clusters. Refcounts are not read, so that they may be wrong (the dirty bit, lazy refcounts);
//! neither are internal snapshots and bitmaps. Refused is whatever would need another file or a
//! key, and what no sound file has: the variants of [`Qcow2Error`].

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

/// Why a qcow2 file cannot be a disk image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    /// Version 1, or one of the future.
    #[error("it is of version {0}; versions 2 and 3 are supported (`qemu-img convert -O qcow2`)")]
    Version(u32),
    /// An overlay over another file.
    #[error(
        "it needs a backing file, and no other file is ever opened for an image; `qemu-img convert -O qcow2` makes one that stands alone"
    )]
    BackingFile,
    /// The data is elsewhere.
    #[error(
        "its data is in an external file, and no other file is ever opened for an image; `qemu-img convert -O qcow2` makes one that stands alone"
    )]
    ExternalData,
    /// AES or LUKS.
    #[error("it is encrypted; decrypt it by `qemu-img convert`")]
    Encrypted,
    /// QEMU found damage.
    #[error("it is marked as corrupt; repair it by `qemu-img check -r all`")]
    MarkedCorrupt,
    /// Subclusters.
    #[error(
        "it has extended L2 entries, which are not supported; `qemu-img convert -O qcow2 -o extended_l2=off` makes one without"
    )]
    ExtendedL2,
    /// Incompatible features of which nothing is known.
    #[error("it needs features that are unknown here (incompatible bits {0:#x})")]
    UnknownFeatures(u64),
    /// A field of the header makes no sense.
    #[error("it is damaged: the {0} in its header cannot be right")]
    Header(&'static str),
    /// A disk beyond what is allowed.
    #[error("its disk has {size} bytes; at most {limit} are allowed")]
    Size {
        /// Bytes of the disk.
        size: u64,
        /// The bound.
        limit: u64,
    },
    /// Too small clusters for so large a disk.
    #[error("its L1 table is larger than 8 MiB; convert it with larger clusters")]
    L1Size,
    /// Small clusters in a giant file.
    #[error("it has more than 2^28 clusters; convert it with larger clusters")]
    Clusters,
    /// A table or cluster is not where a cluster can begin.
    #[error("it is damaged: the {what} at {offset:#x} is not aligned to its clusters")]
    Unaligned {
        /// Table or cluster.
        what: &'static str,
        /// Where it would be.
        offset: u64,
    },
    /// Two things in one place.
    #[error("it is damaged: at {offset:#x}, something else is where a {what} should be")]
    Overlap {
        /// Table or cluster.
        what: &'static str,
        /// Where.
        offset: u64,
    },
    /// Something beyond the end.
    #[error("it is damaged or cut off: its {what} at {offset:#x} is past its end")]
    PastEnd {
        /// Table or cluster.
        what: &'static str,
        /// Where it should be.
        offset: u64,
    },
    /// A version 3 feature in a version 2 file.
    #[error("it is damaged: a zero cluster in a file of version 2")]
    ZeroInVersion2,
    /// A compressed cluster that does not decompress to a cluster.
    #[error("it is damaged: the compressed cluster at {offset:#x} cannot be decompressed")]
    Compressed {
        /// Where it is.
        offset: u64,
    },
}
