//! The event log of the containers of a root: a file that commands and sandboxes append to, and
//! `podvisor events`, which shows it.
//!
//! This file has the log's location and the limit of its size; `read` reads it while others write,
//! `show` is the command.

mod read;
mod show;

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tracing::debug;

use super::record::{self, Record};
use super::state::KILLED_EXIT_CODE;
use crate::sandbox::{Event, EventAction, EventLog, exit_record};
use read::Reader;
pub(in crate::cli) use show::{EventsArgs, run};

/// The file, within the root.
const LOG: &str = "events.log";

/// The previous log.
const OLD: &str = "events.log.1";

/// The file that readers and writers lock. Machines' processes have the log, but not this: they
/// append without a lock, and can make nobody wait.
const LOCK: &str = "events.lock";

/// Size from which the log is rotated, in bytes.
const SIZE_MAX: u64 = 1 << 20;

/// Maximum size that is read or kept of a log, in bytes. Only a machine's process that does what it
/// should not do makes it longer.
const READ_MAX: u64 = 4 * SIZE_MAX;

/// Marker in a container's directory: its end is in the log.
const END_LOGGED: &str = "end-told";

/// Maximum number of labels in an event.
const MAX_LABELS: usize = 16;

/// The event log of a root.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Events {
    root: PathBuf,
}

