//! The log: its location, the limit of its size, and how events are appended.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tracing::debug;

use crate::cli::container::record::Record;
use crate::sandbox::{Event, EventAction, EventLog};

/// The file, within the root.
const LOG: &str = "events.log";

/// The previous log.
const OLD: &str = "events.log.1";

/// The file that readers and writers lock. Machines' processes have the log, but not this: they
/// append without a lock, and can make nobody wait.
const LOCK: &str = "events.lock";

/// Size from which the log is rotated, in bytes.
pub(super) const SIZE_MAX: u64 = 1 << 20;

/// Maximum size that is read or kept of a log, in bytes. Only a machine's process that does what it
/// should not do makes it longer.
pub(super) const READ_MAX: u64 = 4 * SIZE_MAX;

/// Maximum number of labels in an event.
const MAX_LABELS: usize = 16;

/// The event log of a root.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Events {
    root: PathBuf,
}

impl Events {
    pub(in crate::cli::container) fn of_root(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Returns that of the root that contains this container's directory.
    pub(in crate::cli) fn of_container(dir: &Path) -> Self {
        let root = dir.parent().and_then(Path::parent);
        Self::of_root(root.unwrap_or(dir))
    }

    pub(in crate::cli::container) fn log(&self) -> PathBuf {
        self.root.join(LOG)
    }

    pub(super) fn old(&self) -> PathBuf {
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
    pub(super) fn lock(&self, operation: FlockOperation) -> io::Result<File> {
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
    pub(super) fn append(&self, event: &Event) {
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
