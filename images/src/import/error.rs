//! Errors of imports of root file systems.

use std::io;
use std::path::PathBuf;

/// What is wrong with a root file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A file of it is missing or cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It changed while it was read.
    #[error("{} changed while it was read; stop what writes to it and import it again", .path.display())]
    Changed {
        /// The file or directory.
        path: PathBuf,
    },
    /// A file that cannot be in an image.
    #[error("{} {what}", .path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// It is too large.
    #[error("the root file system has more than {limit} {what}; raise the limit if you trust it")]
    Limit {
        /// What the limit applies to.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// It is not a root file system but an archive of images.
    #[error("this is an archive of images and no root file system; `podvisor load` takes it")]
    Images,
    /// There are no files.
    #[error("there are no files in it, so there is nothing to import")]
    Empty,
    /// The tar could not be written to the store.
    #[error("cannot write the layer")]
    Write(#[source] io::Error),
}
