//! The messages of a migration. docs/migration.md has the layout.
//!
//! Nothing that the other side says is believed: a length is compared with what its kind may have
//! before anything is allocated, and a text is cut and stripped of control characters.

use std::io::{self, Read, Write};

/// The first bytes of a stream, before any message.
const MAGIC: [u8; 8] = *b"PODVMIGR";
/// Incremented if the layout of a message changes.
const VERSION: u32 = 2;

/// The maximum length of a reason, in bytes.
const MAX_TEXT: usize = 1024;

/// The maximum length of a state: that of a snapshot's state file.
const MAX_STATE: usize = 64 << 20;

/// The maximum length of a list of disks or devices.
const MAX_DISKS: usize = 320 << 10;

/// The maximum length of a message with pages.
pub(crate) const MAX_PAGES: usize = 256 << 10;

/// The length of a message's header: kind, length of the contents, a number.
const HEADER: usize = 16;

/// What a message says, and the meaning of its number and contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum MessageKind {
    /// The machine as it is now, as a state file; the number is 1 if it runs.
    Hello = 1,
    /// Pages from the physical address in the number on.
    Pages = 2,
    /// Pages of zeroes from the physical address in the number on; the contents are their length.
    Zeroes = 3,
    /// The end of a round, with its number.
    Round = 4,
    /// The paused machine, as a state file; the number is the time of day of the pause in
    /// nanoseconds since 1970, or 0 if it did not run.
    State = 5,
    /// The machine is the other side's from now on.
    Run = 6,
    /// The disks whose contents move, too; follows the first message.
    Disks = 7,
    /// Bytes of a disk from the offset in the number on; the contents begin with its index.
    Blocks = 8,
    /// Zeroes of a disk from the offset in the number on; the contents are its index, and their
    /// length.
    BlockZeroes = 9,
    /// Devices that were plugged in, and what each is; before the disks, if there are any.
    Plugged = 10,
    /// The receiver takes such a machine.
    Accept = 16,
    /// The receiver has everything of the round in the number.
    Received = 17,
    /// The receiver has built the machine.
    Ready = 18,
    /// The machine runs at the receiver's.
    Running = 19,
    /// The sender of this gives up; the contents are a text. The machine, if it runs, runs on
    /// where it was.
    Refused = 32,
}

impl MessageKind {
    const ALL: [Self; 15] = [
        Self::Hello,
        Self::Pages,
        Self::Zeroes,
        Self::Round,
        Self::State,
        Self::Run,
        Self::Disks,
        Self::Blocks,
        Self::BlockZeroes,
        Self::Plugged,
        Self::Accept,
        Self::Received,
        Self::Ready,
        Self::Running,
        Self::Refused,
    ];

    /// The maximum length of the contents.
    fn max_len(self) -> usize {
        match self {
            Self::Hello | Self::State => MAX_STATE,
            Self::Pages => MAX_PAGES,
            Self::Disks | Self::Plugged => MAX_DISKS,
            Self::Blocks => size_of::<u32>() + MAX_PAGES,
            Self::BlockZeroes => size_of::<u32>() + size_of::<u64>(),
            Self::Zeroes => size_of::<u64>(),
            Self::Refused => MAX_TEXT,
            _ => 0,
        }
    }
}

/// Why a migration's stream ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The connection failed, or a read or write took longer than its time limit.
    #[error("the connection to the other side of the migration failed")]
    Io(#[source] io::Error),
    /// The other side is no migration.
    #[error("what was received is not a migration of this program")]
    NotAMigration,
    /// The other side is of another version.
    #[error("the migration has format {found}, this version reads format {VERSION}")]
    Version {
        /// Its format.
        found: u32,
    },
    /// A message that is not known, or not expected here.
    #[error("the other side of the migration sent message {found} out of turn")]
    Unexpected {
        /// The number of its kind.
        found: u32,
    },
    /// A message is longer than one of its kind may be.
    #[error("message {kind} of the migration has {len} bytes, of at most {most}")]
    Length {
        /// The number of its kind.
        kind: u32,
        /// Its length.
        len: u32,
        /// The maximum.
        most: usize,
    },
    /// The other side gave up, and said why.
    #[error("the other side of the migration refused: {0}")]
    Refused(String),
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: MessageKind,
    /// Its meaning depends on the kind.
    pub(crate) number: u64,
}

