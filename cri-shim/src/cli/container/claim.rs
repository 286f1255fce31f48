//! The lock for changes to a container's directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tokio::sync::oneshot;

use crate::stall_timeout::timeout;

/// Held while a container is created or removed: other processes leave a locked directory alone.
#[derive(Debug)]
pub(in crate::cli) struct Claim {
    _locked: File,
}

impl Claim {
    /// Locks the directory once it is unlocked. If the previous holder has removed it, this returns
    /// `NotFound`.
    pub(super) fn take(dir: &Path) -> io::Result<Self> {
        let file = File::open(dir)?;
        flock(&file, FlockOperation::LockExclusive)?;
        dir.symlink_metadata()?;
        Ok(Self { _locked: file })
    }

    /// Like [`Self::take`], without blocking other tasks; `None` if another process still has it
    /// after `limit`.
    pub(in crate::cli) async fn take_within(
        dir: &Path,
        limit: Duration,
    ) -> io::Result<Option<Self>> {
        let (sender, taken) = oneshot::channel();
        let dir = dir.to_owned();
        // A thread that is not waited for; at exit, this process would have to wait for the
        // runtime's threads.
        let thread = thread::Builder::new().name("claim".to_owned());
        thread.spawn(move || drop(sender.send(Self::take(&dir))))?;
        match timeout(limit, taken).await {
            Ok(taken) => taken.map_err(io::Error::other)?.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Returns the PID of the holder, if the kernel shows it.
    pub(super) fn holder(dir: &Path) -> Option<u32> {
        let meta = fs::metadata(dir).ok()?;
        let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        let file = format!("{major:02x}:{minor:02x}:{}", meta.ino());
        // proc_locks(5): number, kind, mode, type, PID, file.
        let locks = fs::read_to_string("/proc/locks").ok()?;
        locks.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [_, "FLOCK", _, _, pid, of, ..] if of == file => pid.parse().ok(),
                _ => None,
            }
        })
    }

    /// Waits until the directory is unlocked.
    pub(in crate::cli) async fn released(dir: &Path) -> io::Result<()> {
        let dir = dir.to_owned();
        let wait = move || -> io::Result<()> {
            let file = match File::open(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                file => file?,
            };
            Ok(flock(&file, FlockOperation::LockShared)?)
        };
        let waited = tokio::task::spawn_blocking(wait).await;
        waited.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Returns whether the directory is locked. Several processes may check at the same time.
    pub(in crate::cli) fn is_taken(dir: &Path) -> bool {
        let Ok(file) = File::open(dir) else {
            return false;
        };
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::container::Containers;
    use crate::cli::container::record::sample;

    #[test]
    fn a_directory_is_claimed_by_one_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (entry, claim) = containers.create(sample("a", "one")).unwrap();
        assert!(Claim::is_taken(&entry.dir));
        drop(claim);
        assert!(!Claim::is_taken(&entry.dir));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_somebody_keeps_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let claim = Claim::take(dir.path()).unwrap();
        let limit = Duration::from_secs(60);
        let taken = Claim::take_within(dir.path(), limit).await.unwrap();
        assert!(taken.is_none());
        drop(claim);
    }
}
