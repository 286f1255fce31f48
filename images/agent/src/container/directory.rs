//! Directories that containers need during their lifetime.

use std::io;
use std::path::{Path, PathBuf};

use super::{ContainerError, Result};

/// A directory that is removed when its value is dropped.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
}

impl Directory {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&path).map_err(|source| ContainerError::Io {
            action: "create a directory",
            source,
        })?;
        Ok(Self { path })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        remove_directory(&self.path);
    }
}

/// Removes a directory with its contents, if it exists.
pub(super) fn remove_directory(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(?path, %error, "cannot remove a directory");
        }
        _ => {}
    }
}
