//! A process's standard streams, connected between the guest and files that are passed in.
//!
//! Each stream is one vsock connection that starts with the id given in the request for the
//! process. Bytes are moved by a thread per direction: the files may be of any kind, and regular
//! files do not support polling.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use podvisor_agent_protocol::{STDIO_PORT, StreamId, api};
use podvisor_host::stall_timeout::timeout;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Notify, oneshot};
use tracing::debug;

use super::agent::{LinkError, Mux};
use super::random;
use super::types::{StdioFds, TerminalSize};

/// Size of the buffer for moving bytes.
const BUFFER: usize = 64 << 10;

/// The most that is still read from an output that is cut off: more than the buffers between the
/// guest and the host hold.
const MAX_REST: usize = 2 << 20;

/// Stack size of a thread that moves bytes: its buffer is not on it.
const STACK: usize = 128 << 10;

/// An error of serving the streams.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StdioError {
    /// The connection to the guest failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The host has no random bytes.
    #[error("cannot get random bytes from the kernel")]
    Random(#[source] io::Error),
    /// A connection or thread cannot be set up.
    #[error("cannot set up the program's {name}")]
    SetUp {
        /// The name of the stream.
        name: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The user's file did not accept the program's output.
    #[error("cannot write the program's output to {name}")]
    Output {
        /// The name of the stream.
        name: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

/// The standard streams that a process has; the others are `/dev/null`. On a terminal, stdin and
/// stderr are part of stdout's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamSet {
    /// Input may be written to it. A terminal without it gets no keys.
    pub stdin: bool,
    /// Its stdout is read.
    pub stdout: bool,
    /// Its stderr is read.
    pub stderr: bool,
}

impl StreamSet {
    /// The streams of `files`.
    #[must_use]
    pub fn of(files: &StdioFds) -> Self {
        Self {
            stdin: files.stdin.is_some(),
            stdout: files.stdout.is_some(),
            stderr: files.stderr.is_some(),
        }
    }
}

/// The streams of a process, before they are connected.
#[derive(Debug)]
pub struct Streams {
    has_input: bool,
    /// The stream of stdin only; on a terminal, input is part of `output`.
    stdin: Option<StreamId>,
    output: Option<StreamId>,
    /// `None` for a terminal, which has only one output.
    errors: Option<StreamId>,
    terminal: Option<TerminalSize>,
}

impl Streams {
    /// Draws the streams' ids for a process with or without a terminal.
    ///
    /// # Errors
    /// The host has no random bytes.
    pub fn new(set: StreamSet, terminal: Option<TerminalSize>) -> Result<Self, StdioError> {
        let pipes = terminal.is_none();
        let id = |wanted: bool| wanted.then(stream_id).transpose();
        Ok(Self {
            has_input: set.stdin,
            stdin: id(pipes && set.stdin)?,
            output: id(!pipes || set.stdout)?,
            errors: id(pipes && set.stderr)?,
            terminal,
        })
    }

    /// The size of the process's terminal, if it has one.
    #[must_use]
    pub fn terminal(&self) -> Option<TerminalSize> {
        self.terminal
    }

    /// Whether the process has an input that may be written to.
    #[must_use]
    pub fn has_input(&self) -> bool {
        self.has_input
    }

    /// Returns the streams as the request for a process names them.
    #[must_use]
    pub fn request(&self) -> api::Stdio {
        let field = |id: Option<StreamId>| id.map_or_else(Vec::new, |id| id.as_bytes().to_vec());
        api::Stdio {
            stdin: field(self.stdin),
            stdout: field(self.output),
            stderr: field(self.errors),
            terminal: self.terminal.is_some(),
            columns: self.terminal.map_or(0, |size| size.columns.into()),
            rows: self.terminal.map_or(0, |size| size.rows.into()),
            ..Default::default()
        }
    }

    /// Connects the streams.
    pub(super) async fn connect(&self, mux: &Mux) -> Result<GuestStreams, StdioError> {
        let output = match self.output {
            Some(id) => Some(Arc::new(connect(mux, "stdout", id).await?)),
            None => None,
        };
        let errors = match self.errors {
            Some(id) => Some(Arc::new(connect(mux, "stderr", id).await?)),
            None => None,
        };
        let stream = match self.stdin {
            Some(id) => Some(Arc::new(connect(mux, "stdin", id).await?)),
            None if self.has_input && self.terminal.is_some() => output.clone(),
            None => None,
        };
        let is_terminal = self.terminal.is_some();
        Ok(GuestStreams {
            input: stream.map(|stream| GuestInput {
                stream,
                is_terminal,
            }),
            output,
            errors,
        })
    }

    /// Connects the outputs of a process without a terminal, to be read by this process.
    pub(super) async fn open_outputs(
        &self,
        mux: &Mux,
    ) -> Result<[tokio::net::UnixStream; 2], StdioError> {
        let id = |stream: Option<StreamId>| stream.map_or_else(stream_id, Ok);
        Ok([
            open(mux, "stdout", id(self.output)?).await?,
            open(mux, "stderr", id(self.errors)?).await?,
        ])
    }

    /// Connects the streams and moves bytes between them and `files` until they end.
    ///
    /// # Errors
    /// [`StdioError`]; connections that were made are closed again.
    pub async fn attach(self, mux: &Mux, files: StdioFds) -> Result<Outputs, StdioError> {
        self.connect(mux).await?.serve(files)
    }
}

/// Draws the id of a stream.
pub(super) fn stream_id() -> Result<StreamId, StdioError> {
    loop {
        // All zeros, the only invalid id, is drawn once in 2¹²⁸ times.
        if let Ok(id) = StreamId::new(random().map_err(StdioError::Random)?) {
            return Ok(id);
        }
    }
}

/// Connects to the guest and sends the stream's id.
pub(super) async fn open(
    mux: &Mux,
    name: &'static str,
    id: StreamId,
) -> Result<tokio::net::UnixStream, StdioError> {
    let mut stream = mux.connect(STDIO_PORT).await?;
    match stream.write_all(id.as_bytes()).await {
        Ok(()) => Ok(stream),
        Err(source) => Err(StdioError::SetUp { name, source }),
    }
}

async fn connect(mux: &Mux, name: &'static str, id: StreamId) -> Result<UnixStream, StdioError> {
    let blocking = |stream: tokio::net::UnixStream| {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    };
    blocking(open(mux, name, id).await?).map_err(|source| StdioError::SetUp { name, source })
}

/// Starts a thread that moves bytes.
pub(super) fn spawn(
    name: &'static str,
    run: impl FnOnce() + Send + 'static,
) -> Result<(), StdioError> {
    let builder = thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK);
    match builder.spawn(run) {
        Ok(_) => Ok(()),
        Err(source) => Err(StdioError::SetUp { name, source }),
    }
}

/// The guest's ends of a process's streams.
#[derive(Debug)]
pub(super) struct GuestStreams {
    pub(super) input: Option<GuestInput>,
    pub(super) output: Option<Arc<UnixStream>>,
    pub(super) errors: Option<Arc<UnixStream>>,
}

/// The way to a process's input.
#[derive(Debug, Clone)]
pub(super) struct GuestInput {
    stream: Arc<UnixStream>,
    is_terminal: bool,
}

impl GuestInput {
    /// Moves input from a file until the file ends or the process reads no more. True if it was the
    /// file that ended.
    pub(super) fn take_from(&self, from: BorrowedFd<'_>) -> bool {
        let mut buffer = vec![0; BUFFER];
        while self.is_wanted(from) {
            match read(from, &mut buffer) {
                Ok(0) => return true,
                Ok(count) => {
                    if let Err(error) = write_all(self.stream.as_fd(), &buffer[..count]) {
                        // That a program does not read its input is not an error.
                        debug!(%error, "the program's stdin is closed");
                        return false;
                    }
                }
                Err(error) => {
                    debug!(%error, "cannot read stdin");
                    return true;
                }
            }
        }
        false
    }

    /// Waits until `from` is readable or has ended; false if the guest reads no more.
    fn is_wanted(&self, from: BorrowedFd<'_>) -> bool {
        // The guest never sends on a stream that only carries input. On a terminal's stream, the
        // end of the output is the end of the process.
        let closed = if self.is_terminal {
            PollFlags::RDHUP
        } else {
            PollFlags::empty()
        };
        let both = &mut [
            PollFd::from_borrowed_fd(from, PollFlags::IN),
            PollFd::from_borrowed_fd(self.stream.as_fd(), closed),
        ];
        match poll(both, None) {
            Ok(_) => both[1].revents().is_empty(),
            Err(Errno::INTR) => true,
            Err(error) => {
                debug!(%error, "cannot wait for stdin");
                false
            }
        }
    }

    /// Tells the process that its input has ended.
    pub(super) fn close(&self) {
        // The other end may be gone already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl GuestStreams {
    /// The streams of a console, which is one connected stream in both directions.
    pub(super) fn of_console(stream: UnixStream) -> Self {
        let stream = Arc::new(stream);
        Self {
            input: Some(GuestInput {
                stream: Arc::clone(&stream),
                is_terminal: true,
            }),
            output: Some(stream),
            errors: None,
        }
    }

    /// Moves bytes between the guest and `files` until they end.
    pub(super) fn serve(self, files: StdioFds) -> Result<Outputs, StdioError> {
        // Not waited for: it may sit in a read of a terminal forever.
        if let (Some(input), Some(file)) = (self.input, files.stdin) {
            spawn("stdin", move || {
                if input.take_from(file.as_fd()) {
                    input.close();
                }
            })?;
        }
        let events = OutputEvents::new()?;
        Ok(Outputs {
            stdout: output("stdout", self.output, files.stdout, &events)?,
            stderr: output("stderr", self.errors, files.stderr, &events)?,
            events,
        })
    }
}

/// Streams between this process and a sandbox's: one end of each is sent there, by
/// [`SandboxClient::attach_whole`](super::SandboxClient::attach_whole) or with an exec, and the
/// other is served here.
#[derive(Debug)]
pub struct AttachedStreams {
    ours: GuestStreams,
}

impl AttachedStreams {
    /// Creates the streams, and returns the ends for the sandbox.
    ///
    /// # Errors
    /// No more descriptors are available.
    pub fn new(set: StreamSet) -> Result<(Self, StdioFds), StdioError> {
        let pair = |wanted: bool, name: &'static str| match wanted {
            true => UnixStream::pair()
                .map(|(ours, theirs)| (Some(Arc::new(ours)), Some(OwnedFd::from(theirs))))
                .map_err(|source| StdioError::SetUp { name, source }),
            false => Ok((None, None)),
        };
        let (input, stdin) = pair(set.stdin, "stdin")?;
        let (output, stdout) = pair(set.stdout, "stdout")?;
        let (errors, stderr) = pair(set.stderr, "stderr")?;
        let ours = GuestStreams {
            input: input.map(|stream| GuestInput {
                stream,
                is_terminal: false,
            }),
            output,
            errors,
        };
        let theirs = StdioFds {
            stdin,
            stdout,
            stderr,
        };
        Ok((Self { ours }, theirs))
    }

    /// Moves bytes between the sandbox and `files` until they end.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(self, files: StdioFds) -> Result<Outputs, StdioError> {
        self.ours.serve(files)
    }
}

