//! Files as memory: what may be one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// What a region starts and ends at: the least that Linux has descriptions of pages for (a
/// sub-section), and a huge page.
pub const PMEM_ALIGNMENT: u64 = 2 << 20;

/// Why a file cannot be memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PmemError {
    /// It could not be opened.
    #[error("failed to open the memory image {}", path.display())]
    Open {
        /// Its path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Nothing can be told of the descriptor.
    #[error("failed to stat a memory image")]
    Look(#[source] io::Error),
    /// A directory, a device, a socket…
    #[error("a memory image must be a regular file")]
    NotAFile,
    /// No bytes, or more than an address space has.
    #[error("a memory image of {len} bytes cannot be mapped")]
    Length {
        /// How many.
        len: u64,
    },
    /// A descriptor by which the file could be written.
    #[error("a memory image must be opened read-only")]
    Writable,
}

/// Opens `path` for reading, without waiting for the writer of a FIFO.
pub(super) fn open(path: &Path) -> Result<File, PmemError> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|source| PmemError::Open {
            path: path.into(),
            source,
        })
}

/// Checks that `file` may be memory; gives its length.
pub(super) fn check(file: &File) -> Result<u64, PmemError> {
    let meta = file.metadata().map_err(PmemError::Look)?;
    if !meta.is_file() {
        return Err(PmemError::NotAFile);
    }
    // A mapping of such a descriptor could be made writable later on.
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| PmemError::Look(error.into()))?;
    if flags & OFlags::RWMODE != OFlags::RDONLY {
        return Err(PmemError::Writable);
    }
    let len = meta.len();
    // Far from the end of any guest's address space.
    if len == 0 || len > 1 << 46 {
        return Err(PmemError::Length { len });
    }
    Ok(len)
}
