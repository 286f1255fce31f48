//! A process's outputs on their way to files, until they end or are cut off.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use podvisor_host::stall_timeout::timeout;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use tokio::sync::{Notify, oneshot};
use tracing::debug;

use super::StdioError;
use super::files::{BUFFER, read, spawn, write_all};

/// The most that is still read from an output that is cut off: more than the buffers between the
/// guest and the host hold.
pub(super) const MAX_REST: usize = 2 << 20;

pub(super) type Moved = oneshot::Receiver<Result<(), StdioError>>;

pub(super) fn output(
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
pub(super) struct OutputEvents {
    broken: Arc<BrokenOutput>,
    /// An event counter; what can be read of the outputs once it is set is their rest.
    cut_off: Arc<OwnedFd>,
}

impl OutputEvents {
    pub(super) fn new() -> Result<Self, StdioError> {
        let cut_off = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| StdioError::SetUp {
            name: "output",
            source: error.into(),
        })?;
        Ok(Self {
            broken: Arc::default(),
            cut_off: Arc::new(cut_off),
        })
    }

    pub(super) fn cut_off(&self) {
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
    pub(super) stdout: Option<Moved>,
    pub(super) stderr: Option<Moved>,
    pub(super) events: OutputEvents,
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
    pub(crate) async fn finish_within(self, limit: Duration) -> Result<bool, StdioError> {
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
pub(super) fn move_output(
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
