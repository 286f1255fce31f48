//! A snapshot's directory: complete or absent.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::error::SnapshotError;

/// Names in the directory.
pub(super) const STATE: &str = "state";
pub(super) const MEMORY: &str = "memory";

/// The suffix of an incomplete directory's name.
const PARTIAL: &str = ".partial";

/// A directory that gets its name when its content is complete and synced to disk. Until then, or
/// when it is dropped, nothing has that name. (A process that is killed leaves a directory whose
/// name starts with a dot and ends in `.partial`.)
#[derive(Debug)]
pub(super) struct NewDirectory {
    wanted: PathBuf,
    partial: PathBuf,
    done: bool,
}

/// Removes what processes have left of a snapshot that was to be in `dir`: of all processes, or of
/// one by its PID.
pub(super) fn remove_partial(dir: &Path, process: Option<u32>) {
    let (Some(above), Some(name)) = (dir.parent(), dir.file_name()) else {
        return;
    };
    let process = process.map(|number| format!("{number}."));
    let begin = format!(
        ".{}.{}",
        name.to_string_lossy(),
        process.unwrap_or_default()
    );
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&begin)
            && name.ends_with(PARTIAL)
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(
                %error,
                path = %entry.path().display(),
                "failed to remove an incomplete snapshot"
            );
        }
    }
}

impl NewDirectory {
    pub(super) fn create(wanted: &Path) -> Result<Self, SnapshotError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let failed = |source| SnapshotError::Write {
            path: wanted.to_owned(),
            source,
        };
        let name = wanted.file_name().ok_or_else(|| {
            failed(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it has no name",
            ))
        })?;
        if wanted.symlink_metadata().is_ok() {
            return Err(SnapshotError::Exists {
                path: wanted.to_owned(),
            });
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.{number}{PARTIAL}", std::process::id()));
        let partial = wanted.with_file_name(hidden);
        // The content of a guest's memory is private.
        DirBuilder::new()
            .mode(0o700)
            .create(&partial)
            .map_err(failed)?;
        Ok(Self {
            wanted: wanted.to_owned(),
            partial,
            done: false,
        })
    }

    /// Creates a new file in it.
    pub(super) fn file(&self, name: &str) -> Result<File, SnapshotError> {
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.partial.join(name))
            .map_err(|source| self.failed(source))
    }

    /// Gives it its name. All files were synchronised before.
    pub(super) fn complete(mut self) -> Result<(), SnapshotError> {
        let parent = match self.wanted.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let result = self.rename(parent);
        self.done = result.is_ok();
        result.map_err(|source| self.failed(source))
    }

    fn rename(&self, parent: &Path) -> io::Result<()> {
        // A directory that cannot be read cannot be synchronised.
        let parent = File::open(parent)?;
        File::open(&self.partial)?.sync_all()?;
        // It replaces at most an empty directory that another process created meanwhile.
        fs::rename(&self.partial, &self.wanted)?;
        parent.sync_all().inspect_err(|_| {
            // Nothing has the name after an error.
            let _ = fs::rename(&self.wanted, &self.partial);
        })
    }

    pub(super) fn failed(&self, source: io::Error) -> SnapshotError {
        SnapshotError::Write {
            path: self.wanted.clone(),
            source,
        }
    }
}

/// Replaces the state file of a directory; the new one is complete when it gets its name, and
/// nothing else of it remains if this fails. Several threads and processes may do it at once: the
/// last one wins.
pub(super) fn replace_state(dir: &Path, bytes: &[u8]) -> Result<(), SnapshotError> {
    let write = || {
        let (mut file, partial) = partial_state(dir)?;
        let replaced = file.write_all(bytes).and_then(|()| {
            file.sync_all()?;
            fs::rename(&partial, dir.join(STATE))
        });
        if replaced.is_err() {
            let _ = fs::remove_file(&partial);
        }
        replaced?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|source| SnapshotError::Write {
        path: dir.to_owned(),
        source,
    })
}

/// Creates a file in `dir` that only the caller writes.
fn partial_state(dir: &Path) -> io::Result<(File, PathBuf)> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".{STATE}.{}.{number}{PARTIAL}", std::process::id()));
        let new = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        match new {
            // A process that was killed had the same PID, or one in another namespace has it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => return Ok((other?, path)),
        }
    }
}

