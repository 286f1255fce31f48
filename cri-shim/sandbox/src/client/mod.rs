//! The client of a sandbox's process: requests over its control socket. The connection is here; the
//! requests are in `calls`, those about memory and CPUs in `resources`, those to QEMU's guest agent
//! in `guest_agent`, those about moving machines in `migration`, and those about dumps of memory in
//! `dump`.

mod calls;
mod connection;
mod dump;
mod guest_agent;
mod migration;
mod plug;
mod replies;
mod resources;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use podvisor_host::request;
use podvisor_host::stall_timeout::timeout;
use podvisor_host::watch as watch_fd;
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::error::SandboxError;
use super::post_mortem;
use super::printable::printable;
use super::shared::SharedDirectory;
use super::types::{RefusalKind, SandboxExit};
use super::wire::{
    Answer, CONTROL_VERSION, Call, FrameError, FrameReader, FrameWriter, Greeting, MAX_FDS,
    MAX_FRAME, Request,
};
use connection::Connection;
use replies::{CloseReplies, Outgoing, PendingReplies, receive_answers, send_requests};

/// How long a process may take to answer a new connection. Its guest is not involved.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a request that involves the guest may take: longer than the agent's own limit.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a process may take to end after its guest's grace period.
const EXIT_MARGIN: Duration = Duration::from_secs(20);

/// How long a process may take to report that its machine has ended.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Delay before watching a process again that could not be watched.
const WATCH_RETRY: Duration = Duration::from_secs(1);

/// Most characters of a refusal's message that are passed on.
const MAX_MESSAGE_CHARS: usize = 4 << 10;

/// Most missing layers of a jail that are passed on, and characters of each: the real ones are
/// fewer, and their names shorter.
const MAX_MISSING_LAYERS: usize = 16;
const MAX_LAYER_NAME_CHARS: usize = 64;

/// Most requests in the queue for sending.
const SEND_QUEUE: usize = 64;

/// A running sandbox, as seen from outside its process. Clones refer to the same sandbox; the
/// sandbox keeps running when all of them are dropped.
///
/// Calls may be made from any number of tasks. If the future of a call is dropped, the call may or
/// may not have been carried out.
#[derive(Debug, Clone)]
pub struct SandboxClient {
    inner: Arc<Inner>,
    greeting: Arc<Greeting>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    pid: u32,
    process: Arc<AsyncFd<OwnedFd>>,
    next: AtomicU64,
    waiting: Arc<PendingReplies>,
    requests: mpsc::Sender<Outgoing>,
    /// How the sandbox ended, once its machine or its process has ended.
    machine: watch::Receiver<Option<SandboxExit>>,
    /// As `machine`, but once its process is gone.
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

/// A pending request, which is removed when this is dropped.
struct PendingReply<'a> {
    inner: &'a Inner,
    number: u64,
    /// The process is notified if there is no answer by then: it might otherwise wait forever.
    is_told: bool,
}

impl Drop for PendingReply<'_> {
    fn drop(&mut self) {
        if self.inner.waiting.forget(self.number) && self.is_told {
            self.inner.abandon(self.number);
        }
    }
}

impl Inner {
    /// Waits for the end of the process in the caller's runtime, and returns how the sandbox ended.
    async fn ended_here(&self) -> SandboxExit {
        loop {
            let process = self.process.get_ref().try_clone();
            match process.and_then(watch_fd::readable) {
                Ok(process) if process.readable().await.is_ok() => break,
                Ok(_) => {}
                Err(error) => debug!(%error, "failed to watch the process of a sandbox"),
            }
            // Descriptors ran out, or this runtime ends.
            sleep(WATCH_RETRY).await;
        }
        // Its directory may be removed by now.
        post_mortem::exit_of(&self.dir).unwrap_or(SandboxExit::Died)
    }

    /// Tells the process that the request of this number is no longer waited for.
    fn abandon(&self, number: u64) {
        let request = Request {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            call: Call::Abandon { number },
            request: None,
        };
        let Ok(body) = serde_json::to_vec(&request) else {
            return;
        };
        let fds = Vec::new();
        let full = match self.requests.try_send(Outgoing { body, fds }) {
            Err(TrySendError::Full(outgoing)) => outgoing,
            // Without a connection, the process does not wait either.
            Ok(()) | Err(TrySendError::Closed(_)) => return,
        };
        if let Ok(runtime) = Handle::try_current() {
            let requests = self.requests.clone();
            runtime.spawn(async move {
                // Fails if the connection is closed.
                let _ = requests.send(full).await;
            });
        }
    }
}

impl SandboxClient {
    /// Connects to a running sandbox by its directory.
    ///
    /// # Errors
    /// [`SandboxError::Gone`] if its process is gone, [`SandboxError::Unresponsive`] if it does not
    /// answer within some seconds.
    pub async fn connect(dir: &Path) -> Result<Self, SandboxError> {
        Self::connect_within(dir, CONNECT_TIMEOUT).await
    }