impl Events {
    pub(super) fn of_root(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Returns that of the root that contains this container's directory.
    pub(in crate::cli) fn of_container(dir: &Path) -> Self {
        let root = dir.parent().and_then(Path::parent);
        Self::of_root(root.unwrap_or(dir))
    }

    fn log(&self) -> PathBuf {
        self.root.join(LOG)
    }

    fn old(&self) -> PathBuf {
        self.root.join(OLD)
    }

    /// Opens the log for a machine's process, which can only append to it.
    pub(in crate::cli) fn open(&self) -> Option<File> {
        self.opened()
            .inspect_err(|error| debug!(%error, "events are lost"))
            .ok()
    }

    /// Opens the log for appending, and rotates it if it is too long.
    fn opened(&self) -> io::Result<File> {
        let file = append_to(&self.log())?;
        if file.metadata()?.len() > SIZE_MAX {
            self.rotate(&file)?;
        }
        Ok(file)
    }

    /// Locks the logs until the file is dropped. Nobody holds the lock for long.
    fn lock(&self, operation: FlockOperation) -> io::Result<File> {
        let lock = append_to(&self.root.join(LOCK))?;
        flock(&lock, operation)?;
        Ok(lock)
    }

    /// Copies the log to the old one and truncates it. It remains the same file, because others
    /// have it open and cannot open another one. What a machine writes just before it is truncated
    /// is lost.
    fn rotate(&self, log: &File) -> io::Result<()> {
        let _lock = self.lock(FlockOperation::LockExclusive)?;
        let len = log.metadata()?.len();
        if len <= SIZE_MAX {
            // Another process has just done it.
            return Ok(());
        }
        let new = self.root.join("events.log.new");
        let mut options = File::options();
        options.create(true).write(true).truncate(true).mode(0o600);
        let mut copy = options.open(&new)?;
        let mut from = File::open(self.log())?;
        from.seek(SeekFrom::Start(len.saturating_sub(READ_MAX)))?;
        io::copy(&mut from.take(READ_MAX), &mut copy)?;
        fs::rename(&new, self.old())?;
        log.set_len(0)
    }

    /// Appends an event. A failure is not an error: the event is lost.
    fn append(&self, event: &Event) {
        let append = || {
            let log = self.opened()?;
            let _lock = self.lock(FlockOperation::LockShared)?;
            EventLog::new(log).append(event);
            io::Result::Ok(())
        };
        if let Err(error) = append() {
            debug!(%error, "an event is lost");
        }
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).append(true).mode(0o600).open(path)
}

/// Returns an event of a container, with its name, image and labels.
pub(in crate::cli) fn event(record: &Record, action: EventAction) -> Event {
    let mut event = Event::now(&record.id, action);
    // Before the other attributes, which take precedence over labels of the same name.
    for (key, value) in record.labels.iter().take(MAX_LABELS) {
        event = event.with(key, value);
    }
    event
        .with("image", &record.image)
        .with("name", &record.name)
}

/// Records an action of a command on a container.
pub(in crate::cli) fn note(dir: &Path, event: &Event) {
    Events::of_container(dir).append(event);
}

/// Records the end of a container, unless its sandbox did: that may have been killed.
pub(super) fn note_end(dir: &Path, record: &Record) {
    // Only the first of several processes that detect it records it.
    let marked = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(dir.join(END_LOGGED));
    if marked.is_err() {
        return;
    }
    let events = Events::of_container(dir);
    let mut is_running = false;
    let noted = Reader::new(&events).and_then(|mut reader| reader.next());
    for event in noted.unwrap_or_default() {
        if event.id == record.id {
            match event.action {
                EventAction::Start => is_running = true,
                EventAction::Die => is_running = false,
                _ => {}
            }
        }
    }
    if is_running {
        let ended = exit_record(dir).map(|record| record.containers);
        let own = ended.and_then(|list| list.into_iter().find(|info| info.id == record.id));
        let exit = own.and_then(|info| info.exit);
        let died = event(record, EventAction::Die);
        events.append(&died.with("exitCode", exit.map_or(KILLED_EXIT_CODE, |exit| exit.code)));
    }
}

/// Returns the record of the container of this id, if it exists.
fn record_of(root: &Path, id: &str) -> Option<Record> {
    let short = id.get(..crate::cli::format::SHORT_ID)?;
    record::read(&root.join(record::CONTAINERS).join(short)).ok()?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::container::record::sample;

    #[test]
    fn a_log_that_has_grown_long_is_begun_anew_and_read_as_one() {
        let root = tempfile::tempdir().unwrap();
        let events = Events::of_root(root.path());
        let mut followed = Reader::new(&events).unwrap();
        let numbered = |number: u32| Event::now("c", EventAction::Exec).with("number", number);
        let mut count = 0;
        let mut seen = 0;
        while !events.old().exists() {
            events.append(&numbered(count).with("padding", "x".repeat(3000)));
            count += 1;
            if count % 50 == 0 {
                seen += followed.next().unwrap().len();
            }
        }
        events.append(&numbered(count));
        count += 1;
        assert!(events.log().metadata().unwrap().len() < SIZE_MAX);
        let read = Reader::new(&events).unwrap().next().unwrap();
        let numbers: Vec<String> = read
            .iter()
            .map(|event| event.attributes["number"].clone())
            .collect();
        let expected: Vec<String> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(numbers, expected);
        // A follower misses nothing.
        seen += followed.next().unwrap().len();
        assert_eq!(seen, usize::try_from(count).unwrap());
    }

    /// A process that broke out of its guest has the descriptor that its machine was given.
    #[test]
    fn a_machine_can_neither_read_the_log_nor_make_others_wait_or_read_without_end() {
        let root = tempfile::tempdir().unwrap();
        let events = Events::of_root(root.path());
        let happened = Event::now("c", EventAction::Exec);
        events.append(&happened);
        let hostile = events.open().unwrap();
        let mut byte = [0];
        let read = rustix::io::pread(&hostile, &mut byte, 0);
        assert_eq!(read, Err(rustix::io::Errno::BADF));
        flock(&hostile, FlockOperation::NonBlockingLockExclusive).unwrap();
        let mut reader = Reader::new(&events).unwrap();
        let one = std::slice::from_ref(&happened);
        assert_eq!(reader.next().unwrap(), one);
        // Sparse.
        hostile.set_len(1 << 40).unwrap();
        assert!(reader.next().unwrap().is_empty());
        events.append(&happened);
        assert!(events.old().metadata().unwrap().len() <= READ_MAX);
        assert!(events.log().metadata().unwrap().len() < SIZE_MAX);
        let read = Reader::new(&events).unwrap().next().unwrap();
        assert_eq!(read, one);
        // A follower goes on where the log begins anew.
        hostile.set_len(0).unwrap();
        assert!(reader.next().is_ok());
        events.append(&happened);
        assert_eq!(reader.next().unwrap(), one);
    }

    #[test]
    fn an_end_that_nobody_told_is_told_once() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(record::CONTAINERS).join("aaaaaaaaaaaa");
        fs::create_dir_all(&dir).unwrap();
        let record = sample("a", "one");
        note(&dir, &event(&record, EventAction::Start));
        note_end(&dir, &record);
        note_end(&dir, &record);
        let events = Events::of_root(root.path());
        let read = Reader::new(&events).unwrap().next().unwrap();
        let actions: Vec<_> = read.iter().map(|event| event.action).collect();
        assert_eq!(actions, [EventAction::Start, EventAction::Die]);
        assert_eq!(read[1].attributes["exitCode"], "137");
        // An end that the sandbox recorded is not recorded again.
        fs::remove_file(dir.join(END_LOGGED)).unwrap();
        note_end(&dir, &record);
        assert_eq!(Reader::new(&events).unwrap().next().unwrap().len(), 2);
    }

    #[test]
    fn a_log_that_cannot_be_written_is_no_failure() {
        let events = Events::of_root(Path::new("/dev/null"));
        events.append(&Event::now("c", EventAction::Exec));
        assert!(Reader::new(&events).is_err());
    }
}
