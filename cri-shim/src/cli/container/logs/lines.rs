//! The lines of a program, from the pieces of them that a log has, and how they are printed.

use std::io;

/// Maximum bytes of a line that are held back until it is complete, so that lines of other
/// containers do not come into the middle of it.
const HELD_MAX: usize = 1 << 20;

/// A line of the log: a program's line, or a piece of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LogLine<'a> {
    pub(super) time: &'a str,
    pub(super) is_stderr: bool,
    /// Whether the program's line ends here.
    pub(super) is_last: bool,
    pub(super) text: &'a [u8],
}

impl<'a> LogLine<'a> {
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let mut parts = line.splitn(4, |byte| *byte == b' ');
        Some(Self {
            time: str::from_utf8(parts.next()?).ok()?,
            is_stderr: parts.next()? == b"stderr",
            is_last: parts.next()? == b"F",
            text: parts.next()?,
        })
    }
}

/// Finds where the lines of both streams begin: the pieces of one may be between those of the
/// other.
#[derive(Debug, Default)]
pub(super) struct LineStarts {
    /// Whether the last piece of stdout, and of stderr, was not the last one of its line.
    is_open: [bool; 2],
}

impl LineStarts {
    /// Returns whether a line begins with the next piece.
    pub(super) fn begins(&mut self, piece: &LogLine<'_>) -> bool {
        let is_open = &mut self.is_open[usize::from(piece.is_stderr)];
        !std::mem::replace(is_open, !piece.is_last)
    }
}

/// What is printed before each line.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefix {
    pub(super) name: Option<String>,
    pub(super) has_time: bool,
}

impl Prefix {
    fn add_to(&self, text: &mut Vec<u8>, piece: &LogLine<'_>) {
        let time = self.has_time.then_some(piece.time);
        for part in self.name.as_deref().into_iter().chain(time) {
            text.extend_from_slice(part.as_bytes());
            text.push(b' ');
        }
    }

    fn is_empty(&self) -> bool {
        self.name.is_none() && !self.has_time
    }
}

/// Whether pieces are printed as they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    No,
    /// Lines are printed in one piece. One of more than [`HELD_MAX`] bytes is broken.
    Lines,
}

/// Prints the lines of one container.
#[derive(Debug)]
pub(super) struct Printer<W> {
    prefix: Prefix,
    hold: Hold,
    starts: LineStarts,
    streams: [Stream; 2],
    /// Writes to stderr or stdout.
    write: W,
}

#[derive(Debug, Default)]
struct Stream {
    /// Whether the present line is one of those to print.
    is_taken: bool,
    /// The present line has begun, with its prefix, and has not ended.
    is_begun: bool,
    /// What is to be written.
    text: Vec<u8>,
}

impl<W: FnMut(bool, &[u8]) -> io::Result<()>> Printer<W> {
    /// `write` gets whether it is for stderr, and the text.
    pub(super) fn new(prefix: Prefix, hold: Hold, write: W) -> Self {
        Self {
            prefix,
            hold,
            starts: LineStarts::default(),
            streams: <[Stream; 2]>::default(),
            write,
        }
    }

