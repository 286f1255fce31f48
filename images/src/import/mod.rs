//! Import of root file systems that are not images yet: a directory, or a tar of one.
//!
//! A directory becomes a tar ([`directory`]), always of the same bytes if the directory is the
//! same, and is then processed like any other layer. Names are read relative to the directory and
//! no symbolic link in it is followed, so nothing outside of it is read, even if another process
//! changes it meanwhile. A tar is only scanned ([`survey()`]): its content is checked when it is
//! unpacked.

pub(crate) mod directory;
mod entry;
mod error;
mod survey;
mod walk;

pub use error::ImportError;
pub(crate) use survey::{TarSummary, survey};

use std::fs::File;
use std::path::PathBuf;

/// Where a root file system comes from.
#[derive(Debug)]
#[non_exhaustive]
pub enum ImportSource {
    /// The content of a directory.
    Directory(PathBuf),
    /// A tar, also compressed; the file may be a pipe.
    Tar(File),
}

#[cfg(test)]
mod tests;
