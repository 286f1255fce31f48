//! The files of a saved VM: its memory, and the state of its vCPUs and devices.
//!
//! Who writes them is the VM's jailed process, which may open none. The state counts when it has
//! its beginning, which is written last: a directory that somebody was killed over is there, and
//! means nothing.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::machine::Snapshot;
use crate::sandbox::{ContinueAs, SandboxError, SavedMachine};

const STATE: &str = "state";
const MEMORY: &str = "memory";

/// The directory of a VM that hibernates, in its own.
const HIBERNATED: &str = "hibernated";

/// The directory of a saved VM's files, which may not exist.
#[derive(Debug, Clone)]
pub(super) struct SavedFiles(PathBuf);

impl SavedFiles {
    pub(super) fn of(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// Returns those of the VM with this directory, for a VM that hibernates.
    pub(super) fn hibernated(entry_dir: &Path) -> Self {
        Self(entry_dir.join(HIBERNATED))
    }

    /// Whether there is a saved VM.
    pub(super) fn are_finished(&self) -> anyhow::Result<bool> {
        let path = self.0.join(STATE);
        let finished = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => Err(error),
            Ok(state) => Snapshot::is_finished(&state),
        };
        finished.with_context(|| format!("cannot read {}", path.display()))
    }

    /// Makes empty files, the state and the memory, in place of those that mean nothing.
    pub(super) fn create(&self) -> anyhow::Result<(File, File)> {
        let make = || -> io::Result<_> {
            remove(&self.0)?;
            DirBuilder::new().mode(0o700).create(&self.0)?;
            let file = |name| {
                let mut options = File::options();
                options.read(true).write(true).create_new(true).mode(0o600);
                options.open(self.0.join(name))
            };
            let files = (file(STATE)?, file(MEMORY)?);
            sync(&self.0)?;
            Ok(files)
        };
        make().with_context(|| format!("cannot make files in {}", self.0.display()))
    }

    /// Opens them, for a machine that continues from them.
    pub(super) fn open(&self, continues: ContinueAs) -> anyhow::Result<SavedMachine> {
        let open = |name: &str, is_writable| {
            let path = self.0.join(name);
            let mut options = File::options();
            // A FIFO would wait for a writer.
            options.custom_flags(libc::O_NONBLOCK);
            let file = options.read(true).write(is_writable).open(&path);
            file.with_context(|| format!("cannot open {}", path.display()))
        };
        Ok(SavedMachine {
            state: open(STATE, continues == ContinueAs::Same)?,
            memory: open(MEMORY, false)?,
            continues,
        })
    }

    /// Returns the bytes of the host's disk that they take.
    pub(super) fn stored(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        let names = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let blocks = names.filter_map(|entry| Some(entry.metadata().ok()?.blocks()));
        blocks.sum::<u64>() * 512
    }

    /// Removes them; it is not an error if there are none.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        let removed = remove(&self.0);
        removed.with_context(|| format!("cannot remove {}", self.0.display()))
    }
}

/// The state goes first, for good: whatever is left then means nothing.
fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(STATE)) {
        Ok(()) => sync(dir)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes the names in a directory durable, and its own.
pub(super) fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()?;
    match dir.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Says of a VM that was not saved what became of it: the reason may be its end.
pub(super) fn not_saved(error: anyhow::Error, name: &str, what: &str) -> anyhow::Error {
    let of_sandbox = error.downcast_ref::<SandboxError>();
    let has_ended = of_sandbox.is_some_and(SandboxError::is_gone);
    error.context(match has_ended {
        true => format!("VM {name} has ended, and {what}"),
        false => format!("VM {name} {what}, and goes on"),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn files_that_were_not_finished_are_made_anew_and_those_that_were_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let files = SavedFiles::hibernated(dir.path());
        assert!(!files.are_finished().unwrap());
        let (mut state, _) = files.create().unwrap();
        assert!(!files.are_finished().unwrap());
        state.write_all(&[0; 100]).unwrap();
        assert!(!files.are_finished().unwrap());
        let (mut state, mut memory) = files.create().unwrap();
        state.write_all(b"PODVSNAP and more").unwrap();
        memory.write_all(&[1; 8192]).unwrap();
        assert!(files.are_finished().unwrap());
        assert!(files.stored() >= 8192);
        let saved = files.open(ContinueAs::Same).unwrap();
        saved.state.set_len(0).unwrap();
        assert!(!files.are_finished().unwrap());
        assert!(
            files
                .open(ContinueAs::Copy)
                .unwrap()
                .state
                .set_len(0)
                .is_err()
        );
        files.remove().unwrap();
        files.remove().unwrap();
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    }
}
