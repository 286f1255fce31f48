//! The private folder of one sandbox: its sockets live there, and it goes when the sandbox
//! goes. The folder is locked while its process lives, so that what a killed process left
//! behind is told apart from what is in use, and swept when the next sandbox starts.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tracing::{debug, warn};

/// Longest path of a Unix socket, less its final NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Room for the longest name of a socket in the folder.
const SOCKET_NAME_MAX: usize = "/vsock_4294967295".len();

/// Why there is no private folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunDirError {
    /// The folder that holds all run folders cannot be used.
    #[error("cannot use {} for sockets", .path.display())]
    Base {
        /// The directory.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Somebody else could read or replace what is in it.
    #[error("{} belongs to somebody else", .0.display())]
    Foreign(PathBuf),
    /// Sockets' paths are limited to 107 bytes.
    #[error("{} is too long a path for sockets", .0.display())]
    TooLong(PathBuf),
    /// The folder itself cannot be made.
    #[error("failed to create the directory {}", .path.display())]
    Create {
        /// The directory.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

/// A locked folder of mode 0700, removed when dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Its lock says that this folder is in use.
    _lock: File,
}

impl RunDir {
    /// Makes the folder `name` for this user, and removes those that nobody uses any more.
    ///
    /// # Errors
    /// [`RunDirError`]; an existing directory of that name is one.
    pub fn create(name: &str) -> Result<Self, RunDirError> {
        Self::create_in(&base(), name)
    }

    fn create_in(base: &Path, name: &str) -> Result<Self, RunDirError> {
        let path = base.join(name);
        if path.as_os_str().len() + SOCKET_NAME_MAX > SOCKET_PATH_MAX {
            return Err(RunDirError::TooLong(path));
        }
        let in_base = |source| RunDirError::Base {
            path: base.to_owned(),
            source,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(base)
            .map_err(in_base)?;
        let metadata = fs::symlink_metadata(base).map_err(in_base)?;
        if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(RunDirError::Foreign(base.to_owned()));
        }
        if metadata.mode() & 0o077 != 0 {
            fs::set_permissions(base, Permissions::from_mode(0o700)).map_err(in_base)?;
        }
        // Held while sweeping and until the new folder has its own lock, so that nobody
        // sweeps a folder between its making and its locking.
        let base_lock = File::open(base).map_err(in_base)?;
        flock(&base_lock, FlockOperation::LockExclusive).map_err(|e| in_base(e.into()))?;
        sweep(base);

        let in_create = |source| RunDirError::Create {
            path: path.clone(),
            source,
        };
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(in_create)?;
        let lock = File::open(&path).map_err(in_create)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| in_create(e.into()))?;
        Ok(Self { path, _lock: lock })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            warn!(path = %self.path.display(), %error, "cannot remove the run folder");
        }
    }
}

/// `/run/podvisor` for root; for others a folder that only they can write.
fn base() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/run/podvisor");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => Path::new(&dir).join("podvisor"),
        None => {
            std::env::temp_dir().join(format!("podvisor-{}", rustix::process::geteuid().as_raw()))
        }
    }
}

/// Removes the folders in `base` that no process holds a lock on. What cannot be removed
/// is left for the next time: it harms nobody.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        let Ok(folder) = File::open(&path) else {
            continue;
        };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        match fs::remove_dir_all(&path) {
            Ok(()) => debug!(path = %path.display(), "removed a run folder that was left behind"),
            Err(error) => debug!(path = %path.display(), %error, "cannot remove a run folder"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_private_and_goes_when_dropped() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().join("podvisor");
        let run = RunDir::create_in(&base, "a").unwrap();
        fs::write(run.path().join("vsock"), b"").unwrap();
        let mode = fs::metadata(base.join("a")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop(run);
        assert!(!base.join("a").exists());
        assert!(base.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_swept_and_what_is_in_use_stays() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().join("podvisor");
        let used = RunDir::create_in(&base, "used").unwrap();
        fs::create_dir(base.join("stale")).unwrap();
        fs::write(base.join("stale/vsock"), b"").unwrap();
        let next = RunDir::create_in(&base, "next").unwrap();
        assert!(!base.join("stale").exists());
        assert!(base.join("used").exists());
        drop((used, next));
    }

    #[test]
    fn two_of_one_name_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let _run = RunDir::create_in(base.path(), "a").unwrap();
        let refused = RunDir::create_in(base.path(), "a");
        assert!(matches!(refused, Err(RunDirError::Create { .. })));
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused_before_anything_is_made() {
        let base = tempfile::tempdir().unwrap();
        let long = base.path().join("x".repeat(100));
        let refused = RunDir::create_in(&long, "a");
        assert!(matches!(refused, Err(RunDirError::TooLong(_))));
        assert!(!long.exists());
    }

    #[test]
    fn a_link_in_place_of_the_base_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let refused = RunDir::create_in(&link, "a");
        assert!(matches!(refused, Err(RunDirError::Foreign(_))));
    }
}