/// Both directions of a connection.
#[derive(Debug)]
pub(crate) struct Stream<S>(S);

impl<S: Read + Write> Stream<S> {
    /// Begins a migration to the other side.
    pub(crate) fn begin(mut io: S) -> Result<Self, StreamError> {
        let mut start = MAGIC.to_vec();
        start.extend(VERSION.to_le_bytes());
        io.write_all(&start).map_err(StreamError::Io)?;
        Ok(Self(io))
    }

    /// Takes a migration from the other side.
    pub(crate) fn accept(mut io: S) -> Result<Self, StreamError> {
        let mut magic = [0; MAGIC.len()];
        io.read_exact(&mut magic).map_err(StreamError::Io)?;
        if magic != MAGIC {
            return Err(StreamError::NotAMigration);
        }
        let mut version = [0; 4];
        io.read_exact(&mut version).map_err(StreamError::Io)?;
        match u32::from_le_bytes(version) {
            VERSION => Ok(Self(io)),
            found => Err(StreamError::Version { found }),
        }
    }

    /// Sends a message.
    pub(crate) fn send(
        &mut self,
        kind: MessageKind,
        number: u64,
        contents: &[u8],
    ) -> Result<(), StreamError> {
        let len = u32::try_from(contents.len()).unwrap_or(u32::MAX);
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
        header[4..8].copy_from_slice(&len.to_le_bytes());
        header[8..].copy_from_slice(&number.to_le_bytes());
        self.0.write_all(&header).map_err(StreamError::Io)?;
        self.0.write_all(contents).map_err(StreamError::Io)
    }

    /// Passes on what was sent, if the connection collects it.
    pub(crate) fn flush(&mut self) -> Result<(), StreamError> {
        self.0.flush().map_err(StreamError::Io)
    }

    /// Tells the other side why it ends, if it still listens.
    pub(crate) fn refuse(&mut self, why: &str) {
        let end = why.floor_char_boundary(MAX_TEXT);
        let told = self.send(MessageKind::Refused, 0, &why.as_bytes()[..end]);
        if let Err(error) = told.and_then(|()| self.flush()) {
            tracing::debug!(%error, "the other side of a migration was not told of its end");
        }
    }

