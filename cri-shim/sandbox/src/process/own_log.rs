//! Limits the size of this process's own log: its stderr, a file that its launcher has opened for
//! reading and appending. How fast a guest can make it grow is limited where lines are logged.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use rustix::fs::{FileType, fstat, ftruncate};
use rustix::io::pread;
use tracing::debug;

use super::super::stdio::write_all;

/// The size in bytes from which the oldest lines are removed: the log may be in a file system in
/// memory, with those of all other machines of the node.
const MAX_LOG_SIZE: u64 = 1 << 20;

/// The number of bytes that are kept then.
const KEPT_LOG_SIZE: u64 = MAX_LOG_SIZE / 2;

/// Interval of checks. Threads of the machine may not truncate files.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Keeps the log short, as long as this process runs.
pub(super) async fn keep_short() {
    let mut times = tokio::time::interval(CHECK_INTERVAL);
    loop {
        times.tick().await;
        let shortened = {
            // Blocks other log lines, and panic messages, meanwhile.
            let stderr = io::stderr().lock();
            shorten(stderr.as_fd())
        };
        if let Err(error) = shortened {
            debug!(%error, "the log stays as long as it is");
        }
    }
}

/// Removes the oldest lines of a log that is too long.
fn shorten(log: BorrowedFd<'_>) -> io::Result<()> {
    let found = fstat(log)?;
    let length = u64::try_from(found.st_size).unwrap_or(0);
    // It may be anything if the process was not started by podvisor's launcher.
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || length <= MAX_LOG_SIZE {
        return Ok(());
    }
    let end = end_of(log, length)?;
    ftruncate(log, 0)?;
    Ok(write_all(log, &end)?)
}

/// Returns the last lines of a log that is longer than they are.
fn end_of(log: BorrowedFd<'_>, length: u64) -> io::Result<Vec<u8>> {
    let from = length.saturating_sub(KEPT_LOG_SIZE);
    let mut end = Vec::new();
    let mut buffer = [0_u8; 16 << 10];
    loop {
        match pread(log, &mut buffer, from + end.len() as u64)? {
            0 => break,
            count => end.extend_from_slice(&buffer[..count]),
        }
    }
    // The first one is incomplete.
    if let Some(line) = end.iter().position(|byte| *byte == b'\n') {
        end.drain(..=line);
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write as _;

    use super::*;

    /// Opens a log as a launcher does.
    fn open(path: &std::path::Path) -> File {
        let mut options = File::options();
        options.read(true).append(true).create(true);
        options.open(path).unwrap()
    }

    #[test]
    fn a_log_stays_short_and_ends_with_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = open(&path);
        let line = |number: usize| format!("{number:08} {}\n", "x".repeat(90));
        let lines = (5 << 20) / line(0).len();
        for number in 0..lines {
            log.write_all(line(number).as_bytes()).unwrap();
            if number % 1000 == 0 {
                shorten(log.as_fd()).unwrap();
                assert!(fs::metadata(&path).unwrap().len() <= MAX_LOG_SIZE);
            }
        }
        shorten(log.as_fd()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() as u64 <= MAX_LOG_SIZE && text.len() as u64 > KEPT_LOG_SIZE / 2);
        let first: usize = text[..8].parse().unwrap();
        let expected: String = (first..lines).map(line).collect();
        assert!(text == expected, "lines are missing or cut");
    }

    #[test]
    fn a_log_that_has_become_far_too_long_is_not_read_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = open(&path);
        // Mostly a hole.
        log.set_len(1 << 40).unwrap();
        log.write_all(b"\nlast\n").unwrap();
        shorten(log.as_fd()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"last\n");
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let (reader, writer) = io::pipe().unwrap();
        shorten(writer.as_fd()).unwrap();
        drop(reader);
    }
}
