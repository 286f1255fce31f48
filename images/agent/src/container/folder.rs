//! Folders that containers need while they live.

use std::io;
use std::path::{Path, PathBuf};

use super::{ContainerError, Result};

/// A folder that goes when its value goes.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
}

impl Folder {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&path).map_err(|source| ContainerError::Io {
            action: "create a folder",
            source,
        })?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        remove_folder(&self.path);
    }
}

/// Removes a folder with all that is in it, if it is there.
pub(super) fn remove_folder(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(?path, %error, "cannot remove a folder");
        }
        _ => {}
    }
}
