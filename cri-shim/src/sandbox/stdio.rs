//! A program's standard streams, between this process's own and the guest.
//!
//! Each stream is one vsock connection that begins with the id which the request for the
//! container named. Bytes are moved by a thread per direction: the user's files may be of
//! any kind, and regular ones cannot be waited for in any other way.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use podvisor_agent_protocol::{STDIO_PORT, StreamId, api};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Notify, oneshot};
use tracing::debug;

use super::agent::{LinkError, Mux};
use super::random;
use super::spec::TerminalSize;

/// Bytes moved at once.
const BUFFER: usize = 64 << 10;

/// Why the streams could not be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StdioError {
    /// The way into the guest.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The host has no random bytes.
    #[error("cannot get random bytes from the kernel")]
    Random(#[source] io::Error),
    /// A connection or thread cannot be set up.
    #[error("cannot set up the program's {name}")]
    SetUp {
        /// Which stream.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The user's file refused the program's output.
    #[error("cannot write the program's output to {name}")]
    Output {
        /// Which stream.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Whether the program reads what podvisor is given on its stdin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// It does.
    Attached,
    /// It reads the end of the file at once; on a terminal, nothing comes.
    None,
}

/// What streams a program has, before they are connected.
#[derive(Debug)]
pub(crate) struct Streams {
    input: Input,
    /// Input's own stream; on a terminal it is part of `output`.
    stdin: Option<StreamId>,
    output: StreamId,
    /// A terminal has no second output.
    errors: Option<StreamId>,
    terminal: Option<TerminalSize>,
}

impl Streams {
    /// Draws the ids for a program with or without a terminal.
    pub(crate) fn new(input: Input, terminal: Option<TerminalSize>) -> Result<Self, StdioError> {
        let pipes = terminal.is_none();
        Ok(Self {
            input,
            stdin: (pipes && input == Input::Attached)
                .then(stream_id)
                .transpose()?,
            output: stream_id()?,
            errors: pipes.then(stream_id).transpose()?,
            terminal,
        })
    }

    /// The size of the program's terminal, if it has one.
    pub(crate) fn terminal(&self) -> Option<TerminalSize> {
        self.terminal
    }

    /// Whether the program reads what podvisor is given.
    pub(crate) fn input(&self) -> Input {
        self.input
    }

    /// The streams as the request for a container names them.
    pub(crate) fn request(&self) -> api::Stdio {
        let field = |id: Option<StreamId>| id.map_or_else(Vec::new, |id| id.as_bytes().to_vec());
        api::Stdio {
            stdin: field(self.stdin),
            stdout: field(Some(self.output)),
            stderr: field(self.errors),
            terminal: self.terminal.is_some(),
            columns: self.terminal.map_or(0, |size| size.columns.into()),
            rows: self.terminal.map_or(0, |size| size.rows.into()),
            ..Default::default()
        }
    }

    /// Connects the streams and moves their bytes until they end.
    pub(crate) async fn attach(self, mux: &Mux) -> Result<Outputs, StdioError> {
        let output = Arc::new(connect(mux, "stdout", self.output).await?);
        let errors = match self.errors {
            Some(id) => Some(connect(mux, "stderr", id).await?),
            None => None,
        };
        let stdin = match (self.stdin, self.terminal, self.input) {
            (Some(id), _, _) => Some(Arc::new(connect(mux, "stdin", id).await?)),
            (None, Some(_), Input::Attached) => Some(Arc::clone(&output)),
            _ => None,
        };

        // Nobody waits for this one: it may sit in a read of the terminal for ever.
        if let Some(stream) = stdin {
            let pump = move || send_input(io::stdin().as_fd(), &stream);
            spawn("stdin", pump)?;
        }
        let broken = Arc::new(Notify::new());
        let (done, stdout) = oneshot::channel();
        let tell = Arc::clone(&broken);
        spawn("stdout", move || {
            // Nobody waits for it any more when the program was given up.
            let _ = done.send(move_output("stdout", &output, io::stdout().as_fd(), &tell));
        })?;
        let stderr = match errors {
            Some(stream) => {
                let (done, stderr) = oneshot::channel();
                let tell = Arc::clone(&broken);
                spawn("stderr", move || {
                    let _ = done.send(move_output("stderr", &stream, io::stderr().as_fd(), &tell));
                })?;
                Some(stderr)
            }
            None => None,
        };
        Ok(Outputs {
            stdout,
            stderr,
            broken,
        })
    }
}

fn stream_id() -> Result<StreamId, StdioError> {
    loop {
        // All zeros, the one id that is none, comes once in 2¹²⁸.
        if let Ok(id) = StreamId::new(random().map_err(StdioError::Random)?) {
            return Ok(id);
        }
    }
}

async fn connect(mux: &Mux, name: &'static str, id: StreamId) -> Result<UnixStream, StdioError> {
    let mut stream = mux.connect(STDIO_PORT).await?;
    let blocking = async {
        stream.write_all(id.as_bytes()).await?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    };
    blocking
        .await
        .map_err(|source| StdioError::SetUp { name, source })
}

fn spawn(name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<(), StdioError> {
    match thread::Builder::new().name(name.to_owned()).spawn(run) {
        Ok(_) => Ok(()),
        Err(source) => Err(StdioError::SetUp { name, source }),
    }
}

/// The program's outputs on their way to the user.
#[derive(Debug)]
pub(crate) struct Outputs {
    stdout: oneshot::Receiver<Result<(), StdioError>>,
    stderr: Option<oneshot::Receiver<Result<(), StdioError>>>,
    broken: Arc<Notify>,
}

impl Outputs {
    /// Is notified when one of the user's files takes no more: its reader has gone away, or
    /// its disk is full.
    pub(crate) fn broken(&self) -> Arc<Notify> {
        Arc::clone(&self.broken)
    }

    /// Waits until the user's files have all that the program wrote.
    pub(crate) async fn finish(self) -> Result<(), StdioError> {
        let ended = |result: Result<_, _>| result.unwrap_or(Ok(()));
        let stdout = ended(self.stdout.await);
        let stderr = match self.stderr {
            Some(stderr) => ended(stderr.await),
            None => Ok(()),
        };
        stdout.and(stderr)
    }
}

/// Moves the user's input to the program until either has had enough.
fn send_input(from: BorrowedFd<'_>, to: &UnixStream) {
    let mut buffer = vec![0; BUFFER];
    loop {
        match read(from, &mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                if let Err(error) = write_all(to.as_fd(), &buffer[..count]) {
                    // A program that does not read its input is no error.
                    debug!(%error, "the program's stdin is closed");
                    return;
                }
            }
            Err(error) => {
                debug!(%error, "cannot read stdin");
                break;
            }
        }
    }
    // The other end may be gone already.
    let _ = to.shutdown(Shutdown::Write);
}

/// Moves the program's output to the user's file. When the file takes no more, the stream is
/// closed and `broken` told; a reader that has gone away is no error.
fn move_output(
    name: &'static str,
    from: &UnixStream,
    to: BorrowedFd<'_>,
    broken: &Notify,
) -> Result<(), StdioError> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = match read(from.as_fd(), &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) => {
                // The guest closed the connection the hard way: what came, came.
                debug!(stream = name, %error, "the program's output ended");
                return Ok(());
            }
        };
        match write_all(to, &buffer[..count]) {
            Ok(()) => {}
            Err(error) => {
                let _ = from.shutdown(Shutdown::Both);
                broken.notify_one();
                return match error {
                    Errno::PIPE => Ok(()),
                    error => Err(StdioError::Output {
                        name,
                        source: error.into(),
                    }),
                };
            }
        }
    }
}

