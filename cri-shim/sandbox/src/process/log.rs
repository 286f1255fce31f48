//! A container's log in the format of the Container Runtime Interface. A line of it is
//! `TIME STREAM F|P TEXT`, where P means that the text continues in the stream's next line.

use std::fs::File;
use std::io::{self, Write};
use std::time::SystemTime;

/// Longest text of one line; longer lines are split. Readers rely on it (16 KiB, as in other
/// runtimes).
const LINE_MAX: usize = 16 << 10;

/// One of a process's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputStream {
    Stdout,
    Stderr,
}

impl OutputStream {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// Writes a log. Lines are written as soon as they are complete, those of one read in one write;
/// the start of a line is kept until its rest comes.
#[derive(Debug)]
pub(super) struct LogWriter<W = File> {
    file: W,
    /// The file that is used next when `file` has reached the maximum size.
    other: Option<Other<W>>,
    /// Size of `file` in bytes, as far as it was written here.
    size: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Lines for the next write.
    lines: Vec<u8>,
    /// The last write stopped within a line.
    is_torn: bool,
}

#[derive(Debug)]
struct Other<W> {
    file: W,
    max_bytes: u64,
}

/// What went wrong with a log.
#[derive(Debug, thiserror::Error)]
pub(super) enum LogError {
    /// The file did not accept lines: they are lost, and later ones are tried again.
    #[error("failed to write to a container's log: {lines} lines are lost")]
    Lost {
        /// How many, or parts of them.
        lines: usize,
        #[source]
        source: io::Error,
    },
    /// All lines are written, but to a file that is longer than it may be.
    #[error("failed to empty a container's other log: the present one exceeds its maximum size")]
    TooLong(#[source] io::Error),
}

/// A log that can be truncated.
pub(super) trait LogFile: Write {
    /// Removes its contents.
    fn empty(&mut self) -> io::Result<()>;
}

impl LogFile for File {
    fn empty(&mut self) -> io::Result<()> {
        self.set_len(0)
    }
}

/// The prefix of lines that were read together.
struct Origin(String);

impl Origin {
    fn new(stream: OutputStream, now: SystemTime) -> Self {
        let time = humantime::format_rfc3339_nanos(now);
        Self(format!("{time} {} ", stream.name()))
    }
}

impl<W: LogFile> LogWriter<W> {
    pub(super) fn new(file: W) -> Self {
        Self {
            file,
            other: None,
            size: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
            lines: Vec::new(),
            is_torn: false,
        }
    }

    /// Continues in another file. The start of a line that was kept goes there.
    pub(super) fn reopen(&mut self, file: W) {
        self.file = file;
        self.other = None;
        self.size = 0;
        self.is_torn = false;
    }

    /// From now on, writes lines alternately to this file and the present one: a write that would
    /// make one longer than `max_bytes` goes to the other, which is truncated first. Each line is
    /// in one of them.
    pub(super) fn limit(&mut self, file: W, max_bytes: u64) {
        self.other = Some(Other { file, max_bytes });
    }

    fn take_turns(&mut self, coming: u64) -> io::Result<()> {
        if let Some(other) = &mut self.other
            && self.size > 0
            && self.size.saturating_add(coming) > other.max_bytes
        {
            other.file.empty()?;
            std::mem::swap(&mut self.file, &mut other.file);
            self.size = 0;
            self.is_torn = false;
        }
        Ok(())
    }

    /// Appends bytes that a process has written now.
    ///
    /// # Errors
    /// [`LogError`]; it says which lines are in the log.
    pub(super) fn write(
        &mut self,
        stream: OutputStream,
        bytes: &[u8],
        now: SystemTime,
    ) -> Result<(), LogError> {
        let origin = Origin::new(stream, now);
        let mut begun = std::mem::take(self.begun(stream));
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (mut text, is_whole) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            while begun.len() + text.len() > LINE_MAX {
                let (fits, rest) = text.split_at(LINE_MAX - begun.len());
                self.line(&origin, b"P ", &begun, fits);
                begun.clear();
                text = rest;
            }
            if is_whole {
                self.line(&origin, b"F ", &begun, text);
                begun.clear();
            } else {
                begun.extend_from_slice(text);
            }
        }
        *self.begun(stream) = begun;
        self.flush()
    }

