//! Reading the log while others write it and begin it anew.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};

use rustix::fs::{FlockOperation, flock};

use super::Events;
use crate::sandbox::Event;

/// Reads events in the order of the log, each once.
#[derive(Debug)]
pub(super) struct Reader {
    events: Events,
    log: File,
    /// What of the log has been read; `None`: nothing, and the old log neither.
    offset: Option<u64>,
    /// The file that was the old log then.
    old: Option<u64>,
}

impl Reader {
    /// Opens the log, which is made if there is none.
    pub(super) fn new(events: &Events) -> io::Result<Self> {
        let mut options = File::options();
        options.create(true).append(true).read(true).mode(0o600);
        Ok(Self {
            log: options.open(events.log())?,
            events: events.clone(),
            offset: None,
            old: None,
        })
    }

    /// The events since the last call; at first, all that there are.
    pub(super) fn next(&mut self) -> io::Result<Vec<Event>> {
        flock(&self.log, FlockOperation::LockShared)?;
        let texts = self.read();
        flock(&self.log, FlockOperation::Unlock)?;
        let texts = texts?;
        Ok(texts
            .iter()
            .flat_map(|text| text.lines().filter_map(Event::parse))
            .collect())
    }

    fn read(&mut self) -> io::Result<[String; 2]> {
        let old = fs::metadata(self.events.old()).ok().map(|file| file.ino());
        let mut before = String::new();
        if self.offset.is_none() || old != self.old {
            // What was not read of the log that is the old one now.
            if let Ok(mut file) = File::open(self.events.old()) {
                before = text_from(&mut file, self.offset.unwrap_or(0))?;
            }
            self.offset = Some(0);
            self.old = old;
        }
        let offset = self.offset.unwrap_or(0);
        let mut text = text_from(&mut self.log, offset)?;
        // A line that is just being written waits for its end.
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        self.offset = Some(offset.saturating_add(text.len() as u64));
        // A writer killed between copying the log and truncating it left it twice.
        if !text.is_empty() && before.starts_with(text.get(..text.len().min(512)).unwrap_or("")) {
            before.clear();
        }
        Ok([before, text])
    }
}

fn text_from(file: &mut File, offset: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| {
        // As long as before: offsets count.
        let mut bytes = error.into_bytes();
        bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
        String::from_utf8(bytes).unwrap_or_default()
    }))
}
