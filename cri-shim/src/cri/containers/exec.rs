//! Runs a command in a container to its end and collects its output (ExecSync).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use podvisor_cri_messages::{ExecSyncRequest, ExecSyncResponse};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{SemaphorePermit, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::debug;

use crate::cri::error::{CriError, Result};
use crate::cri::node::{Node, OutputRoom};
use crate::cri::spec;
use crate::request;
use crate::sandbox::{Exec, ProcessExit, SandboxClient, SandboxError, StdioFds, random_id};
use crate::signal::SIGKILL;

/// Bytes kept of each stream. The kubelet accepts messages of 16 MiB; output beyond this is read
/// and dropped.
const OUTPUT_BYTES: usize = (16 << 20) / 2 - (64 << 10);

/// Size of a read: a pipe's capacity.
const PIPE_BYTES: usize = 64 << 10;

/// How long output may pause after the command has ended. A process that it left running, possibly
/// forever, may still hold its streams.
const OUTPUT_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long output may continue after the command has ended.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the answer waits for the end of a command that is killed after its timeout: a hanging
/// guest must not delay it.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The beginning of a stream's output.
#[derive(Debug)]
struct CapturedOutput<'a> {
    bytes: Vec<u8>,
    room: &'a OutputRoom,
    /// The permit for all of the bytes.
    taken: Option<SemaphorePermit<'a>>,
    /// Output was dropped.
    is_cut: bool,
}

impl<'a> CapturedOutput<'a> {
    fn new(room: &'a OutputRoom) -> Self {
        Self {
            bytes: Vec::new(),
            room,
            taken: None,
            is_cut: false,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let room = OUTPUT_BYTES.saturating_sub(self.bytes.len());
        let fitting = bytes.get(..room).unwrap_or(bytes);
        if self.is_cut || fitting.is_empty() {
            return;
        }
        let Some(taken) = self.room.take(fitting.len()) else {
            debug!("commands of other containers have written so much that no more is kept");
            self.is_cut = true;
            return;
        };
        match &mut self.taken {
            Some(all) => all.merge(taken),
            all => *all = Some(taken),
        }
        self.bytes.extend_from_slice(fitting);
    }
}

impl Node {
    /// ExecSync.
    pub(in crate::cri) async fn exec_sync(
        &self,
        request: ExecSyncRequest,
    ) -> Result<ExecSyncResponse> {
        let container = self.settled_container(&request.container_id).await?;
        container.running()?;
        let record = container.record();
        let process = spec::exec_process(&record.process, &request.cmd, false)?;
        let client = container.pod.client()?;
        let exec_id = random_id().map_err(CriError::host("make up an id"))?;
        let (stdout, stdout_end) = pipe()?;
        let (stderr, stderr_end) = pipe()?;
        let (ended, has_ended) = watch::channel(false);
        // Concurrently: a full pipe of one stream would block the command.
        let output = async {
            let collected = tokio::try_join!(
                collect(stdout, has_ended.clone(), &self.output_room),
                collect(stderr, has_ended.clone(), &self.output_room)
            );
            collected.map_err(CriError::host("read the output of the command"))
        };
        let exec = Exec {
            exec_id: exec_id.clone(),
            process,
            user: record.user,
            supplemental_groups: record.groups,
            tty: None,
            stdio: StdioFds {
                stdin: None,
                stdout: Some(stdout_end),
                stderr: Some(stderr_end),
            },
        };
        let mut command = Command::start(client, container.id.clone(), exec_id, exec);
        let seconds = u64::try_from(request.timeout).unwrap_or(0);
        let exit = async {
            let exit = match seconds {
                0 => command.exit().await?,
                seconds => {
                    let limit = Duration::from_secs(seconds);
                    match timeout(limit, command.exit()).await {
                        Ok(exit) => exit?,
                        Err(_) => {
                            command.kill().await;
                            return Err(CriError::Deadline {
                                what: "the command",
                                seconds: request.timeout,
                            });
                        }
                    }
                }
            };
            ended.send_replace(true);
            Ok(exit)
        };
        let (exit, (stdout, stderr)) = tokio::try_join!(exit, output)?;
        Ok(ExecSyncResponse {
            stdout: stdout.bytes,
            stderr: stderr.bytes,
            exit_code: exit.code,
        })
    }
}

/// A command in a container. It is killed if this is dropped before its end.
struct Command {
    client: SandboxClient,
    container: String,
    id: String,
    /// A start in progress; it must complete, since the command could not be killed before.
    starting: Option<JoinHandle<Result<(), SandboxError>>>,
    has_ended: bool,
}

impl Command {
    fn start(client: SandboxClient, container: String, id: String, exec: Exec) -> Self {
        let (starter, name) = (client.clone(), container.clone());
        let starting = request::spawn(async move { starter.exec(&name, exec).await });
        Self {
            client,
            container,
            id,
            starting: Some(starting),
            has_ended: false,
        }
    }

    async fn started(&mut self) -> Result<()> {
        let Some(starting) = &mut self.starting else {
            return Ok(());
        };
        let started = starting.await;
        self.starting = None;
        match started {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                self.has_ended = true;
                Err(error.into())
            }
            Err(error) => {
                let failed = CriError::host("start the command");
                Err(failed(error.into()))
            }
        }
    }

