//! The last words of a process that has failed, from its log.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use super::printable::printable;

/// Most characters of a failed process's last log line that are reported.
pub(super) const MAX_STDERR_TAIL: usize = 1000;

/// Size of the end of its log that is searched for it, in bytes.
const LOG_TAIL_SIZE: u64 = 64 << 10;

/// Reads the end of a log, which may be as large as the disk.
fn end_of(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(LOG_TAIL_SIZE)))?;
    let mut end = Vec::new();
    file.take(LOG_TAIL_SIZE).read_to_end(&mut end)?;
    Ok(String::from_utf8_lossy(&end).into_owned())
}

/// Returns the last line of a process's log, without anything that a terminal acts on; `None` if it
/// logged nothing.
pub(super) fn last_line(log: &Path) -> Option<String> {
    let text = end_of(log).unwrap_or_default();
    let last = text.lines().next_back()?;
    Some(printable(last, MAX_STDERR_TAIL))
}
