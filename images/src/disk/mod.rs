//! Disk images: from whatever a server or a layer has to a sparse raw file.
//!
//! What comes in is a stream of bytes, front to back: raw or qcow2, as it is or compressed, told by
//! its first bytes. It is hashed, decompressed and converted while it comes ([`convert()`]); blocks
//! of zeros become holes. [`Source`] and [`Checksum`] are what a person gives: an address, and the
//! digest of the file as it is served. `fetch` brings it. Nothing that a file says makes this room
//! open another file.

mod checksum;
mod convert;
mod error;
mod fetch;
mod job;
mod qcow2;
mod source;
mod sparse;
mod stored;

pub use checksum::{Checksum, ChecksumError};
pub use convert::DiskFormat;
pub(crate) use convert::{Converted, Failure, convert};
pub use error::DiskError;
pub(crate) use fetch::{FetchError, Fetched, Fetcher, Validators};
pub use job::ConvertError;
pub(crate) use job::Job;
pub use qcow2::Qcow2Error;
pub(crate) use source::Source;
pub use stored::Disk;
