//! For tests: a small disk, which is soon full.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

/// More bytes than it has room for.
const SIZE: usize = 7 << 20;

/// A file system of a few MiB; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts one: this needs root.
    ///
    /// # Panics
    /// It cannot be mounted.
    #[expect(
        clippy::new_without_default,
        reason = "it mounts something, and may panic"
    )]
    #[must_use]
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let flags = MountFlags::empty();
        mount("tmpfs", dir.path(), "tmpfs", flags, c"size=6m").unwrap();
        Self(dir)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// Fills it, so that nothing more can be written.
    ///
    /// # Panics
    /// It does not become full.
    pub fn fill(&self) {
        let full = fs::write(self.filler(), vec![0; SIZE]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    /// Undoes [`Self::fill`].
    ///
    /// # Panics
    /// It was not filled.
    pub fn clear(&self) {
        // A child that another thread has just forked has the file open until it executes its
        // program: removal alone would free nothing before that.
        fs::File::create(self.filler()).unwrap();
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}
