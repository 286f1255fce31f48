//! Reads the log while others write and rotate it.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};

use rustix::fs::FlockOperation;

use super::log::{Events, READ_MAX};
use crate::sandbox::Event;

/// Reads events in the order of the log, each of them once.
#[derive(Debug)]
pub(in crate::cli::container) struct Reader {
    events: Events,
    log: File,
    /// How far the log has been read; `None` if neither it nor the old log has been read.
    offset: Option<u64>,
    /// The inode of the old log at that time.
    old: Option<u64>,
}

impl Reader {
    /// Opens the log, and creates it if it is missing.
    pub(in crate::cli::container) fn new(events: &Events) -> io::Result<Self> {
        let mut options = File::options();
        options.create(true).append(true).read(true).mode(0o600);
        Ok(Self {
            log: options.open(events.log())?,
            events: events.clone(),
            offset: None,
            old: None,
        })
    }

    /// Returns the events since the last call; on the first call, all. At most [`READ_MAX`] bytes
    /// of a log are read.
    pub(in crate::cli::container) fn next(&mut self) -> io::Result<Vec<Event>> {
        let lock = self.events.lock(FlockOperation::LockShared)?;
        let texts = self.read()?;
        drop(lock);
        Ok(texts
            .iter()
            .flat_map(|text| text.lines().filter_map(Event::parse))
            .collect())
    }

    fn read(&mut self) -> io::Result<[String; 2]> {
        let old = fs::metadata(self.events.old()).ok().map(|file| file.ino());
        let mut before = String::new();
        if self.offset.is_none() || old != self.old {
            // The unread part of the log that has become the old one.
            if let Ok(mut file) = File::open(self.events.old()) {
                before = text_from(&mut file, self.offset.unwrap_or(0))?;
            }
            self.offset = Some(0);
            self.old = old;
        }
        let len = self.log.metadata()?.len();
        // Cut off by something else than a rotation, it begins anew.
        let offset = self.offset.filter(|offset| *offset <= len).unwrap_or(0);
        let mut text = text_from(&mut self.log, offset)?;
        // An incomplete line is read later.
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        self.offset = Some(offset.saturating_add(text.len() as u64));
        // A writer that was killed between copying and truncating the log left its contents in
        // both.
        if !text.is_empty() && before.starts_with(text.get(..text.len().min(512)).unwrap_or("")) {
            before.clear();
        }
        Ok([before, text])
    }
}

fn text_from(file: &mut File, offset: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.take(READ_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| {
        // The length is unchanged, because offsets count bytes.
        let mut bytes = error.into_bytes();
        bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
        String::from_utf8(bytes).unwrap_or_default()
    }))
}
