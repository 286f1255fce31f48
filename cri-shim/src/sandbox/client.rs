//! The way to a sandbox's process: requests over its control socket.

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oci_spec::runtime::LinuxResources;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::debug;

use super::cgroup;
use super::error::{RefusalKind, SandboxError};
use super::launch::{self, CONTROL_SOCKET};
use super::record;
use super::template;
use super::types::{
    ContainerInfo, ContainerStats, ContainerUser, CreateContainer, Exec, LaunchConfig, ProcessExit,
    SandboxExit, Started, StdioFds, TerminalSize,
};
use super::watch as watch_fd;
use super::wire::{
    Answer, CONTROL_VERSION, Call, CreateHeader, ExecHeader, FrameError, FrameReader, FrameWriter,
    MAX_FRAME, Reply, Request, StdioHeader,
};

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
    /// configured. When the future is dropped before, nothing is left of the sandbox but files
    /// in its directory.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch(config: LaunchConfig) -> Result<Self, SandboxError> {
        Self::launch_program(Path::new(template::THIS_PROGRAM), config).await
    }

    /// As [`Self::launch`], with another executable of podvisor.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch_program(
        program: &Path,
        config: LaunchConfig,
    ) -> Result<Self, SandboxError> {
        let dir = config.dir.clone();
        let launched = launch::launch(program, config).await?;
        let client = Self::connect(&dir).await?;
        launched.keep();
        Ok(client)
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

    /// Makes a container; its process waits for the start. Says who that will be.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn create_container(
        &self,
        container: CreateContainer,
    ) -> Result<ContainerUser, SandboxError> {
        let (volumes, images): (Vec<_>, Vec<_>) = container
            .volumes
            .into_iter()
            .map(|volume| (volume.digest, volume.image))
            .unzip();
        let header = CreateHeader {
            id: container.id,
            image_digest: container.image_digest,
            volumes,
            readonly_rootfs: container.readonly_rootfs,
            spec: container.spec,
            user: container.user,
            supplemental_groups: container.supplemental_groups,
            has_log: container.log.is_some(),
            tty: container.tty,
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            etc_hosts: container.etc_hosts,
            etc_resolv_conf: container.etc_resolv_conf,
            etc_hostname: container.etc_hostname,
        };
        let fds = [container.image].into_iter().chain(images);
        let fds = fds.chain(container.log).collect();
        match self.call(Call::Create(Box::new(header)), fds).await? {
            (Answer::Created(user), _) => Ok(user),
            _ => Err(self.unfit()),
        }
    }

    /// Lets a container's process run.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn start_container(&self, id: &str) -> Result<Started, SandboxError> {
        let call = Call::Start { id: id.to_owned() };
        match self.call(call, Vec::new()).await? {
            (Answer::Started(started), _) => Ok(started),
            _ => Err(self.unfit()),
        }
    }

    /// Sends a signal to a process, or with `all` to each of the container's.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn signal(
        &self,
        id: &str,
        exec_id: Option<&str>,
        signal: u32,
        all: bool,
    ) -> Result<(), SandboxError> {
        let call = Call::Signal {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
            signal,
            all,
        };
        self.done(call, Vec::new()).await
    }

    /// Waits for the end of a process, however long that takes; its output has been written
    /// then. May be asked again; of processes that `exec` started, the sandbox remembers the
    /// last 256 that ended.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn wait(&self, id: &str, exec_id: Option<&str>) -> Result<ProcessExit, SandboxError> {
        let call = Call::Wait {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
        };
        match self.call(call, Vec::new()).await? {
            (Answer::Exit(exit), _) => Ok(exit),
            _ => Err(self.unfit()),
        }
    }

    /// Kills what is left of a container and frees what it held. One that does not exist is
    /// no error.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn delete_container(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::Delete { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Starts a further process in a running container. Its streams are served until they
    /// end, by the sandbox's process.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn exec(&self, id: &str, exec: Exec) -> Result<(), SandboxError> {
        let (stdio, fds) = split(exec.stdio);
        let header = ExecHeader {
            id: id.to_owned(),
            exec_id: exec.exec_id,
            process: exec.process,
            user: exec.user,
            supplemental_groups: exec.supplemental_groups,
            tty: exec.tty,
            stdio,
        };
        self.done(Call::Exec(Box::new(header)), fds).await
    }

    /// Connects files to the streams of a container's process, from now on. The files are
    /// closed when the process's output has ended. An attacher that falls more than 1 MiB
    /// behind is disconnected: nobody else waits for it.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn attach(&self, id: &str, stdio: StdioFds) -> Result<(), SandboxError> {
        self.attach_as(id, stdio, false).await
    }

    /// As [`Self::attach`], and the process waits for this reader as for the end of a pipe: it
    /// gets all of the output, however slowly it reads.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn attach_whole(&self, id: &str, stdio: StdioFds) -> Result<(), SandboxError> {
        self.attach_as(id, stdio, true).await
    }

    async fn attach_as(
        &self,
        id: &str,
        stdio: StdioFds,
        is_whole: bool,
    ) -> Result<(), SandboxError> {
        let (stdio, fds) = split(stdio);
        let call = Call::Attach {
            id: id.to_owned(),
            stdio,
            is_whole,
        };
        self.done(call, fds).await
    }

    /// From now on the sandbox shuts itself down when this container's process has ended.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn end_with(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::EndWith { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Asks a container to end by a signal; when it still runs after `grace`, the sandbox kills
    /// it. The deadline is the sandbox's: it holds whether or not anybody is connected. Returns
    /// at once; [`Self::wait`] tells the end. Of several requests the earliest deadline holds.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn stop_container(
        &self,
        id: &str,
        signal: u32,
        grace: Duration,
    ) -> Result<(), SandboxError> {
        let call = Call::Stop {
            id: id.to_owned(),
            signal,
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        };
        self.done(call, Vec::new()).await
    }

    /// Stops the guest between two instructions.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when it is paused already, or a device is in the middle of
    /// something long; or the sandbox is gone.
    pub async fn pause(&self) -> Result<(), SandboxError> {
        self.done(Call::Pause, Vec::new()).await
    }

    /// Lets a paused guest go on; its clock is set.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when it is not paused, or the sandbox is gone.
    pub async fn resume(&self) -> Result<(), SandboxError> {
        self.done(Call::Resume, Vec::new()).await
    }

    /// Whether the guest is paused.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn is_paused(&self) -> Result<bool, SandboxError> {
        match self.call(Call::IsPaused, Vec::new()).await? {
            (Answer::IsPaused(is_paused), _) => Ok(is_paused),
            _ => Err(self.unfit()),
        }
    }

    /// Tells a process's terminal its size.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn resize(
        &self,
        id: &str,
        exec_id: Option<&str>,
        size: TerminalSize,
    ) -> Result<(), SandboxError> {
        let call = Call::Resize {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
            size,
        };
        self.done(call, Vec::new()).await
    }

    /// Gives a container another log, as after a rotation. Each line is in one of the two.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn reopen_log(&self, id: &str, log: OwnedFd) -> Result<(), SandboxError> {
        let call = Call::ReopenLog { id: id.to_owned() };
        self.done(call, vec![log]).await
    }

    /// What a container uses.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn stats(&self, id: &str) -> Result<ContainerStats, SandboxError> {
        let call = Call::Stats { id: id.to_owned() };
        match self.call(call, Vec::new()).await? {
            (Answer::Stats(stats), _) => Ok(*stats),
            _ => Err(self.unfit()),
        }
    }

    /// The sandbox's containers, in the order of their ids.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        match self.call(Call::List, Vec::new()).await? {
            (Answer::List(list), _) => Ok(list),
            _ => Err(self.unfit()),
        }
    }

    /// Changes a container's limits; what `resources` leaves out stays as it is.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), SandboxError> {
        let call = Call::UpdateResources {
            id: id.to_owned(),
            resources: Box::new(resources.clone()),
        };
        self.done(call, Vec::new()).await
    }

    /// A stream socket (non-blocking) that is connected to a TCP port of the guest's loopback.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn port_forward(&self, port: u16) -> Result<OwnedFd, SandboxError> {
        match self.call(Call::PortForward { port }, Vec::new()).await? {
            (Answer::Stream, mut fds) if fds.len() == 1 => fds.pop().ok_or_else(|| self.unfit()),
            _ => Err(self.unfit()),
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
        let body = serde_json::to_vec(&Request { number, call });
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

fn split(stdio: StdioFds) -> (StdioHeader, Vec<OwnedFd>) {
    let header = StdioHeader {
        stdin: stdio.stdin.is_some(),
        stdout: stdio.stdout.is_some(),
        stderr: stdio.stderr.is_some(),
    };
    let fds = [stdio.stdin, stdio.stdout, stdio.stderr];
    (header, fds.into_iter().flatten().collect())
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
