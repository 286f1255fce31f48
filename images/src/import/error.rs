//! Why a root file system cannot be imported.

use std::io;
use std::path::PathBuf;

/// What is wrong with a root file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A file of it is not there, or may not be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody is writing to it.
    #[error("{} changed while it was read; stop what writes to it and import it again", .path.display())]
    Changed {
        /// The file or directory.
        path: PathBuf,
    },
    /// A file that no image can hold.
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
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// It is no root file system but something made of some.
    #[error("this is an archive of images and no root file system; `podvisor load` takes it")]
    Images,
    /// There are no files.
    #[error("there are no files in it, so there is nothing to import")]
    Empty,
    /// The tar could not be written to the store.
    #[error("cannot write the layer")]
    Write(#[source] io::Error),
}
