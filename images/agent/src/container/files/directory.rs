//! Directories that containers need during their lifetime.

use std::io;
use std::path::{Path, PathBuf};

/// A directory that is removed when its value is dropped.
#[derive(Debug)]
pub(in crate::container) struct Directory {
    pub(in crate::container) path: PathBuf,
}

impl Directory {
    pub(in crate::container) fn create(path: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&path)?;
        Ok(Self { path })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        remove_directory(&self.path);
    }
}

/// Removes a directory with its contents, if it exists.
pub(in crate::container) fn remove_directory(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(?path, %error, "cannot remove a directory");
        }
        _ => {}
    }
}