    /// Prints a piece if `takes` returns true for the first one of its line.
    pub(super) fn print(
        &mut self,
        piece: &LogLine<'_>,
        takes: impl FnOnce(&LogLine<'_>) -> bool,
    ) -> io::Result<()> {
        let begins = self.starts.begins(piece);
        let stream = &mut self.streams[usize::from(piece.is_stderr)];
        if begins {
            stream.is_taken = takes(piece);
        }
        if !stream.is_taken {
            return Ok(());
        }
        if !stream.is_begun {
            self.prefix.add_to(&mut stream.text, piece);
        }
        stream.text.extend_from_slice(piece.text);
        let is_held = self.hold == Hold::Lines && !piece.is_last;
        let is_too_long = is_held && stream.text.len() >= HELD_MAX;
        stream.is_begun = !piece.is_last && !is_too_long;
        if is_held && !is_too_long {
            return Ok(());
        }
        if !stream.is_begun {
            stream.text.push(b'\n');
        }
        let written = (self.write)(piece.is_stderr, &stream.text);
        stream.text.clear();
        written
    }

    /// Prints what is held back. With prefixes, lines without an end get one: they are not
    /// continued by what follows.
    pub(super) fn finish(mut self) -> io::Result<()> {
        for (is_stderr, stream) in [false, true].into_iter().zip(&mut self.streams) {
            if stream.is_begun && !self.prefix.is_empty() {
                stream.text.push(b'\n');
            }
            if !stream.text.is_empty() {
                (self.write)(is_stderr, &stream.text)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIME: &str = "2026-01-31T12:00:00.5Z";

    fn piece(is_stderr: bool, is_last: bool, text: &[u8]) -> LogLine<'_> {
        LogLine {
            time: TIME,
            is_stderr,
            is_last,
            text,
        }
    }

    /// Returns what is printed of pieces on stdout and stderr.
    fn printed(prefix: Prefix, hold: Hold, pieces: &[LogLine<'_>]) -> [String; 2] {
        let mut all = <[Vec<u8>; 2]>::default();
        let write = |is_stderr: bool, text: &[u8]| {
            all[usize::from(is_stderr)].extend_from_slice(text);
            Ok(())
        };
        let mut printer = Printer::new(prefix, hold, write);
        for piece in pieces {
            printer.print(piece, |_| true).unwrap();
        }
        printer.finish().unwrap();
        all.map(|text| String::from_utf8(text).unwrap())
    }

    fn named() -> Prefix {
        Prefix {
            name: Some("one".to_owned()),
            has_time: true,
        }
    }

    #[test]
    fn lines_of_the_log_are_taken_apart() {
        let line = format!("{TIME} stderr P some  text\n");
        let parsed = LogLine::parse(line.as_bytes()).unwrap();
        assert_eq!(parsed, piece(true, false, b"some  text"));
        assert_eq!(LogLine::parse(b"T stdout F \n").unwrap().text, b"");
        for bad in [b"".as_slice(), b"\n", b"T stdout\n", b"\xff stdout F x\n"] {
            assert_eq!(LogLine::parse(bad), None);
        }
    }

    #[test]
    fn pieces_of_a_line_have_one_prefix_and_one_end_whatever_is_between_them() {
        let pieces = [
            piece(false, false, b"a"),
            piece(true, true, b"error"),
            piece(false, false, b"b"),
            piece(false, true, b"c"),
            piece(false, true, b""),
            piece(false, false, b"open"),
        ];
        for hold in [Hold::No, Hold::Lines] {
            let shown = printed(Prefix::default(), hold, &pieces);
            assert_eq!(shown, ["abc\n\nopen", "error\n"]);
            let [stdout, stderr] = printed(named(), hold, &pieces);
            let begin = format!("one {TIME} ");
            assert_eq!(
                stdout,
                format!("{begin}abc\n{begin}\n{begin}open\n"),
                "{hold:?}"
            );
            assert_eq!(stderr, format!("{begin}error\n"));
        }
    }

    #[test]
    fn a_line_is_printed_or_left_out_with_all_of_its_pieces() {
        let mut shown = Vec::new();
        let write = |_: bool, text: &[u8]| {
            shown.extend_from_slice(text);
            Ok(())
        };
        let mut printer = Printer::new(Prefix::default(), Hold::No, write);
        for (text, is_last, takes) in [
            ("a", false, false),
            ("b", true, true),
            ("c", false, true),
            ("d", true, false),
        ] {
            let piece = piece(false, is_last, text.as_bytes());
            printer.print(&piece, |_| takes).unwrap();
        }
        printer.finish().unwrap();
        assert_eq!(shown, b"cd\n");
    }

    #[test]
    fn lines_that_are_held_are_written_at_once_and_an_endless_one_is_broken() {
        let mut written = Vec::new();
        let write = |_: bool, text: &[u8]| {
            written.push(text.len());
            Ok(())
        };
        let mut printer = Printer::new(named(), Hold::Lines, write);
        let text = [b'x'; 16 << 10];
        for _ in 0..1000 {
            let piece = piece(false, false, &text);
            printer.print(&piece, |_| true).unwrap();
            assert!(printer.streams[0].text.len() <= HELD_MAX);
        }
        let end = piece(false, true, b"end");
        printer.print(&end, |_| true).unwrap();
        printer.finish().unwrap();
        let prefix = named().name.unwrap().len() + TIME.len() + 2;
        let lines = written.len();
        assert!((16..20).contains(&lines), "{written:?}");
        let sum: usize = written.iter().sum();
        assert_eq!(sum, 1000 * text.len() + 3 + lines * (prefix + 1));
    }

    proptest! {
        #[test]
        fn lines_are_the_same_in_pieces_of_any_length(
            lines in prop::collection::vec((any::<bool>(), "[a-z ]{0,20}"), 0..20),
            order in prop::collection::vec(any::<bool>(), 0..60),
            size in 1_usize..8,
            holds: bool,
        ) {
            let expected = [false, true].map(|stream| -> String {
                let of_stream = lines.iter().filter(|(is_stderr, _)| *is_stderr == stream);
                of_stream.map(|(_, text)| format!("one {TIME} {text}\n")).collect()
            });
            let mut streams = [false, true].map(|stream| {
                let of_stream = lines.iter().filter(|(is_stderr, _)| *is_stderr == stream);
                let pieces = of_stream.flat_map(|(_, text)| {
                    let mut pieces: Vec<_> = text
                        .as_bytes()
                        .chunks(size)
                        .map(|text| piece(stream, false, text))
                        .collect();
                    pieces.push(piece(stream, true, b""));
                    pieces
                });
                pieces.collect::<Vec<_>>().into_iter()
            });
            let mut pieces = Vec::new();
            for is_stderr in order {
                pieces.extend(streams[usize::from(is_stderr)].next());
            }
            for stream in streams {
                pieces.extend(stream);
            }
            let hold = if holds { Hold::Lines } else { Hold::No };
            prop_assert_eq!(printed(named(), hold, &pieces), expected);
            let mut starts = LineStarts::default();
            let count = pieces.iter().filter(|piece| starts.begins(piece)).count();
            prop_assert_eq!(count, lines.len());
        }
    }
}
