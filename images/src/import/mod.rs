//! Root file systems that are no images yet: a folder, or a tar of one.
//!
//! A folder becomes a tar ([`folder`]), the same bytes as long as the folder is the same, and from there on goes the way of
//! every layer. Names are read relative to the folder and no symbolic link in it is followed, so nothing outside of it is
//! read, whoever changes it meanwhile. A tar is only looked through ([`survey()`]): what is in it is checked when it is unpacked.

mod entry;
mod error;
pub(crate) mod folder;
mod survey;
mod walk;

pub use error::ImportError;
pub(crate) use survey::{Survey, survey};

use std::fs::File;
use std::path::PathBuf;

/// Where a root file system comes from.
#[derive(Debug)]
#[non_exhaustive]
pub enum ImportSource {
    /// The content of a folder.
    Folder(PathBuf),
    /// A tar, also compressed; the file may be a pipe.
    Tar(File),
}

#[cfg(test)]
mod tests;
