//! The way to a sandbox's process: requests over its control socket. Here is the connection;
//! `calls` has what is asked.

mod calls;

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::debug;

use super::cgroup;
use super::error::{RefusalKind, SandboxError};
use super::launch::{CONTROL_SOCKET, Launching};
use super::record;
use super::types::{GuestNetwork, LaunchConfig, SandboxExit};
use super::watch as watch_fd;
use super::wire::{
    Answer, CONTROL_VERSION, Call, FrameError, FrameReader, FrameWriter, MAX_FRAME, Reply, Request,
};
use crate::request;

/// Requests that wait to be sent.
const UNSENT: usize = 64;

/// A running sandbox, as seen from outside its process. Clones are of the same sandbox; the
/// sandbox goes on when all of them are dropped.
///
/// Calls may be made from any number of tasks. A call whose future is dropped may or may not
/// have been carried out.
#[derive(Debug, Clone)]
pub struct SandboxClient {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    pid: u32,
    next: AtomicU64,
    waiting: Arc<Waiting>,
    requests: mpsc::Sender<Outgoing>,
    exit: watch::Receiver<Option<SandboxExit>>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A frame on its way out.
#[derive(Debug)]
struct Outgoing {
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

type Answered = (Result<Answer, super::wire::Refusal>, Vec<OwnedFd>);

/// Who waits for which answer; none any more once the connection is lost.
#[derive(Debug)]
struct Waiting(Mutex<Option<HashMap<u64, oneshot::Sender<Answered>>>>);

impl Waiting {
    fn add(&self, number: u64) -> Option<oneshot::Receiver<Answered>> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.as_mut()?.insert(number, sender);
        Some(receiver)
    }

    fn answered(&self, number: u64, answer: Answered) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asker = waiting.as_mut().and_then(|map| map.remove(&number));
        if let Some(asker) = asker {
            // Who does not wait any more needs no answer.
            let _ = asker.send(answer);
        }
    }

    fn close(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl SandboxClient {
    /// Starts a sandbox: a process of its own (this executable again, as `podvisor sandbox`),
    /// detached, that outlives this one. Returns when the agent has answered and the guest is
    /// configured, with `network` as its interfaces and routes. When the future is dropped
    /// before, nothing is left of the sandbox but files in its directory. [`Launching`] is for
    /// networks that are not known yet.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch(config: LaunchConfig, network: GuestNetwork) -> Result<Self, SandboxError> {
        Launching::begin(config).await?.finish(network).await
    }

    /// As [`Self::launch`], with another executable of podvisor.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch_program(
        program: &Path,
        config: LaunchConfig,
        network: GuestNetwork,
    ) -> Result<Self, SandboxError> {
        let launching = Launching::begin_program(program, config).await?;
        launching.finish(network).await
    }

