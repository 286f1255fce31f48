//! A process's standard streams, connected between the guest and files that are passed in.
//!
//! Each stream is one vsock connection that starts with the id given in the request for the
//! process. Bytes are moved by a thread per direction: the files may be of any kind, and regular
//! files do not support polling.

mod ends;
mod error;
mod files;
mod outputs;
mod stream_set;
mod streams;

pub use ends::AttachedStreams;
pub(crate) use ends::{GuestInput, GuestStreams};
pub use error::StdioError;
pub(crate) use files::spawn;
pub use files::{read, write_all};
pub use outputs::{BrokenOutput, Outputs};
pub use stream_set::StreamSet;
pub use streams::Streams;
pub(crate) use streams::{open, stream_id};

#[cfg(test)]
mod tests;
