//! What can go wrong with streams.

use std::io;

use crate::agent::LinkError;

/// An error of serving the streams.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StdioError {
    /// The connection to the guest failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The host has no random bytes.
    #[error("cannot get random bytes from the kernel")]
    Random(#[source] io::Error),
    /// A connection or thread cannot be set up.
    #[error("cannot set up the program's {name}")]
    SetUp {
        /// The name of the stream.
        name: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The user's file did not accept the program's output.
    #[error("cannot write the program's output to {name}")]
    Output {
        /// The name of the stream.
        name: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}
