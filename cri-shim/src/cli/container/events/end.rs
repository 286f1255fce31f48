//! The end of a container that nobody has recorded.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::log::{Events, event};
use super::read::Reader;
use crate::cli::container::record::Record;
use crate::cli::container::state::KILLED_EXIT_CODE;
use crate::sandbox::{EventAction, exit_record};

/// Marker in a container's directory: its end is in the log.
pub(super) const END_LOGGED: &str = "end-told";

/// Records the end of a container, unless its sandbox did: that may have been killed.
pub(in crate::cli::container) fn note_end(dir: &Path, record: &Record) {
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
