//! The ends of a process's streams, which are served from and to files.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing::debug;

use super::error::StdioError;
use super::files::{BUFFER, read, spawn, write_all};
use super::outputs::{OutputEvents, Outputs, output};
use super::stream_set::StreamSet;
use crate::types::StdioFds;

/// The guest's ends of a process's streams.
#[derive(Debug)]
pub(crate) struct GuestStreams {
    pub(crate) input: Option<GuestInput>,
    pub(crate) output: Option<Arc<UnixStream>>,
    pub(crate) errors: Option<Arc<UnixStream>>,
}

/// The way to a process's input.
#[derive(Debug, Clone)]
pub(crate) struct GuestInput {
    pub(super) stream: Arc<UnixStream>,
    pub(super) is_terminal: bool,
}

impl GuestInput {
    /// Moves input from a file until the file ends or the process reads no more. True if it was the
    /// file that ended.
    pub(crate) fn take_from(&self, from: BorrowedFd<'_>) -> bool {
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
    pub(crate) fn close(&self) {
        // The other end may be gone already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl GuestStreams {
    /// The streams of a console, which is one connected stream in both directions.
    pub(crate) fn of_console(stream: UnixStream) -> Self {
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
    pub(crate) fn serve(self, files: StdioFds) -> Result<Outputs, StdioError> {
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
/// [`SandboxClient::attach_whole`](crate::SandboxClient::attach_whole) or with an exec, and the
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
