//! Files as memory, and the checks that they must pass.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The alignment of a region's start and end: the smallest unit that Linux has page descriptions
/// for (a sub-section), and the size of a huge page.
pub const PMEM_ALIGNMENT: u64 = 2 << 20;

/// Why a file cannot be used as memory.
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
    /// The status of the descriptor could not be read.
    #[error("failed to stat a memory image")]
    Look(#[source] io::Error),
    /// A directory, a device, a socket…
    #[error("a memory image must be a regular file")]
    NotAFile,
    /// The file is empty, or larger than an address space.
    #[error("a memory image of {len} bytes cannot be mapped")]
    Length {
        /// Its length in bytes.
        len: u64,
    },
    /// The descriptor permits writing.
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

/// Checks that `file` can be memory; returns its length.
pub(super) fn check(file: &File) -> Result<u64, PmemError> {
    let meta = file.metadata().map_err(PmemError::Look)?;
    if !meta.is_file() {
        return Err(PmemError::NotAFile);
    }
    // A mapping of a writable descriptor could be made writable later.
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| PmemError::Look(error.into()))?;
    if flags & OFlags::RWMODE != OFlags::RDONLY {
        return Err(PmemError::Writable);
    }
    let len = meta.len();
    // Much less than the end of any guest's address space.
    if len == 0 || len > 1 << 46 {
        return Err(PmemError::Length { len });
    }
    Ok(len)
}
