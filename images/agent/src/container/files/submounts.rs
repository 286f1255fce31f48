//! The host's volumes in the guest: each is a separate mount in a shared directory, which the
//! kernel creates when a process accesses it. A process in another mount namespace gets another
//! mount, with separate inodes: sockets, FIFOs and locks in it would not be shared with the
//! programs of other containers. So they are mounted here, before a container's namespace is copied
//! from this one, and stay while a container uses them: the host can take back volumes that are not
//! mounted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// Volumes in use by containers. Clones share them.
#[derive(Debug, Clone, Default)]
pub(in crate::container) struct Submounts(Arc<Mutex<BTreeMap<PathBuf, usize>>>);

/// Volumes in use by one container, until the value is dropped.
#[derive(Debug, Default)]
pub(in crate::container) struct Held {
    submounts: Submounts,
    paths: Vec<PathBuf>,
}

impl Submounts {
    /// Mounts the volumes at `paths`. A failure is reported by the container's own mount.
    pub(in crate::container) async fn hold(&self, paths: Vec<PathBuf>) -> Held {
        let submounts = self.clone();
        // The host answers, which may take some time.
        let held = tokio::task::spawn_blocking(move || submounts.hold_now(paths));
        held.await.unwrap_or_default()
    }

    fn hold_now(&self, paths: Vec<PathBuf>) -> Held {
        for path in &paths {
            {
                let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                *users.entry(path.clone()).or_default() += 1;
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match openat(CWD, path, flags, Mode::empty()) {
                // Files are not mount points.
                Ok(_) | Err(Errno::NOTDIR) => {}
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "failed to open a mount point")
                }
            }
        }
        Held {
            submounts: self.clone(),
            paths,
        }
    }

    /// Removes one user of a volume; `unmount` is called if it was the last. A new user waits for
    /// the lock meanwhile, and so does not rely on a mount that is about to be removed.
    fn release(&self, path: &Path, unmount: impl FnOnce()) {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = users.get_mut(path) else {
            return;
        };
        *count = count.saturating_sub(1);
        if *count == 0 {
            users.remove(path);
            unmount();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for path in &self.paths {
            let unmount = || match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                // A file, or the host took it back before.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a volume stays mounted");
                }
            };
            self.submounts.release(path, unmount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_unused_when_its_last_container_has_released_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        std::fs::create_dir(&path).unwrap();
        let missing = directory.path().join("missing");
        let submounts = Submounts::default();
        let first = submounts.hold_now(vec![path.clone(), path.clone(), missing.clone()]);
        let second = submounts.hold_now(vec![path.clone()]);
        drop(first);
        assert_eq!(submounts.0.lock().unwrap().get(&path), Some(&1));
        submounts.release(&missing, || panic!("nobody has it"));
        drop(second);
        assert!(submounts.0.lock().unwrap().is_empty());
    }

    #[test]
    fn nobody_counts_a_volume_while_it_is_unmounted() {
        let submounts = Submounts::default();
        let _held = submounts.hold_now(vec!["/no/such/volume".into()]);
        let mut is_unmounted = false;
        submounts.release(Path::new("/no/such/volume"), || {
            assert!(submounts.0.try_lock().is_err());
            is_unmounted = true;
        });
        assert!(is_unmounted);
    }
}
