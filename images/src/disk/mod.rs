//! Disk images: from a file of a server or a layer to a sparse raw file.
//!
//! The input is a stream of bytes, front to back: raw or qcow2, as it is or compressed, detected by
//! its first bytes. It is hashed, decompressed and converted as it arrives ([`convert()`]); blocks
//! of zeros become holes. [`Source`] and [`Checksum`] come from the user: a URL, and the digest of
//! the file as it is served. `fetch` transfers it, and `raw` copies a raw disk to another file or
//! to a block device. Nothing in a file makes this module open another file.

mod checksum;
mod convert;
mod convert_error;
mod error;
mod fetch;
mod job;
mod qcow2;
mod raw;
mod source;
mod sparse;
mod stored;

pub use checksum::{Checksum, ChecksumError};
pub(crate) use convert::{Converted, Failure, convert};
pub use convert::{DiskFormat, convert_disk};
pub use convert_error::{ConvertError, Qcow2Error};
pub use error::DiskError;
pub(crate) use fetch::{FetchError, Fetched, Fetcher, Validators};
pub(crate) use job::Job;
pub use raw::{copy_disk, disk_len, visit_data, zero_disk};
pub(crate) use source::Source;
pub use stored::Disk;