    /// Handles the end of the stream: a last line without an end is written as it is.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn finish(&mut self, stream: OutputStream, now: SystemTime) -> Result<(), LogError> {
        let begun = std::mem::take(self.begun(stream));
        if !begun.is_empty() {
            self.line(&Origin::new(stream, now), b"P ", &begun, b"");
        }
        self.flush()
    }

    fn begun(&mut self, stream: OutputStream) -> &mut Vec<u8> {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }

    fn line(&mut self, origin: &Origin, tag: &[u8], begun: &[u8], rest: &[u8]) {
        for part in [origin.0.as_bytes(), tag, begun, rest, b"\n"] {
            self.lines.extend_from_slice(part);
        }
    }

    fn flush(&mut self) -> Result<(), LogError> {
        if self.lines.is_empty() {
            return Ok(());
        }
        // If the other file cannot be used, this one is.
        let turn = self.take_turns(self.lines.len() as u64);
        let mut stopped = None;
        if self.is_torn {
            self.lines.insert(0, b'\n');
        }
        let mut written = 0;
        while written < self.lines.len() {
            match self.file.write(&self.lines[written..]) {
                Ok(0) => {
                    stopped = Some(io::ErrorKind::WriteZero.into());
                    break;
                }
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    stopped = Some(error);
                    break;
                }
            }
        }
        if written > 0 {
            self.is_torn = self.lines[written - 1] != b'\n';
            self.size = self.size.saturating_add(written as u64);
        }
        let lost = self.lines[written..].iter().filter(|byte| **byte == b'\n');
        let lines = lost.count();
        self.lines.clear();
        // Keeps the memory for one read with its lines' prefixes; a longer burst should not cost
        // memory forever.
        self.lines.shrink_to(4 * LINE_MAX);
        match stopped {
            Some(source) => Err(LogError::Lost { lines, source }),
            None => turn.map_err(LogError::TooLong),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use proptest::prelude::*;

    use super::OutputStream::{Stderr, Stdout};
    use super::*;

    const TIME: &str = "1970-01-01T00:00:01.500000000Z";

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(1500)
    }

    fn text(log: &LogWriter<Vec<u8>>) -> String {
        String::from_utf8_lossy(&log.file).replace(TIME, "T")
    }

    impl LogFile for Vec<u8> {
        fn empty(&mut self) -> io::Result<()> {
            self.clear();
            Ok(())
        }
    }

    impl LogFile for Limited {
        fn empty(&mut self) -> io::Result<()> {
            match self.1 {
                0 => Err(io::ErrorKind::StorageFull.into()),
                _ => self.0.empty(),
            }
        }
    }

    #[test]
    fn two_files_take_turns_and_none_is_longer_than_it_may_be() {
        let mut log = LogWriter::new(Vec::new());
        let line = format!("{TIME} stdout F 0\n").len() as u64;
        log.limit(Vec::new(), 3 * line);
        let lines = |text: &[u8]| -> Vec<String> {
            let text = String::from_utf8_lossy(text).into_owned();
            let last = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
            text.lines().map(last).collect()
        };
        for number in 0..8 {
            log.write(Stdout, format!("{number}\n").as_bytes(), now())
                .unwrap();
        }
        assert_eq!(lines(&log.file), ["6", "7"]);
        assert_eq!(lines(&log.other.as_ref().unwrap().file), ["3", "4", "5"]);
        // A write that exceeds the maximum size gets a file of its own.
        log.write(Stdout, b"a\nb\nc\nd\n", now()).unwrap();
        assert_eq!(lines(&log.file), ["a", "b", "c", "d"]);
        assert_eq!(lines(&log.other.as_ref().unwrap().file), ["6", "7"]);
        log.reopen(Vec::new());
        for _ in 0..8 {
            log.write(Stdout, b"x\n", now()).unwrap();
        }
        assert_eq!(lines(&log.file).len(), 8);
    }

    #[test]
    fn each_line_has_its_time_its_stream_and_that_it_is_whole() {
        let mut log = LogWriter::new(Vec::new());
        log.write(Stdout, b"one\ntwo\n", now()).unwrap();
        log.write(Stderr, b"\n", now()).unwrap();
        assert_eq!(
            String::from_utf8(log.file).unwrap(),
            format!("{TIME} stdout F one\n{TIME} stdout F two\n{TIME} stderr F \n")
        );
    }

