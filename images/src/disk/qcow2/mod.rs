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
//! anything that no valid file contains: the variants of
//! [`Qcow2Error`](super::Qcow2Error).

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