type Moved = oneshot::Receiver<Result<(), StdioError>>;

fn output(
    name: &'static str,
    from: Option<Arc<UnixStream>>,
    to: Option<OwnedFd>,
    events: &OutputEvents,
) -> Result<Option<Moved>, StdioError> {
    let (Some(from), Some(to)) = (from, to) else {
        return Ok(None);
    };
    let (done, moved) = oneshot::channel();
    let events = events.clone();
    spawn(name, move || {
        let result = move_output(name, &from, to.as_fd(), &events);
        // Closed before the result is sent, so that its receiver finds the end of the file.
        drop(to);
        // There is no receiver any more if the run was cancelled.
        let _ = done.send(result);
    })?;
    Ok(Some(moved))
}

/// Tells when one of the files of a process's outputs accepts no more.
#[derive(Debug, Default)]
pub struct BrokenOutput {
    told: Notify,
    /// What failed, and why.
    failure: OnceLock<(&'static str, Errno)>,
}

impl BrokenOutput {
    /// Waits until one of the files accepts no more, and returns the reason; `None` if it is that
    /// its reader is gone.
    pub async fn wait(&self) -> Option<StdioError> {
        self.told.notified().await;
        let (name, error) = *self.failure.get()?;
        Some(StdioError::Output {
            name,
            source: error.into(),
        })
    }

