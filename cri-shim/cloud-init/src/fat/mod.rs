//! FAT volumes that are written once, and read by guests.
//!
//! A [`Volume`] is a label and a few files; [`Volume::write`] lays them out without gaps. FAT12 is
//! used as long as it has enough clusters, else FAT16. The same files give the same bytes.

mod layout;
mod names;
#[cfg(any(test, feature = "test-utils"))]
pub mod read;

use std::collections::BTreeMap;
use std::io::{self, Write};

use layout::{Layout, Node, Tree};

/// Bytes of a sector.
const SECTOR: usize = 512;
/// Most bytes of all files: many times what secrets and user-data come to.
pub const MAX_CONTENT: u64 = 512 << 20;
/// Most files and directories.
pub const MAX_FILES: usize = 4096;

/// Why a volume cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FatError {
    /// The label is not one that each system reads.
    #[error("invalid volume label {0:?}: it has 1 to 11 letters, digits, hyphens and underscores")]
    Label(String),
    /// A path that is not one on the volume.
    #[error("invalid path {0:?} on the configuration disk: {1}")]
    Path(String, &'static str),
    /// Two files of one name, or a file where a directory is needed; case does not count.
    #[error("two files {0:?} on the configuration disk")]
    Twice(String),
    /// More than fits.
    #[error("{found} {what} on the configuration disk: at most {most} fit")]
    TooLarge {
        /// How much there is.
        found: u64,
        /// Of what.
        what: &'static str,
        /// How much there may be.
        most: u64,
    },
    /// The volume could not be written to its file.
    #[error("failed to write the configuration disk")]
    Write(#[source] io::Error),
}

/// A volume in the making.
#[derive(Debug, Clone)]
pub struct Volume {
    label: String,
    files: BTreeMap<String, Vec<u8>>,
}

impl Volume {
    /// Begins a volume. The label is written as it is: Linux names `/dev/disk/by-label` after it.
    ///
    /// # Errors
    ///
    /// `label` is empty, longer than 11 bytes, or has other characters than letters, digits,
    /// hyphens and underscores.
    pub fn new(label: &str) -> Result<Self, FatError> {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if !(1..=11).contains(&label.len()) || !label.bytes().all(is_letter) {
            return Err(FatError::Label(label.to_owned()));
        }
        Ok(Self {
            label: label.to_owned(),
            files: BTreeMap::new(),
        })
    }

    /// Adds a file; `path` is relative to the root, with `/` between its parts.
    ///
    /// # Errors
    ///
    /// The path is not one, or is there already.
    pub fn add(&mut self, path: &str, content: Vec<u8>) -> Result<(), FatError> {
        for part in path.split('/') {
            if let Err(reason) = names::check(part) {
                return Err(FatError::Path(path.to_owned(), reason));
            }
        }
        match self.files.contains_key(path) {
            true => Err(FatError::Twice(path.to_owned())),
            false => {
                self.files.insert(path.to_owned(), content);
                Ok(())
            }
        }
    }

    /// Returns the files by their paths.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let files = self.files.iter();
        files.map(|(path, content)| (path.as_str(), content.as_slice()))
    }

    /// Writes the volume, and returns its size in bytes, which is a multiple of 512.
    ///
    /// # Errors
    ///
    /// There is more than fits, two names are the same but for case, or `to` cannot be written.
    pub fn write(&self, mut to: impl Write) -> Result<u64, FatError> {
        let content: u64 = self.files.values().map(|file| file.len() as u64).sum();
        bound(content, "bytes", MAX_CONTENT)?;
        let tree = self.tree()?;
        let layout = Layout::of(&tree)?;
        layout
            .write(&tree, &self.label, &mut to)
            .map_err(FatError::Write)
    }

    fn tree(&self) -> Result<Tree<'_>, FatError> {
        let mut tree = Tree::new();
        for (path, content) in &self.files {
            let mut directory = 0;
            let mut parts = path.split('/').peekable();
            while let Some(part) = parts.next() {
                let is_file = parts.peek().is_none();
                let found = tree.find(directory, part);
                directory = match (found, is_file) {
                    (None, true) => tree.add(directory, part, Node::File(content))?,
                    (None, false) => tree.add(directory, part, Node::Directory(Vec::new()))?,
                    (Some(found), false) if tree.is_directory(found) => found,
                    (Some(_), _) => return Err(FatError::Twice(path.clone())),
                };
            }
        }
        Ok(tree)
    }
}

fn bound(found: u64, what: &'static str, most: u64) -> Result<(), FatError> {
    match found > most {
        true => Err(FatError::TooLarge { found, what, most }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
