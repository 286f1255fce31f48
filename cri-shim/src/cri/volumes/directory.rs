//! The directories of sandboxes, in which volumes are mounted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use tracing::warn;

use crate::bind;
use crate::cri::error::{CriError, Result};
use crate::removal::remove_tree;

/// Makes the directory of sandboxes a private mount, so that pods' volumes appear in no other mount
/// namespace.
pub(in crate::cri) fn make_private(dir: &Path) -> Result<()> {
    let failed = || CriError::io("make a private mount of", dir);
    let dir = fs::canonicalize(dir).map_err(failed())?;
    if !mount_points(&dir)?.contains(&dir) {
        mount_bind(&dir, &dir).map_err(|error| failed()(error.into()))?;
    }
    let private = MountPropagationFlags::PRIVATE;
    mount_change(&dir, private).map_err(|error| failed()(error.into()))
}

/// Removes a sandbox's directory with all that is mounted below it, on a blocking thread.
pub(in crate::cri) async fn remove_dir(dir: &Path) -> Result<()> {
    let own = dir.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove_dir_now(&own)).await;
    let failed = CriError::io("remove the directory", dir);
    removed.unwrap_or_else(|error| Err(failed(io::Error::other(error))))
}

pub(super) fn remove_dir_now(dir: &Path) -> Result<()> {
    for point in mount_points(dir)?.iter().rev() {
        if let Err(error) = unmount(point, UnmountFlags::DETACH) {
            warn!(point = %point.display(), %error, "cannot unmount");
        }
    }
    // A remaining mount must not have its files removed with the directory.
    if let Some(left) = mount_points(dir)?.first() {
        let busy = io::Error::from(io::ErrorKind::ResourceBusy);
        return Err(CriError::io("unmount", left)(busy));
    }
    match remove_tree(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CriError::io("remove the directory", dir)(error))
        }
        _ => Ok(()),
    }
}

pub(super) fn mount_points(dir: &Path) -> Result<Vec<PathBuf>> {
    bind::mount_points(dir).map_err(CriError::io("read", bind::MOUNTINFO))
}