    #[test]
    fn the_beginnings_of_lines_wait_for_their_rest_by_stream() {
        let mut log = LogWriter::new(Vec::new());
        log.write(Stdout, b"a", now()).unwrap();
        log.write(Stderr, b"x", now()).unwrap();
        assert_eq!(text(&log), "");
        log.write(Stdout, b"b\nc", now()).unwrap();
        assert_eq!(text(&log), "T stdout F ab\n");
        log.finish(Stdout, now()).unwrap();
        log.finish(Stderr, now()).unwrap();
        log.finish(Stderr, now()).unwrap();
        assert_eq!(text(&log), "T stdout F ab\nT stdout P c\nT stderr P x\n");
    }

    #[test]
    fn a_long_line_is_split_and_ends_as_a_whole_one() {
        let mut log = LogWriter::new(Vec::new());
        let line = [vec![b'x'; LINE_MAX * 2], b"end\n".to_vec()].concat();
        for piece in line.chunks(5000) {
            log.write(Stdout, piece, now()).unwrap();
        }
        let full = "x".repeat(LINE_MAX);
        assert_eq!(
            text(&log),
            format!("T stdout P {full}\nT stdout P {full}\nT stdout F end\n")
        );
    }

    #[test]
    fn a_line_of_just_the_longest_length_is_whole() {
        let mut log = LogWriter::new(Vec::new());
        let full = "x".repeat(LINE_MAX);
        log.write(Stdout, full.as_bytes(), now()).unwrap();
        log.write(Stdout, b"\n", now()).unwrap();
        assert_eq!(text(&log), format!("T stdout F {full}\n"));
    }

    /// A file that accepts a limited number of bytes.
    struct Limited(Vec<u8>, usize);

    impl Write for Limited {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.1);
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.1 -= count;
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn after_a_full_disk_the_next_line_begins_on_a_line_of_its_own() {
        let mut log = LogWriter::new(Limited(Vec::new(), 10));
        let full = log.write(Stdout, b"lost\n", now()).unwrap_err();
        assert!(matches!(full, LogError::Lost { lines: 1, .. }), "{full}");
        log.file.1 = 1000;
        log.write(Stdout, b"kept\n", now()).unwrap();
        let text = String::from_utf8(log.file.0).unwrap();
        assert_eq!(text, format!("1970-01-01\n{TIME} stdout F kept\n"));
    }

    #[test]
    fn only_lines_that_no_file_has_are_lost() {
        let line = format!("{TIME} stdout F a\n");
        // Room for one line and a part of the next.
        let mut log = LogWriter::new(Limited(Vec::new(), line.len() + 3));
        let full = log.write(Stdout, b"a\nb\nc\n", now()).unwrap_err();
        assert!(matches!(full, LogError::Lost { lines: 2, .. }), "{full}");
        assert!(log.file.0.starts_with(line.as_bytes()));

        let mut log = LogWriter::new(Limited(Vec::new(), 1000));
        log.limit(Limited(Vec::new(), 0), 1);
        log.write(Stdout, b"a\n", now()).unwrap();
        let long = log.write(Stdout, b"a\n", now()).unwrap_err();
        assert!(matches!(long, LogError::TooLong(_)), "{long}");
        assert_eq!(log.file.0, line.repeat(2).as_bytes());
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_of_the_files_once_whatever_the_pieces(
            pieces in proptest::collection::vec(("[ab\n]{0,40}", any::<bool>()), 0..20)
        ) {
            let mut log = LogWriter::new(Vec::new());
            let mut files = Vec::new();
            let mut expected = String::new();
            for (piece, reopens) in &pieces {
                expected.push_str(piece);
                log.write(Stdout, piece.as_bytes(), now()).unwrap();
                if *reopens {
                    files.push(std::mem::take(&mut log.file));
                    log.reopen(Vec::new());
                }
            }
            log.finish(Stdout, now()).unwrap();
            files.push(log.file);
            let mut restored = String::new();
            for line in String::from_utf8(files.concat()).unwrap().lines() {
                let rest = line.strip_prefix(&format!("{TIME} stdout ")).unwrap();
                match rest.split_at(2) {
                    ("F ", text) => {
                        restored.push_str(text);
                        restored.push('\n');
                    }
                    ("P ", text) => restored.push_str(text),
                    _ => panic!("{line}"),
                }
            }
            prop_assert_eq!(restored, expected);
        }
    }
}
