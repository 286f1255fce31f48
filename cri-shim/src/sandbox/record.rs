//! What a sandbox's process leaves in its directory when it ends in good order, for whoever
//! asks later.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::types::{ContainerInfo, SandboxExit};

const NAME: &str = "exit.json";

/// Longest record that is read, in bytes.
const MAX: u64 = 1 << 20;

/// How a sandbox and its containers ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// How the sandbox ended.
    pub exit: SandboxExit,
    /// Its containers as they were then.
    pub containers: Vec<ContainerInfo>,
}

/// The record in the directory of a sandbox that is gone; `None` when its process could not
/// write one.
#[must_use]
pub fn read(dir: &Path) -> Option<ExitRecord> {
    let mut text = Vec::new();
    let file = File::open(dir.join(NAME)).ok()?;
    file.take(MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Makes the file for the record, which is empty until [`write()`]: who writes it can open no file.
pub(super) fn create(dir: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    options.open(dir.join(NAME))
}

/// Writes the record. A reader takes one that is cut off for none.
pub(super) fn write(mut file: &File, record: &ExitRecord) -> io::Result<()> {
    file.write_all(&serde_json::to_vec(record)?)
}

/// Removes what an earlier sandbox left in the directory.
pub(super) fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_a_broken_one_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), None);
        let record = ExitRecord {
            exit: SandboxExit::Failed("x".into()),
            containers: Vec::new(),
        };
        let file = create(dir.path()).unwrap();
        assert_eq!(read(dir.path()), None);
        write(&file, &record).unwrap();
        assert_eq!(read(dir.path()), Some(record));
        fs::write(dir.path().join(NAME), b"{").unwrap();
        assert_eq!(read(dir.path()), None);
        remove(dir.path()).unwrap();
        remove(dir.path()).unwrap();
    }
}