    /// Finds a running sandbox again by its directory.
    ///
    /// # Errors
    /// [`SandboxError::Gone`] when its process is.
    pub async fn connect(dir: &Path) -> Result<Self, SandboxError> {
        let path = dir.join(CONTROL_SOCKET);
        let stream = match UnixStream::connect(&path).await {
            Ok(stream) => stream,
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    return Err(gone(dir));
                }
                _ => {
                    return Err(SandboxError::File {
                        action: "connect to",
                        path,
                        source: error,
                    });
                }
            },
        };
        let file_error = |source| SandboxError::File {
            action: "find the process behind",
            path: path.clone(),
            source,
        };
        let peer = stream.peer_cred().map_err(file_error)?.pid();
        let pid = peer.and_then(Pid::from_raw).ok_or_else(|| gone(dir))?;
        let process = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(process) => process,
            Err(rustix::io::Errno::SRCH) => return Err(gone(dir)),
            Err(error) => return Err(file_error(error.into())),
        };
        let process = watch_fd::readable(process).map_err(file_error)?;

        let stream = Arc::new(stream);
        let waiting = Arc::new(Waiting(Mutex::new(Some(HashMap::new()))));
        let (requests, outgoing) = mpsc::channel(UNSENT);
        let (exit_sender, exit) = watch::channel(None);
        let tasks = [
            tokio::spawn(write(FrameWriter::new(Arc::clone(&stream)), outgoing)),
            tokio::spawn(read(
                FrameReader::new(stream),
                Arc::clone(&waiting),
                process,
                dir.to_owned(),
                exit_sender,
            )),
        ];
        let client = Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                pid: pid.as_raw_nonzero().get().unsigned_abs(),
                next: AtomicU64::new(0),
                waiting,
                requests,
                exit,
                tasks,
            }),
        };
        // A process that was just answering for this pid answers here too: the number was not
        // given to another in between.
        let hello = Call::Hello {
            version: CONTROL_VERSION,
        };
        match client.call(hello, Vec::new()).await? {
            (Answer::Hello { version }, _) if version == CONTROL_VERSION => Ok(client),
            (Answer::Hello { version }, _) => Err(SandboxError::Version {
                dir: dir.to_owned(),
                theirs: version,
                ours: CONTROL_VERSION,
            }),
            _ => Err(client.unfit()),
        }
    }

    /// The sandbox's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.inner.pid
    }

    /// The sandbox's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// Waits until the sandbox's process is gone, and says how it ended.
    pub async fn ended(&self) -> SandboxExit {
        let mut exit = self.inner.exit.clone();
        let known = exit.wait_for(Option::is_some).await;
        match known.ok().and_then(|exit| exit.clone()) {
            Some(exit) => exit,
            // The task that says so ends after it has said it, or with the last client.
            None => pending().await,
        }
    }

    /// Ends the sandbox: the guest is asked to stop, and killed when it has not within `grace`.
    /// Returns when the process is gone; the sandbox ends too when this future is dropped. Of
    /// several calls, the earliest deadline holds.
    ///
    /// # Errors
    /// The control socket failed. That the sandbox is gone already is no error.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), SandboxError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        match self.done(Call::Shutdown { grace_ms }, Vec::new()).await {
            Ok(()) | Err(SandboxError::Gone { .. }) => {
                self.ended().await;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn done(&self, call: Call, fds: Vec<OwnedFd>) -> Result<(), SandboxError> {
        match self.call(call, fds).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    async fn call(
        &self,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        let inner = &self.inner;
        let number = inner.next.fetch_add(1, Ordering::Relaxed);
        let body = serde_json::to_vec(&Request {
            number,
            call,
            request: request::current(),
        });
        let body = body.map_err(|error| self.control(error.into()))?;
        if body.len() > MAX_FRAME {
            let message = format!("a request of {} bytes is too long", body.len());
            return Err(SandboxError::refused(RefusalKind::InvalidArgument, message));
        }
        let Some(answer) = inner.waiting.add(number) else {
            return Err(self.lost().await);
        };
        if inner.requests.send(Outgoing { body, fds }).await.is_err() {
            return Err(self.lost().await);
        }
        match answer.await {
            Ok((Ok(answer), fds)) => Ok((answer, fds)),
            Ok((Err(refusal), _)) => Err(SandboxError::refused(refusal.kind, refusal.message)),
            Err(_) => Err(self.lost().await),
        }
    }

    /// The error of a call when the connection is lost.
    async fn lost(&self) -> SandboxError {
        // The process closes the connection just before it ends.
        let exit = tokio::time::timeout(LOST, self.ended()).await;
        SandboxError::Gone {
            dir: self.inner.dir.clone(),
            exit: exit.ok(),
        }
    }

    fn unfit(&self) -> SandboxError {
        self.control(FrameError::Answer)
    }

    fn control(&self, source: FrameError) -> SandboxError {
        SandboxError::Control {
            dir: self.inner.dir.clone(),
            source,
        }
    }
}

/// How long the process of a lost connection may take to be gone.
const LOST: Duration = Duration::from_secs(5);

fn gone(dir: &Path) -> SandboxError {
    cgroup::remove_of(dir);
    SandboxError::Gone {
        dir: dir.to_owned(),
        exit: record::read(dir).map(|record| record.exit),
    }
}

async fn write(mut writer: FrameWriter, mut outgoing: mpsc::Receiver<Outgoing>) {
    while let Some(Outgoing { body, fds }) = outgoing.recv().await {
        if let Err(error) = writer.send(&body, &fds).await {
            // Whoever waits hears of it when the reader finds the connection closed.
            debug!(%error, "lost the control socket");
            return;
        }
    }
}

/// Passes answers on until the connection ends, then waits for the process's end.
async fn read(
    mut reader: FrameReader,
    waiting: Arc<Waiting>,
    process: AsyncFd<OwnedFd>,
    dir: PathBuf,
    exit: watch::Sender<Option<SandboxExit>>,
) {
    loop {
        match reader.next().await {
            Ok(Some(frame)) => match serde_json::from_slice::<Reply>(&frame.body) {
                Ok(reply) => waiting.answered(reply.number, (reply.answer, frame.fds)),
                Err(error) => {
                    debug!(%error, "an answer that is not understood");
                    break;
                }
            },
            Ok(None) => break,
            Err(error) => {
                debug!(%error, "lost the control socket");
                break;
            }
        }
    }
    drop(reader);
    waiting.close();
    // Fails only when the runtime shuts down.
    if process.readable().await.is_ok() {
        cgroup::remove_of(&dir);
        let ended = record::read(&dir).map_or(SandboxExit::Died, |record| record.exit);
        let _ = exit.send(Some(ended));
    }
}