    /// As [`Self::connect`], with another time limit.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_within(dir: &Path, limit: Duration) -> Result<Self, SandboxError> {
        let mut pid = None;
        let connected = async {
            let connection = Connection::open(dir).await?;
            pid = Some(connection.pid());
            Self::over(connection, dir).greeted(dir).await
        };
        match timeout(limit, connected).await {
            Ok(client) => client,
            Err(_) => Err(SandboxError::Unresponsive {
                dir: dir.to_owned(),
                pid,
                waited: limit,
            }),
        }
    }

    /// Waits for the process's greeting.
    async fn greeted(mut self, dir: &Path) -> Result<Self, SandboxError> {
        // An answer proves that the process still lives, so its pid was not reused in between.
        let hello = Call::Hello {
            version: CONTROL_VERSION,
        };
        match self.call(hello, Vec::new()).await? {
            (Answer::Hello(mut greeting), _) if greeting.version == CONTROL_VERSION => {
                greeting.missing_layers.truncate(MAX_MISSING_LAYERS);
                for layer in &mut greeting.missing_layers {
                    *layer = printable(layer, MAX_LAYER_NAME_CHARS);
                }
                self.greeting = Arc::new(greeting);
                Ok(self)
            }
            (Answer::Hello(greeting), _) => Err(SandboxError::Version {
                dir: dir.to_owned(),
                theirs: greeting.version,
                ours: CONTROL_VERSION,
            }),
            _ => Err(self.unfit()),
        }
    }

    /// Kills the process of a sandbox that does not answer, and the machine with it; returns when
    /// it is gone. A process that is gone already is not an error.
    ///
    /// # Errors
    /// It cannot be found or killed, or [`SandboxError::Unresponsive`]: it was killed and does not
    /// end, such as a process that waits for a disk.
    pub async fn kill(dir: &Path) -> Result<(), SandboxError> {
        let mut pid = None;
        let killed = async {
            let connection = Connection::open(dir).await?;
            pid = Some(connection.pid());
            connection.kill(dir).await
        };
        match timeout(CONNECT_TIMEOUT, killed).await {
            Ok(Ok(()) | Err(SandboxError::Gone { .. })) => {
                post_mortem::exit_of(dir);
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(SandboxError::Unresponsive {
                dir: dir.to_owned(),
                pid,
                waited: CONNECT_TIMEOUT,
            }),
        }
    }

    fn over(connection: Connection, dir: &Path) -> Self {
        let (stream, pid, process) = connection.into_parts();
        let stream = Arc::new(stream);
        let process = Arc::new(process);
        let waiting = Arc::new(PendingReplies::new());
        let (requests, outgoing) = mpsc::channel(SEND_QUEUE);
        let (machine_sender, machine) = watch::channel(None);
        let (exit_sender, exit) = watch::channel(None);
        let tasks = [
            tokio::spawn(send_requests(
                FrameWriter::new(Arc::clone(&stream)),
                outgoing,
            )),
            tokio::spawn(receive_answers(
                FrameReader::new(stream),
                CloseReplies(Arc::clone(&waiting)),
                Arc::clone(&process),
                dir.to_owned(),
                machine_sender,
                exit_sender,
            )),
        ];
        Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                pid,
                process,
                next: AtomicU64::new(0),
                waiting,
                requests,
                machine,
                exit,
                tasks,
            }),
            greeting: Arc::default(),
        }
    }

    /// Returns the pid of the sandbox's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.inner.pid
    }

    /// Returns the directory `dir` of the host, which the sandbox shares with its guest, as it is
    /// where volumes are mounted in it: in the mount namespace of the sandbox's process.
    ///
    /// # Errors
    /// The kernel's: the process has ended, or its namespace may not be looked at (that takes
    /// `CAP_SYS_PTRACE`).
    pub fn shared_directory(&self, dir: &Path) -> std::io::Result<SharedDirectory> {
        let pidfd = self.inner.process.get_ref().try_clone()?;
        SharedDirectory::of_process(dir, self.inner.pid, pidfd)
    }

    /// The layers of its jail that the host does not have, by name: `user namespace`, `Landlock`,
    /// `part of Landlock`, `control group`, `device control group`, `mapped users`.
    #[must_use]
    pub fn missing_layers(&self) -> &[String] {
        &self.greeting.missing_layers
    }

    /// Returns the sandbox's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// Waits until the sandbox's process is gone, and returns how the sandbox ended. The runtime in
    /// which the client was created may be gone.
    pub async fn ended(&self) -> SandboxExit {
        self.told(self.inner.exit.clone()).await
    }

    /// Waits until the sandbox's machine has ended and its process has recorded how, and returns
    /// that: nothing runs in the guest any more, and its logs are complete. The process itself may
    /// take some more time to tear the machine down, which [`Self::ended`] waits for. If the
    /// runtime in which the client was created is gone, this waits for that, too.
    pub async fn machine_ended(&self) -> SandboxExit {
        self.told(self.inner.machine.clone()).await
    }

    /// Waits until it is known how the sandbox ended.
    async fn told(&self, mut exit: watch::Receiver<Option<SandboxExit>>) -> SandboxExit {
        let known = exit.wait_for(Option::is_some).await;
        match known.ok().and_then(|exit| exit.clone()) {
            Some(exit) => exit,
            // The sending task ended before it could send this: its runtime is gone.
            None => self.inner.ended_here().await,
        }
    }

    /// Whether the machine has ended, though its process may still answer.
    pub async fn has_ended(&self) -> bool {
        match timeout(EXIT_REPORT_TIMEOUT, self.wait_for(Call::Ended, Vec::new())).await {
            Ok(Ok((Answer::Ended(_), _))) => true,
            Ok(Err(error)) => error.is_gone(),
            _ => false,
        }
    }

    /// Ends the sandbox: the guest is asked to stop, and killed if it does not within `grace`.
    /// Returns when the process is gone; it is killed if it takes much longer than that. The
    /// sandbox ends, too, if this future is dropped. Of several calls, the earliest deadline holds.
    ///
    /// # Errors
    /// It was killed and does not end. A sandbox that is gone already is not an error.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), SandboxError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let asked = async {
            match self.done(Call::Shutdown { grace_ms }, Vec::new()).await {
                Ok(()) | Err(SandboxError::Gone { .. }) => {
                    self.ended().await;
                    Ok(())
                }
                Err(error) => Err(error),
            }
        };
        match timeout(grace.saturating_add(EXIT_MARGIN), asked).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                warn!(dir = %self.dir().display(), %error, "the sandbox is killed");
                self.kill_now().await
            }
            Err(_) => {
                warn!(dir = %self.dir().display(), "the sandbox did not end and is killed");
                self.kill_now().await
            }
        }
    }

    /// Kills the process, and the machine with it; returns when it is gone.
    ///
    /// # Errors
    /// It cannot be killed, or does not end, such as a process that waits for a disk.
    pub async fn kill_now(&self) -> Result<(), SandboxError> {
        match pidfd_send_signal(self.inner.process.get_ref(), Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => {
                return Err(SandboxError::File {
                    action: "kill the process of the sandbox in",
                    path: self.inner.dir.clone(),
                    source: error.into(),
                });
            }
        }
        let ended = timeout(CONNECT_TIMEOUT, self.ended()).await;
        ended
            .map(|_| ())
            .map_err(|_| self.unresponsive(CONNECT_TIMEOUT))
    }

    fn unresponsive(&self, waited: Duration) -> SandboxError {
        SandboxError::Unresponsive {
            dir: self.inner.dir.clone(),
            pid: Some(self.inner.pid),
            waited,
        }
    }

    async fn done(&self, call: Call, fds: Vec<OwnedFd>) -> Result<(), SandboxError> {
        match self.call(call, fds).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    /// Sends a request that is answered in bounded time.
    async fn call(
        &self,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        self.call_within(REQUEST_TIMEOUT, call, fds).await
    }

    /// Sends a request; a process that has not answered within `limit` is unresponsive.
    async fn call_within(
        &self,
        limit: Duration,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        match timeout(limit, self.wait_for(call, fds)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.unresponsive(limit)),
        }
    }

    /// Sends a request whose answer comes when an event happens, without a time limit.
    async fn wait_for(
        &self,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        let inner = &self.inner;
        let number = inner.next.fetch_add(1, Ordering::Relaxed);
        let is_told = call.is_wait() && self.greeting.drops_waits;
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
        // Too many files for one frame would end the connection, which other requests use.
        if fds.len() > MAX_FDS {
            let message = format!(
                "a request with {} files, and at most {MAX_FDS} are possible: images, disks and \
                 a log",
                fds.len()
            );
            return Err(SandboxError::refused(RefusalKind::InvalidArgument, message));
        }
        let Some(answer) = inner.waiting.add(number) else {
            return Err(self.lost().await);
        };
        let _asked = PendingReply {
            inner,
            number,
            is_told,
        };
        if inner.requests.send(Outgoing { body, fds }).await.is_err() {
            return Err(self.lost().await);
        }
        match answer.await {
            Ok(Ok((Ok(answer), fds))) => Ok((answer, fds)),
            Ok(Ok((Err(refusal), _))) => {
                let message = printable(&refusal.message, MAX_MESSAGE_CHARS);
                Err(SandboxError::refused(refusal.kind, message))
            }
            Ok(Err(error)) => Err(self.control(error.into())),
            Err(_) => Err(self.lost().await),
        }
    }

    /// The error of a call when the connection is lost.
    async fn lost(&self) -> SandboxError {
        // The process closes the connection just before it ends.
        let exit = timeout(EXIT_TIMEOUT, self.ended()).await;
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

/// How long to wait for the end of the process after its connection was lost.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

fn gone(dir: &Path) -> SandboxError {
    SandboxError::Gone {
        dir: dir.to_owned(),
        exit: post_mortem::exit_of(dir),
    }
}

#[cfg(test)]
mod tests;
