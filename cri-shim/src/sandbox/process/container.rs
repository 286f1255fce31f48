//! One container of the sandbox, and the processes that `exec` started in it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::super::agent::{Agent, now_ns};
use super::super::error::{RefusalKind, SandboxError};
use super::super::stdio::Outputs;
use super::super::types::{ContainerInfo, ContainerState, ProcessExit, Started};
use super::output::ContainerStreams;

/// How long output may still come when its process has ended: what it started may hold the
/// streams open for ever.
const DRAIN: Duration = Duration::from_secs(10);

/// Processes of `exec` that are remembered after they have ended.
const EXECS_REMEMBERED: usize = 256;

/// The exit of a process whose guest is gone: killed.
const KILLED: i32 = 128 + 9;

/// A container that the guest has.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) id: String,
    pub(super) streams: Arc<ContainerStreams>,
    info: Mutex<ContainerInfo>,
    exit: watch::Sender<Option<ProcessExit>>,
    execs: Mutex<VecDeque<ExecProcess>>,
}

#[derive(Debug)]
struct ExecProcess {
    id: String,
    exit: watch::Receiver<Option<ProcessExit>>,
}

impl Container {
    pub(super) fn new(id: String, pid: u32, streams: Arc<ContainerStreams>) -> Self {
        let info = ContainerInfo {
            id: id.clone(),
            state: ContainerState::Created,
            pid,
            started_at_ns: 0,
            exit: None,
        };
        Self {
            id,
            streams,
            info: Mutex::new(info),
            exit: watch::Sender::new(None),
            execs: Mutex::default(),
        }
    }

    pub(super) fn info(&self) -> ContainerInfo {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, ContainerInfo> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process runs; its end is waited for from now on.
    pub(super) fn started(self: &Arc<Self>, started: Started, agent: &Agent) {
        let mut info = self.lock();
        info.state = ContainerState::Running;
        info.pid = started.pid;
        info.started_at_ns = started.started_at_ns;
        drop(info);
        let (container, agent) = (Arc::clone(self), agent.clone());
        tokio::spawn(async move {
            let exit = wait(&agent, &container.id, "").await;
            container.drain().await;
            container.exited(exit);
        });
    }

    /// Waits for the rest of the output.
    async fn drain(&self) {
        if timeout(DRAIN, self.streams.ended()).await.is_err() {
            warn!(
                container = self.id,
                "the output goes on after the container's process"
            );
        }
    }

    fn exited(&self, exit: ProcessExit) {
        let mut info = self.lock();
        if info.exit.is_none() {
            info.state = ContainerState::Exited;
            info.exit = Some(exit);
            self.exit.send_replace(Some(exit));
        }
    }

    /// The guest is gone, and the container with it.
    pub(super) async fn guest_is_gone(&self) {
        self.drain().await;
        self.exited(killed());
    }

    /// The end of the container's process or of one that `exec` started.
    pub(super) fn exit(
        &self,
        exec_id: Option<&str>,
    ) -> Result<watch::Receiver<Option<ProcessExit>>, SandboxError> {
        let Some(exec_id) = exec_id else {
            return Ok(self.exit.subscribe());
        };
        let execs = self.execs();
        let found = execs.iter().find(|exec| exec.id == exec_id);
        match found {
            Some(exec) => Ok(exec.exit.clone()),
            None => Err(SandboxError::refused(
                RefusalKind::NotFound,
                format!("container {} has no process {exec_id}", self.id),
            )),
        }
    }

    fn execs(&self) -> MutexGuard<'_, VecDeque<ExecProcess>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A further process runs, and its output is on its way.
    pub(super) fn exec_started(&self, exec_id: String, outputs: Outputs, agent: &Agent) {
        let (sender, exit) = watch::channel(None);
        let mut execs = self.execs();
        // The agent refuses an id that is in use, so one of this id has ended.
        execs.retain(|exec| exec.id != exec_id);
        execs.push_back(ExecProcess {
            id: exec_id.clone(),
            exit,
        });
        if execs.len() > EXECS_REMEMBERED {
            let ended = execs.iter().position(|exec| exec.exit.borrow().is_some());
            ended.and_then(|index| execs.remove(index));
        }
        drop(execs);
        let (agent, id) = (agent.clone(), self.id.clone());
        tokio::spawn(async move {
            let exit = wait(&agent, &id, &exec_id).await;
            match timeout(DRAIN, outputs.finish()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, exec_id, "an exec's output is lost"),
                Err(_) => debug!(exec_id, "the output goes on after the process"),
            }
            sender.send_replace(Some(exit));
        });
    }
}

async fn wait(agent: &Agent, id: &str, exec_id: &str) -> ProcessExit {
    match agent.wait(id, exec_id).await {
        Ok(exit) => exit.into(),
        Err(error) => {
            // The guest has ended, or the container was deleted: both kill.
            debug!(container = id, exec_id, %error, "a process's end is not known");
            killed()
        }
    }
}

fn killed() -> ProcessExit {
    ProcessExit {
        code: KILLED,
        exited_at_ns: now_ns(),
        oom_killed: false,
    }
}