    /// Receives the next message, with its contents in `contents`.
    pub(crate) fn receive(&mut self, contents: &mut Vec<u8>) -> Result<Message, StreamError> {
        let mut header = [0; HEADER];
        self.0.read_exact(&mut header).map_err(StreamError::Io)?;
        let word = |at: usize| {
            let bytes = header[at..].first_chunk().copied();
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let (found, len) = (word(0), word(4));
        let number = u64::from(word(8)) | u64::from(word(12)) << 32;
        let known = MessageKind::ALL
            .into_iter()
            .find(|kind| *kind as u32 == found);
        let kind = known.ok_or(StreamError::Unexpected { found })?;
        let most = kind.max_len();
        if len as usize > most {
            let kind = found;
            return Err(StreamError::Length { kind, len, most });
        }
        contents.clear();
        // Grows with what arrives, not with what was promised.
        let read = (&mut self.0).take(len.into()).read_to_end(contents);
        if read.map_err(StreamError::Io)? < len as usize {
            return Err(StreamError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        if kind == MessageKind::Refused {
            return Err(StreamError::Refused(printable(contents)));
        }
        Ok(Message { kind, number })
    }

    /// Receives the next message, which must be of this kind and has no contents; returns its
    /// number.
    pub(crate) fn expect(&mut self, wanted: MessageKind) -> Result<u64, StreamError> {
        self.flush()?;
        let message = self.receive(&mut Vec::new())?;
        match message.kind == wanted {
            true => Ok(message.number),
            false => Err(StreamError::Unexpected {
                found: message.kind as u32,
            }),
        }
    }
}

/// Returns a text of the other side without what a terminal might obey.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Reads what was prepared, and keeps what is written.
    #[derive(Debug)]
    struct Prepared {
        input: Cursor<Vec<u8>>,
        output: Vec<u8>,
    }

    impl Read for Prepared {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.input.read(buf)
        }
    }

    impl Write for Prepared {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.output.write(buf)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn with(input: &[u8]) -> Prepared {
        Prepared {
            input: Cursor::new(input.to_vec()),
            output: Vec::new(),
        }
    }

    fn sent(send: impl FnOnce(&mut Stream<Prepared>)) -> Vec<u8> {
        let mut stream = Stream::begin(with(&[])).unwrap();
        send(&mut stream);
        stream.0.output
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let bytes = sent(|stream| {
            stream.send(MessageKind::Pages, 0x1000, &[7; 4096]).unwrap();
            stream.send(MessageKind::Round, 3, &[]).unwrap();
        });
        let mut stream = Stream::accept(with(&bytes)).unwrap();
        let mut contents = Vec::new();
        let first = stream.receive(&mut contents).unwrap();
        assert_eq!((first.kind, first.number), (MessageKind::Pages, 0x1000));
        assert_eq!(contents, [7; 4096]);
        assert_eq!(stream.expect(MessageKind::Round).unwrap(), 3);
        let end = stream.receive(&mut contents).unwrap_err();
        assert!(matches!(end, StreamError::Io(_)), "{end}");
    }

    #[test]
    fn another_program_or_version_is_refused() {
        let error = Stream::accept(with(b"GET / HTTP/1.1\r\n")).unwrap_err();
        assert!(matches!(error, StreamError::NotAMigration), "{error}");
        let mut bytes = sent(|_| ());
        bytes[8] = 9;
        let error = Stream::accept(with(&bytes)).unwrap_err();
        assert!(
            matches!(error, StreamError::Version { found: 9 }),
            "{error}"
        );
    }

    #[test]
    fn lengths_and_kinds_are_checked_before_anything_is_read() {
        let header = |kind: u32, len: u32| {
            let mut bytes = sent(|_| ());
            bytes.extend(kind.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.extend([0; 8]);
            bytes
        };
        let receive = |bytes: &[u8]| {
            let mut contents = Vec::new();
            let received = Stream::accept(with(bytes)).unwrap().receive(&mut contents);
            (received.unwrap_err(), contents.capacity())
        };
        let (error, _) = receive(&header(99, 0));
        assert!(matches!(error, StreamError::Unexpected { found: 99 }));
        for (kind, len) in [(2, MAX_PAGES as u32 + 1), (4, 1), (1, u32::MAX)] {
            let (error, capacity) = receive(&header(kind, len));
            assert!(matches!(error, StreamError::Length { .. }), "{error}");
            assert_eq!(capacity, 0);
        }
        // A promise of 64 MiB that is not kept.
        let (error, capacity) = receive(&header(1, 64 << 20));
        assert!(matches!(error, StreamError::Io(_)), "{error}");
        assert!(capacity < 1 << 20, "{capacity}");
    }

    #[test]
    fn a_reason_is_cut_and_cannot_control_a_terminal() {
        let why = format!("no\x1b[2J {}", "é".repeat(2000));
        let bytes = sent(|stream| stream.refuse(&why));
        let mut stream = Stream::accept(with(&bytes)).unwrap();
        let error = stream.expect(MessageKind::Accept).unwrap_err();
        let StreamError::Refused(text) = error else {
            panic!("{error}");
        };
        assert!(text.starts_with("no [2J é") && text.len() <= MAX_TEXT);
    }
}
