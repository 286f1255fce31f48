//! The record that a sandbox's process leaves in its directory when it ends in good order, for
//! later queries.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::printable::printable;
use super::types::{ContainerInfo, SandboxExit};

const NAME: &str = "exit.json";

/// Longest record that is read, in bytes.
const MAX_RECORD_SIZE: u64 = 1 << 20;

/// Most characters of a container's id that are read: the length of the longest valid id.
const MAX_ID_CHARS: usize = 128;

/// Most characters of a message about a container's end that are read.
const MAX_MESSAGE_CHARS: usize = 4 << 10;

/// How a sandbox and its containers ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// How the sandbox ended.
    pub exit: SandboxExit,
    /// Its containers at that time.
    pub containers: Vec<ContainerInfo>,
}

/// Reads the record in the directory of a sandbox that is gone; `None` if its process could not
/// write one. Its texts are that process's words: their length is bounded, and characters that a
/// terminal or a log would interpret are replaced.
#[must_use]
pub fn read(dir: &Path) -> Option<ExitRecord> {
    let mut text = Vec::new();
    let file = File::open(dir.join(NAME)).ok()?;
    file.take(MAX_RECORD_SIZE).read_to_end(&mut text).ok()?;
    let mut record: ExitRecord = serde_json::from_slice(&text).ok()?;
    record.exit = record.exit.printable();
    for container in &mut record.containers {
        container.id = printable(&container.id, MAX_ID_CHARS);
        let message = container.message.take();
        container.message = message.map(|said| printable(&said, MAX_MESSAGE_CHARS));
    }
    Some(record)
}

/// When the sandbox of a directory ended, if its process could write its record.
pub fn written_at(dir: &Path) -> Option<SystemTime> {
    let file = fs::metadata(dir.join(NAME)).ok()?;
    // The file exists from the start, and is empty.
    (file.len() > 0).then_some(())?;
    file.modified().ok()
}

/// Disk space that is allocated for a record from the start, in bytes: that of some hundred
/// containers, and of the longest kernel log.
const PREALLOCATED_SIZE: u64 = 128 << 10;

/// Creates the file for the record, which is empty until [`write()`], whose process can open no
/// files. Its space is allocated now, so that exit codes are kept even if the disk is full by then.
pub(super) fn create(dir: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let file = options.open(dir.join(NAME))?;
    match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, PREALLOCATED_SIZE) {
        // Not every file system supports this.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(file),
        Err(error) => Err(error.into()),
    }
}

/// Writes the record of a process that is gone and could not write it.
pub(super) fn write_late(dir: &Path, record: &ExitRecord) -> io::Result<()> {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).mode(0o600);
    write(&file.open(dir.join(NAME))?, record)
}

/// Writes the record, and frees the space that it does not need. Readers treat a truncated record
/// as missing.
pub(super) fn write(mut file: &File, record: &ExitRecord) -> io::Result<()> {
    let text = serde_json::to_vec(record)?;
    file.write_all(&text)?;
    // usize is 64 bits wide where podvisor runs.
    file.set_len(text.len() as u64)
}

/// Removes the record of an earlier sandbox from the directory.
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
    fn a_record_has_its_room_from_the_start_and_keeps_what_it_needs() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let file = create(dir.path()).unwrap();
        let taken = || file.metadata().unwrap().blocks() * 512;
        assert!(taken() >= PREALLOCATED_SIZE, "{}", taken());
        let record = ExitRecord {
            exit: SandboxExit::PoweredOff,
            containers: Vec::new(),
        };
        write(&file, &record).unwrap();
        assert!(taken() < PREALLOCATED_SIZE, "{}", taken());
        assert_eq!(read(dir.path()), Some(record));
    }

    #[test]
    fn words_of_a_process_that_was_taken_over_are_cleaned_and_cut() {
        let dir = tempfile::tempdir().unwrap();
        let words = format!("\u{1b}[2J\u{9b}1m\n{}", "x".repeat(1 << 16));
        let quoted = serde_json::to_string(&words).unwrap();
        // As much as fits into the longest record.
        let log = [quoted.as_str(); 10].join(",");
        let container = format!(
            r#"{{"id": {quoted}, "state": "Exited", "pid": 1, "started_at_ns": 1, "exit": null}}"#
        );
        for exit in [
            format!(r#"{{"Failed": {quoted}}}"#),
            format!(r#"{{"OutOfMemory": {{"group": {quoted}}}}}"#),
            format!(r#"{{"Panicked": {{"message": {quoted}, "log": [{log}]}}}}"#),
            format!(r#"{{{quoted}: 1}}"#),
        ] {
            let text = format!(r#"{{"exit": {exit}, "containers": [{container}]}}"#);
            fs::write(dir.path().join(NAME), text).unwrap();
            let record = read(dir.path()).unwrap();
            let said = record.exit.to_string();
            let id = record.containers[0].id.clone();
            for text in [&said, &id].into_iter().chain(record.exit.kernel_log()) {
                assert!(!text.contains(char::is_control), "{text:?}");
                assert!((100..=(5 << 10)).contains(&text.len()), "{}", text.len());
            }
        }
        let lines = vec![r#""x""#; 1000].join(",");
        let exit = format!(r#"{{"Panicked": {{"message": "x", "log": [{lines}]}}}}"#);
        let text = format!(r#"{{"exit": {exit}, "containers": []}}"#);
        fs::write(dir.path().join(NAME), text).unwrap();
        let record = read(dir.path()).unwrap();
        assert!(record.exit.kernel_log().len() < 100);
    }

    #[test]
    fn a_record_of_a_newer_podvisor_keeps_what_is_known_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let read_with = |exit: &str| {
            let program = r#"{"code": 3, "exited_at_ns": 2, "oom_killed": false, "later": 1}"#;
            let state = r#""state": "Exited", "pid": 1, "started_at_ns": 1"#;
            let container = format!(r#"{{"id": "c", {state}, "exit": {program}}}"#);
            let text = format!(r#"{{"exit": {exit}, "containers": [{container}], "later": []}}"#);
            fs::write(dir.path().join(NAME), text).unwrap();
            read(dir.path())
        };
        for exit in [
            r#""Hibernated""#,
            r#"{"Hibernated": null}"#,
            r#"{"Hibernated": {"to": ["/x", 1]}}"#,
        ] {
            let record = read_with(exit).unwrap();
            assert_eq!(record.exit, SandboxExit::Unknown("Hibernated".to_owned()));
            assert_eq!(record.containers[0].exit.map(|exit| exit.code), Some(3));
            let said = record.exit.to_string();
            assert!(said.contains("does not know: Hibernated"), "{said}");
        }
        // A known way with other fields.
        let record = read_with(r#"{"Failed": {"at": 1}}"#).unwrap();
        assert_eq!(record.exit, SandboxExit::Unknown("Failed".to_owned()));
        assert_eq!(read_with(r#""Killed""#).unwrap().exit, SandboxExit::Killed);
        for nonsense in ["3", "[]", "{}", "null", r#"{"Died": 1, "Reset": 2}"#] {
            assert_eq!(read_with(nonsense), None, "{nonsense}");
        }
    }

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