    async fn exit(&mut self) -> Result<ProcessExit> {
        self.started().await?;
        let exit = self.client.wait(&self.container, Some(&self.id)).await?;
        self.has_ended = true;
        Ok(exit)
    }

    /// Kills it and waits for its end, for at most [`KILL_TIMEOUT`], so that the command is gone
    /// when its timeout is reported.
    async fn kill(&mut self) {
        let killed = async {
            self.started().await?;
            kill(&self.client, &self.container, &self.id).await;
            self.exit().await
        };
        match timeout(KILL_TIMEOUT, killed).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, "the command that was to be killed is not there"),
            Err(_) => debug!("the command that was killed has not ended yet"),
        }
    }
}

async fn kill(client: &SandboxClient, container: &str, id: &str) {
    let killed = client
        .signal(container, Some(id), SIGKILL.into(), false)
        .await;
    if let Err(error) = killed {
        debug!(%error, "the command that is to be killed has ended by itself");
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (client, starting) = (self.client.clone(), self.starting.take());
        let (container, id) = (self.container.clone(), self.id.clone());
        tokio::spawn(async move {
            if let Some(starting) = starting {
                // If it was not started, there is nothing to kill.
                let _ = starting.await;
            }
            kill(&client, &container, &id).await;
        });
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let made = pipe_with(PipeFlags::CLOEXEC);
    made.map_err(|error| CriError::host("make a pipe")(error.into()))
}

/// Reads a pipe to its end and keeps the beginning, as far as `room` allows.
async fn collect(
    pipe: OwnedFd,
    mut has_ended: watch::Receiver<bool>,
    room: &OutputRoom,
) -> io::Result<CapturedOutput<'_>> {
    let mut pipe = Receiver::from_owned_fd(pipe)?;
    let mut kept = CapturedOutput::new(room);
    let mut buffer = vec![0; PIPE_BYTES];
    let mut end = None;
    loop {
        let is_over = *has_ended.borrow_and_update();
        if is_over && Instant::now() >= *end.get_or_insert_with(|| Instant::now() + OUTPUT_TIMEOUT)
        {
            return Ok(kept);
        }
        let count = tokio::select! {
            count = pipe.read(&mut buffer) => count?,
            () = tokio::time::sleep(OUTPUT_IDLE_TIMEOUT), if is_over => 0,
            // The sender lives as long as this future.
            _ = has_ended.changed(), if !is_over => continue,
        };
        if count == 0 {
            return Ok(kept);
        }
        kept.push(buffer.get(..count).unwrap_or(&buffer));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn output_is_read_to_its_end_and_its_beginning_kept() {
        let (reader, writer) = pipe().unwrap();
        let (_ended, has_ended) = watch::channel(false);
        let writer = std::thread::spawn(move || {
            let mut writer = std::fs::File::from(writer);
            writer.write_all(&vec![7; OUTPUT_BYTES + 5]).unwrap();
        });
        let room = OutputRoom::default();
        let kept = collect(reader, has_ended, &room).await.unwrap().bytes;
        writer.join().unwrap();
        assert_eq!(kept.len(), OUTPUT_BYTES);
        assert!(kept.iter().all(|byte| *byte == 7));
    }

    #[tokio::test(start_paused = true)]
    async fn output_that_has_no_room_beside_that_of_others_is_dropped() {
        let room = OutputRoom::of(PIPE_BYTES * 3);
        let read = async |count: usize| {
            let (reader, writer) = pipe().unwrap();
            let (_ended, has_ended) = watch::channel(false);
            let writer = std::thread::spawn(move || {
                let mut writer = std::fs::File::from(writer);
                writer.write_all(&vec![7; count]).unwrap();
            });
            let kept = collect(reader, has_ended, &room).await.unwrap();
            writer.join().unwrap();
            kept
        };
        let first = read(PIPE_BYTES * 2).await;
        assert_eq!(first.bytes.len(), PIPE_BYTES * 2);
        let second = read(PIPE_BYTES * 8).await;
        assert!(second.is_cut && second.bytes.len() <= PIPE_BYTES);
        assert!(read(0).await.bytes.is_empty());
        drop((first, second));
        assert_eq!(read(PIPE_BYTES * 3).await.bytes.len(), PIPE_BYTES * 3);
    }

    #[tokio::test(start_paused = true)]
    async fn who_holds_the_output_of_a_command_that_ended_is_not_waited_for() {
        let (reader, writer) = pipe().unwrap();
        let (ended, has_ended) = watch::channel(false);
        let mut held = std::fs::File::from(writer);
        held.write_all(b"said").unwrap();
        ended.send_replace(true);
        let room = OutputRoom::default();
        let kept = collect(reader, has_ended, &room).await.unwrap();
        assert_eq!(kept.bytes, b"said");
        held.write_all(b"on").unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn who_never_stops_writing_is_not_read_for_ever() {
        let (reader, writer) = pipe().unwrap();
        let (ended, has_ended) = watch::channel(false);
        ended.send_replace(true);
        let mut held = std::fs::File::from(writer);
        let writing = tokio::spawn(async move {
            while held.write_all(b".").is_ok() {
                tokio::time::sleep(OUTPUT_IDLE_TIMEOUT / 5).await;
            }
        });
        let room = OutputRoom::default();
        let kept = collect(reader, has_ended, &room).await.unwrap().bytes;
        assert!((59..=62).contains(&kept.len()), "{}", kept.len());
        writing.await.unwrap();
    }
}
