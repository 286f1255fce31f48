//! Another program in a container, run to its end with its output collected (ExecSync).

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::time::Duration;

use k8s_cri::v1::{ExecSyncRequest, ExecSyncResponse};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use tracing::debug;

use crate::cri::error::{CriError, Result};
use crate::cri::node::Node;
use crate::cri::spec;
use crate::request;
use crate::sandbox::{Exec, ProcessExit, SandboxClient, SandboxError, StdioFds, random_id};

/// Bytes kept of each stream. The kubelet takes messages of 16 MiB; what a probe prints
/// beyond that is read and dropped.
const OUTPUT_BYTES: usize = (16 << 20) / 2 - (64 << 10);

const SIGKILL: u32 = 9;

impl Node {
    /// ExecSync.
    pub(in crate::cri) async fn exec_sync(
        &self,
        request: ExecSyncRequest,
    ) -> Result<ExecSyncResponse> {
        let container = self.container(&request.container_id)?;
        container.running()?;
        let record = container.record();
        let process = spec::exec_process(&record.process, &request.cmd, false)?;
        let client = container.pod.client()?;
        let exec_id = random_id().map_err(CriError::host("make up an id"))?;
        let (stdout, stdout_end) = pipe()?;
        let (stderr, stderr_end) = pipe()?;
        let (stdout, stderr) = (collect(stdout), collect(stderr));
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
        let exit = match seconds {
            0 => command.exit().await?,
            seconds => {
                let limit = Duration::from_secs(seconds);
                let late = |_| CriError::Deadline {
                    what: "the command",
                    seconds: request.timeout,
                };
                timeout(limit, command.exit()).await.map_err(late)??
            }
        };
        Ok(ExecSyncResponse {
            stdout: collected(stdout).await?,
            stderr: collected(stderr).await?,
            exit_code: exit.code,
        })
    }
}

/// A command in a container. Dropped before its end, it is killed: its time is over, or nobody
/// waits for it any more.
struct Command {
    client: SandboxClient,
    container: String,
    id: String,
    /// A start that is under way must not be left to itself: it could not be killed.
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

    async fn exit(&mut self) -> Result<ProcessExit> {
        if let Some(starting) = &mut self.starting {
            let started = starting.await;
            self.starting = None;
            match started {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    self.has_ended = true;
                    return Err(error.into());
                }
                Err(error) => {
                    let failed = CriError::host("start the command");
                    return Err(failed(error.into()));
                }
            }
        }
        let exit = self.client.wait(&self.container, Some(&self.id)).await?;
        self.has_ended = true;
        Ok(exit)
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
                // One that was not started has nothing to be killed.
                let _ = starting.await;
            }
            let killed = client.signal(&container, Some(&id), SIGKILL, false).await;
            if let Err(error) = killed {
                debug!(%error, "the command that is to be killed has ended by itself");
            }
        });
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let made = pipe_with(PipeFlags::CLOEXEC);
    made.map_err(|error| CriError::host("make a pipe")(error.into()))
}

/// Reads all of a pipe and keeps its beginning.
fn collect(pipe: OwnedFd) -> JoinHandle<std::io::Result<Vec<u8>>> {
    spawn_blocking(move || {
        let mut pipe = File::from(pipe);
        let mut kept = Vec::new();
        (&mut pipe)
            .take(OUTPUT_BYTES as u64)
            .read_to_end(&mut kept)?;
        std::io::copy(&mut pipe, &mut std::io::sink())?;
        Ok(kept)
    })
}

async fn collected(output: JoinHandle<std::io::Result<Vec<u8>>>) -> Result<Vec<u8>> {
    let read = output.await.unwrap_or_else(|error| Err(error.into()));
    read.map_err(CriError::host("read the output of the command"))
}