impl Drop for NewDirectory {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = fs::remove_dir_all(&self.partial)
        {
            let path = self.partial.display();
            tracing::warn!(%path, %error, "an incomplete snapshot could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn it_is_there_when_it_is_complete_and_not_before() {
        let parent = tempfile::tempdir().unwrap();
        let wanted = parent.path().join("warm");
        let new = NewDirectory::create(&wanted).unwrap();
        new.file(STATE).unwrap().write_all(b"x").unwrap();
        assert!(!wanted.exists());
        new.complete().unwrap();
        assert_eq!(fs::read(wanted.join(STATE)).unwrap(), b"x");
        assert_eq!(names(parent.path()), ["warm"]);
        let error = NewDirectory::create(&wanted).unwrap_err();
        assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
    }

    #[test]
    fn nothing_is_left_of_one_that_was_given_up() {
        let parent = tempfile::tempdir().unwrap();
        let new = NewDirectory::create(&parent.path().join("warm")).unwrap();
        new.file(MEMORY).unwrap();
        drop(new);
        assert!(names(parent.path()).is_empty());
    }

    #[test]
    fn nothing_is_left_where_the_directory_above_may_be_written_and_not_read() {
        use rustix::process::{Gid, Uid};
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: u32 = 65534;
        let parent = tempfile::tempdir().unwrap();
        fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o300)).unwrap();
        let wanted = parent.path().join("warm");
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            std::os::unix::fs::chown(parent.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        // IDs are per thread, and root may read everything.
        let complete = move || {
            if is_root {
                let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
                rustix::thread::set_thread_res_gid(group, group, group).unwrap();
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            }
            let completed = NewDirectory::create(&wanted).unwrap().complete();
            (completed.is_err(), wanted.exists())
        };
        let complete = std::thread::spawn(complete).join().unwrap();
        fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(complete, (true, false));
        assert!(names(parent.path()).is_empty());
    }

    #[test]
    fn half_a_snapshot_goes_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let own = format!(".s.{}.0.partial", std::process::id());
        for name in [&own, ".s.1.0.partial", ".t.1.0.partial", ".s.lock", "s"] {
            fs::create_dir(parent.path().join(name)).unwrap();
            fs::write(parent.path().join(name).join(MEMORY), "").unwrap();
        }
        let dir = parent.path().join("s");
        remove_partial(&dir, Some(std::process::id()));
        let left = names(parent.path());
        assert_eq!(left, [".s.1.0.partial", ".s.lock", ".t.1.0.partial", "s"]);
        remove_partial(&dir, None);
        assert_eq!(names(parent.path()), [".s.lock", ".t.1.0.partial", "s"]);
    }

    #[test]
    fn states_that_are_replaced_at_once_are_each_whole() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for byte in 0..4u8 {
                let dir = dir.path();
                scope.spawn(move || {
                    for _ in 0..25 {
                        // Of different lengths, so that a mixture of two is noticed.
                        let bytes = vec![byte; 40_000 * (usize::from(byte) + 1)];
                        replace_state(dir, &bytes).unwrap();
                        let found = fs::read(dir.join(STATE)).unwrap();
                        let first = found[0];
                        assert_eq!(found.len(), 40_000 * (usize::from(first) + 1));
                        assert!(found.iter().all(|byte| *byte == first));
                    }
                });
            }
        });
        assert_eq!(names(dir.path()), [STATE]);
    }

    #[test]
    fn a_state_that_cannot_be_replaced_stays_alone() {
        let dir = tempfile::tempdir().unwrap();
        // A file cannot take the place of a directory.
        fs::create_dir(dir.path().join(STATE)).unwrap();
        let error = replace_state(dir.path(), b"x").unwrap_err();
        assert!(matches!(error, SnapshotError::Write { .. }), "{error}");
        assert_eq!(names(dir.path()), [STATE]);
    }

    #[test]
    fn one_that_somebody_else_made_meanwhile_stays() {
        let parent = tempfile::tempdir().unwrap();
        let wanted = parent.path().join("warm");
        let new = NewDirectory::create(&wanted).unwrap();
        fs::create_dir(&wanted).unwrap();
        fs::write(wanted.join("theirs"), b"x").unwrap();
        assert!(new.complete().is_err());
        assert_eq!(names(&wanted), ["theirs"]);
        assert_eq!(names(parent.path()), ["warm"]);
    }
}
