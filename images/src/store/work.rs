//! Unfinished files: locked while someone works on them, removed unless published.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// A file in the store's directory for temporary files. Its name says what it will become, so a
/// process that creates the same thing at the same time waits for the lock, and then finds it
/// finished.
#[derive(Debug)]
pub(super) struct WorkFile {
    file: File,
    path: PathBuf,
    published: bool,
}

impl WorkFile {
    /// Takes the file without waiting; `None` while another process has it.
    pub(super) fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        Self::lock(path, FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes the file; waits while another process has it.
    pub(super) fn acquire(path: &Path) -> io::Result<Self> {
        loop {
            if let Some(work) = Self::lock(path, FlockOperation::LockExclusive)? {
                return Ok(work);
            }
        }
    }

    fn lock(path: &Path, how: FlockOperation) -> io::Result<Option<Self>> {
        loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)?;
            match flock(&file, how) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            // Its last owner may have published or removed what was waited for.
            if is_at(&file, path)? {
                file.set_len(0)?;
                return Ok(Some(Self {
                    file,
                    path: path.to_owned(),
                    published: false,
                }));
            }
        }
    }

    /// Returns a second handle.
    pub(super) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns the current path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the file to the disk and gives it its final name.
    pub(super) fn publish(mut self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, target)?;
        self.published = true;
        sync_directory_of(target)
    }
}

impl Drop for WorkFile {
    fn drop(&mut self) {
        if !self.published {
            // The lock is still held, so this cannot remove another process's file. If it fails,
            // the next open removes the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes what dead processes left in the directory. What cannot be removed is in nobody's way,
/// but for the one who wants that very file.
pub(super) fn clear(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        // Acquiring and dropping it removes it; a file whose owner still runs is kept.
        if let Err(error) = WorkFile::try_acquire(&path) {
            tracing::warn!(path = %path.display(), %error, "a leftover cannot be removed");
        }
    }
    Ok(())
}

/// Returns whether a file's contents are gone: it is missing, its disk does not read it, or the
/// file system finds it corrupt. Another attempt would fail, too.
pub(super) fn is_lost(error: &io::Error) -> bool {
    let corrupt = [Errno::IO, Errno::UCLEAN, Errno::BADMSG].map(Errno::raw_os_error);
    error.kind() == io::ErrorKind::NotFound
        || error
            .raw_os_error()
            .is_some_and(|code| corrupt.contains(&code))
}

/// Syncs the names in a file's directory to the disk.
pub(super) fn sync_directory_of(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

/// Returns whether the file has that name.
pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn an_unpublished_file_is_gone_and_a_published_one_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("work"), dir.path().join("done"));
        drop(WorkFile::acquire(&path).unwrap());
        assert!(!path.exists());
        let work = WorkFile::acquire(&path).unwrap();
        assert!(WorkFile::try_acquire(&path).unwrap().is_none());
        work.handle().unwrap().write_all(b"data").unwrap();
        work.publish(&target).unwrap();
        assert!(!path.exists());
        assert_eq!(fs::read(&target).unwrap(), b"data");
    }

    #[test]
    fn whoever_waited_gets_a_fresh_file_and_spares_the_published_one() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("work"), dir.path().join("done"));
        let work = WorkFile::acquire(&path).unwrap();
        work.handle().unwrap().write_all(b"data").unwrap();
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || WorkFile::acquire(&path).unwrap()
        });
        work.publish(&target).unwrap();
        let second = waiting.join().unwrap();
        assert_eq!(second.handle().unwrap().metadata().unwrap().len(), 0);
        assert_eq!(fs::read(&target).unwrap(), b"data");
    }

    #[test]
    fn only_files_without_an_owner_are_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let kept = WorkFile::acquire(&dir.path().join("kept")).unwrap();
        fs::write(dir.path().join("left"), "x").unwrap();
        // These cannot be opened for writing.
        let [directory, link] = ["directory", "link"].map(|name| dir.path().join(name));
        fs::create_dir(&directory).unwrap();
        std::os::unix::fs::symlink(&link, &link).unwrap();
        fs::write(dir.path().join("left too"), "x").unwrap();
        clear(dir.path()).unwrap();
        assert!(kept.path().exists());
        assert!(!dir.path().join("left").exists());
        assert!(!dir.path().join("left too").exists());
    }
}
