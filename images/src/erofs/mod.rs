//! Writes EROFS file systems (Linux, `fs/erofs/erofs_fs.h`): uncompressed, 4 KiB blocks, one file.
//!
//! File data is written first, as a stream ([`Writer::add_file`]), directly to its place; the tree
//! that names it comes last ([`Writer::finish`]). Nothing is mounted, no root privileges are
//! needed, and no name of the tree is used on the host. The same calls always give the same bytes.
//!
//! The file's layout: block 0 with the superblock; file data; directory data; the inodes with their
//! extended attributes and the tails of short files. Inodes come last because only then are all of
//! them known.

mod dir;
mod inode;
mod layout;
mod lookup;
mod output;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) mod reader;
mod space;
mod writer;

pub(crate) use inode::storable_xattr;
pub(crate) use lookup::{FileSystem, Inode, whole};
pub use writer::WriteError;
pub(crate) use writer::Writer;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