    fn tell(&self, name: &'static str, error: Errno) {
        if error != Errno::PIPE {
            // The first one counts.
            let _ = self.failure.set((name, error));
        }
        self.told.notify_one();
    }
}

/// What the threads that move a process's outputs tell and are told.
#[derive(Debug, Clone)]
struct OutputEvents {
    broken: Arc<BrokenOutput>,
    /// An event counter; what can be read of the outputs once it is set is their rest.
    cut_off: Arc<OwnedFd>,
}

impl OutputEvents {
    fn new() -> Result<Self, StdioError> {
        let cut_off = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| StdioError::SetUp {
            name: "output",
            source: error.into(),
        })?;
        Ok(Self {
            broken: Arc::default(),
            cut_off: Arc::new(cut_off),
        })
    }

    fn cut_off(&self) {
        // Fails only for a counter at its maximum.
        let _ = rustix::io::write(&*self.cut_off, &1_u64.to_ne_bytes());
    }

    /// Waits until `from` can be read or has ended, or the outputs are cut off; true if they are.
    fn wait(&self, from: &UnixStream) -> Result<bool, Errno> {
        let both = &mut [
            PollFd::new(from, PollFlags::IN),
            PollFd::new(&*self.cut_off, PollFlags::IN),
        ];
        loop {
            match poll(both, None) {
                Ok(_) => return Ok(!both[1].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A process's outputs while they are moved to their files.
#[derive(Debug)]
pub struct Outputs {
    stdout: Option<Moved>,
    stderr: Option<Moved>,
    events: OutputEvents,
}

impl Outputs {
    /// Returns what tells when one of the files accepts no more: its reader is gone, or its disk is
    /// full.
    #[must_use]
    pub fn broken(&self) -> Arc<BrokenOutput> {
        Arc::clone(&self.events.broken)
    }

    /// Waits like [`finish`](Self::finish) for `limit`, then moves what is there already and ends:
    /// a process that the one that ended has left may have its outputs open for good. False if they
    /// were cut off so; slow readers of the files still get all, but are not waited for.
    pub(super) async fn finish_within(self, limit: Duration) -> Result<bool, StdioError> {
        let events = self.events.clone();
        match timeout(limit, self.finish()).await {
            Ok(finished) => finished.map(|()| true),
            Err(_) => {
                events.cut_off();
                Ok(false)
            }
        }
    }

    /// Waits until the files have everything that the process wrote.
    ///
    /// # Errors
    /// [`StdioError::Output`] if a file did not accept it.
    pub async fn finish(self) -> Result<(), StdioError> {
        let ended = async |moved: Option<Moved>| match moved {
            Some(moved) => moved.await.unwrap_or(Ok(())),
            None => Ok(()),
        };
        let stdout = ended(self.stdout).await;
        let stderr = ended(self.stderr).await;
        stdout.and(stderr)
    }
}

/// Moves the program's output to the user's file, until it ends or is cut off. If the file accepts
/// no more, the stream is closed and `broken` notified; a reader that is gone is not an error.
fn move_output(
    name: &'static str,
    from: &UnixStream,
    to: BorrowedFd<'_>,
    events: &OutputEvents,
) -> Result<(), StdioError> {
    let mut buffer = vec![0; BUFFER];
    let mut rest = MAX_REST;
    loop {
        let received = events.wait(from).and_then(|is_cut_off| {
            if is_cut_off && (rest == 0 || !is_readable(from)?) {
                return Ok(0);
            }
            let count = read(from.as_fd(), &mut buffer)?;
            if is_cut_off {
                rest = rest.saturating_sub(count);
            }
            Ok(count)
        });
        let count = match received {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) => {
                // The guest reset the connection: what was received is complete.
                debug!(stream = name, %error, "the program's output ended");
                return Ok(());
            }
        };
        match write_all(to, &buffer[..count]) {
            Ok(()) => {}
            Err(error) => {
                let _ = from.shutdown(Shutdown::Both);
                events.broken.tell(name, error);
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

/// Whether a read of `from` does not block.
fn is_readable(from: &UnixStream) -> Result<bool, Errno> {
    let now = Timespec::default();
    poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&now)).map(|ready| ready > 0)
}

/// Reads at least one byte, unless the file has ended.
pub fn read(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::read(from, &mut *buffer) {
            Err(Errno::INTR) => {}
            // The file may be shared with a program that made it non-blocking.
            Err(Errno::AGAIN) => wait_for(from, PollFlags::IN)?,
            done => return done,
        }
    }
}

/// Writes all of `bytes`. A file that another program made non-blocking is waited for.
pub fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
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
#[path = "stdio_tests.rs"]
mod tests;