fn read(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::read(from, &mut *buffer) {
            Err(Errno::INTR) => {}
            // The file may be shared with a program that made it non-blocking.
            Err(Errno::AGAIN) => wait_for(from, PollFlags::IN)?,
            done => return done,
        }
    }
}

fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(to, PollFlags::OUT)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for(file: BorrowedFd<'_>, flags: PollFlags) -> Result<(), Errno> {
    match poll(&mut [PollFd::new(&file, flags)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn pipes_name_three_streams_and_a_terminal_one() {
        let pipes = Streams::new(Input::Attached, None).unwrap().request();
        assert_eq!(
            [pipes.stdin.len(), pipes.stdout.len(), pipes.stderr.len()],
            [16, 16, 16]
        );
        assert_ne!(pipes.stdout, pipes.stderr);
        let closed = Streams::new(Input::None, None).unwrap().request();
        assert!(closed.stdin.is_empty());
        let size = TerminalSize {
            rows: 5,
            columns: 7,
        };
        let terminal = Streams::new(Input::Attached, Some(size)).unwrap().request();
        assert!(terminal.terminal && terminal.stdin.is_empty() && terminal.stderr.is_empty());
        assert_eq!((terminal.rows, terminal.columns), (5, 7));
    }

    #[test]
    fn output_passes_whole_through_a_file_that_does_not_block() {
        let (guest, host) = UnixStream::pair().unwrap();
        let (mut reader, writer) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let expected = sent.clone();
        let guest = thread::spawn(move || (&guest).write_all(&sent));
        let pump =
            thread::spawn(move || move_output("stdout", &host, writer.as_fd(), &Notify::new()));
        let mut received = Vec::new();
        reader.read_to_end(&mut received).unwrap();
        guest.join().unwrap().unwrap();
        pump.join().unwrap().unwrap();
        assert_eq!(received.len(), expected.len());
        assert!(received == expected);
    }

    #[test]
    fn a_reader_that_goes_away_ends_the_stream_and_is_no_error() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        guest.write_all(b"x").unwrap();
        move_output("stdout", &host, writer.as_fd(), &Notify::new()).unwrap();
        let error = guest.write_all(b"y").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_stream() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        guest.write_all(b"x").unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = move_output("stdout", &host, full.as_fd(), &Notify::new()).unwrap_err();
        assert!(matches!(error, StdioError::Output { name: "stdout", .. }));
    }

    #[test]
    fn the_end_of_the_input_is_passed_on_and_output_still_comes() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"hi").unwrap();
        drop(writer);
        send_input(reader.as_fd(), &host);
        let mut received = String::new();
        guest.read_to_string(&mut received).unwrap();
        assert_eq!(received, "hi");
        guest.write_all(b"there").unwrap();
        drop(guest);
        let mut answer = String::new();
        (&host).read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "there");
    }

    #[test]
    fn a_program_that_does_not_read_its_input_ends_the_pump() {
        let (guest, host) = UnixStream::pair().unwrap();
        drop(guest);
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"hi").unwrap();
        send_input(reader.as_fd(), &host);
        drop(writer);
    }
}
