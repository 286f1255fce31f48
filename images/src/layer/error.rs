//! Errors of a layer's tar.

use std::io;

/// Maximum bytes of all extended headers of one entry together.
pub(super) const MAX_EXTENDED_HEADERS: u64 = 1 << 20;

/// Why a tar stream cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TarError {
    /// The stream could not be read or decompressed.
    #[error("cannot read or decompress the layer")]
    Read(#[from] io::Error),
    /// The stream ends within an entry.
    #[error("the layer's tar ends in the middle of an entry")]
    Truncated,
    /// A header breaks the format.
    #[error("the layer's tar has a broken header ({0})")]
    Header(&'static str),
    /// Extended headers that are too long, or too many of them.
    #[error(
        "the layer's tar has more than {MAX_EXTENDED_HEADERS} bytes of extended headers for one \
         entry"
    )]
    ExtendedTooLong,
}

impl PartialEq for TarError {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Header(a), Self::Header(b)) => a == b,
            (Self::Read(_), Self::Read(_)) => true,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}
