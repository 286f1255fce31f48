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
use crate::sandbox::{Exec, StdioFds, random_id};

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
        let run = async {
            client.exec(&container.id, exec).await?;
            client.wait(&container.id, Some(&exec_id)).await
        };
        let seconds = u64::try_from(request.timeout).unwrap_or(0);
        let ran = match seconds {
            0 => Some(run.await),
            seconds => timeout(Duration::from_secs(seconds), run).await.ok(),
        };
        let Some(ran) = ran else {
            let killed = client
                .signal(&container.id, Some(&exec_id), SIGKILL, false)
                .await;
            if let Err(error) = killed {
                debug!(%error, "the program that took too long has ended by itself");
            }
            return Err(CriError::Deadline {
                what: "the command",
                seconds: request.timeout,
            });
        };
        let exit = ran?;
        Ok(ExecSyncResponse {
            stdout: collected(stdout).await?,
            stderr: collected(stderr).await?,
            exit_code: exit.code,
        })
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
