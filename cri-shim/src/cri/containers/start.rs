//! Starting a container, and recording its end.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use podvisor_cri_messages::ContainerEventType;
use tonic::Status;
use tracing::{info, warn};

use super::end::is_of_ended_machine;
use crate::blocking::in_place;
use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::node::{Container, Node, now};
use crate::cri::state::{ContainerExit, ContainerPhase};
use crate::sandbox::{ProcessExit, SandboxClient, Started};

/// Exit code of a container that could not be started, as other runtimes have it.
const START_ERROR_EXIT_CODE: i32 = 128;

/// Exit code of a container whose exit was not observed.
const UNKNOWN_EXIT_CODE: i32 = 255;

impl Node {
    /// StartContainer.
    pub(in crate::cri) async fn start_container(self: &Arc<Self>, id: &str) -> Result<()> {
        let container = self.settled_container(id).await?;
        let id = container.id.clone();
        let node = Arc::clone(self);
        let work = || async move {
            let _turn = container.turn.lock().await;
            node.start_now(&container).await?;
            Ok(container.id.clone())
        };
        match self.start_flights.join(&id, (), work).await {
            Some(started) => started.map(drop),
            // All requests of one name are equal.
            None => Ok(()),
        }
    }

    async fn start_now(self: &Arc<Self>, container: &Arc<Container>) -> Result<()> {
        let state = match container.phase() {
            ContainerPhase::Created => None,
            ContainerPhase::Running { .. } => Some("running"),
            ContainerPhase::Exited(_) => Some("exited"),
            ContainerPhase::Creating => Some("being created"),
            ContainerPhase::Removing => Some("being removed"),
        };
        if let Some(state) = state {
            return Err(CriError::WrongState {
                kind: ObjectKind::Container,
                id: container.id.clone(),
                state,
                wanted: "only one that was created can be started",
            });
        }
        // It would have to be stopped immediately.
        if container.pod.is_ending() {
            return Err(container.pod.not_ready());
        }
        let client = container.pod.client()?;
        let started = self.start_in_guest(container, &client).await;
        match started {
            Ok(started) => {
                let started_at = i64::try_from(started.started_at_ns).unwrap_or_else(|_| now());
                self.note_container(container, |record| {
                    record.phase = ContainerPhase::Running { started_at };
                });
                self.emit(container, ContainerEventType::ContainerStartedEvent);
                self.watch_container(container, client);
                info!(container = container.id, "the container runs");
                Ok(())
            }
            Err(CriError::CannotStart { id, message }) => {
                self.note_start_error(container, &message);
                Err(CriError::CannotStart { id, message })
            }
            Err(error) => {
                // The container is not at fault: it never ran, and has no exit to report.
                let is_of_the_pod = container.pod.is_ending()
                    || match &error {
                        CriError::Sandbox(error) => is_of_ended_machine(&client, error).await,
                        _ => false,
                    };
                let status = Status::from(error);
                if !is_of_the_pod {
                    // Undone first: once the failure is reported, a replacement may be created.
                    self.undo_in_guest(&client, &container.id).await;
                    self.note_start_error(container, status.message());
                }
                Err(CriError::Shared(status))
            }
        }
    }

    /// Starts a created container. Its log is opened now, not earlier, because a kubelet takes a
    /// log for an attempt to run the container.
    async fn start_in_guest(
        &self,
        container: &Container,
        client: &SandboxClient,
    ) -> Result<Started> {
        let record = container.record();
        let log = in_place(|| open_log(&record.log_path))?;
        let id = &container.id;
        if let Some(message) = record.start_error {
            let id = id.clone();
            return Err(CriError::CannotStart { id, message });
        }
        if let Some(vm) = record.vm {
            return self.start_vm(container, vm, client, log).await;
        }
        if let Some(log) = log {
            client.reopen_log(id, log).await?;
        }
        Ok(client.start_container(id).await?)
    }

    pub(in crate::cri) fn note_start_error(
        self: &Arc<Self>,
        container: &Arc<Container>,
        message: &str,
    ) {
        self.note_container(container, |record| {
            record.phase = ContainerPhase::Exited(ContainerExit {
                started_at: 0,
                finished_at: now(),
                code: START_ERROR_EXIT_CODE,
                reason: "StartError".to_owned(),
                message: message.to_owned(),
            });
        });
        self.emit(container, ContainerEventType::ContainerStoppedEvent);
    }

    /// Records the end of a running container when it happens.
    pub(in crate::cri) fn watch_container(
        self: &Arc<Self>,
        container: &Arc<Container>,
        client: SandboxClient,
    ) {
        self.watch_migrations(container, client.clone());
        let (node, container) = (Arc::clone(self), Arc::clone(container));
        tokio::spawn(async move {
            let exit = match client.wait(&container.id, None).await {
                // Its machine's end says why, and is recorded before.
                Ok(exit) if exit.of_machine => return node.mark_lost_later(&container).await,
                Ok(exit) => node.exit_of_container(&container, &client, &exit).await,
                Err(error) if error.is_gone() => return node.mark_lost_later(&container).await,
                Err(error) => {
                    warn!(container = container.id, %error, "failed to wait for the container");
                    (UNKNOWN_EXIT_CODE, "Unknown", error.to_string(), now())
                }
            };
            node.note_exit(&container, exit);
        });
    }

    /// Returns how a container's process has ended; of a machine also why.
    async fn exit_of_container(
        &self,
        container: &Container,
        client: &SandboxClient,
        exit: &ProcessExit,
    ) -> ExitFacts {
        let mut facts = exit_of(exit);
        let is_vm = container.with_record(|record| record.vm.is_some());
        if is_vm && exit.code == 0 && Self::has_moved(client, container).await {
            facts.1 = ContainerExit::MOVED;
        }
        if is_vm && exit.code != 0 {
            let list = client.list().await.unwrap_or_default();
            let info = list.into_iter().find(|info| info.id == container.id);
            facts.2 = info.and_then(|info| info.message).unwrap_or_default();
        }
        facts
    }

    /// Records the end of a container that ran, unless one is recorded.
    pub(in crate::cri) fn note_exit(
        self: &Arc<Self>,
        container: &Arc<Container>,
        (code, reason, message, finished_at): ExitFacts,
    ) {
        let mut is_new = false;
        self.note_container(container, |record| {
            if let ContainerPhase::Running { started_at } = record.phase {
                is_new = true;
                record.phase = ContainerPhase::Exited(ContainerExit {
                    started_at,
                    finished_at,
                    code,
                    reason: reason.to_owned(),
                    message,
                });
            }
        });
        if is_new {
            self.start_flights.forget(&container.id);
            info!(
                container = container.id,
                code, reason, "the container has ended"
            );
            self.set_importance(&container.pod);
            self.emit(container, ContainerEventType::ContainerStoppedEvent);
        }
    }

    /// ReopenContainerLog.
    pub(in crate::cri) async fn reopen_log(&self, id: &str) -> Result<()> {
        let container = self.settled_container(id).await?;
        container.running()?;
        let path = container.with_record(|record| record.log_path.clone());
        let (is_new, log) = in_place(|| (!Path::new(&path).exists(), open_log(&path)));
        let Some(log) = log? else {
            return Ok(());
        };
        let reopened = self.take_log(&container, log).await;
        if reopened.is_err() && is_new {
            // A failed call must not have created a file (api.proto).
            let _ = in_place(|| fs::remove_file(&path));
        }
        reopened
    }

    async fn take_log(&self, container: &Container, log: OwnedFd) -> Result<()> {
        let client = container.pod.client()?;
        Ok(client.reopen_log(&container.id, log).await?)
    }
}

/// Opens a log for appending, and creates the directories above it.
fn open_log(path: &str) -> Result<Option<OwnedFd>> {
    if path.is_empty() {
        return Ok(None);
    }
    let path = Path::new(path);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(CriError::io("create the directory", dir))?;
    }
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .open(path);
    Ok(Some(
        file.map_err(CriError::io("open the log", path))?.into(),
    ))
}

/// A container's exit: code, reason, message and time.
pub(in crate::cri) type ExitFacts = (i32, &'static str, String, i64);

pub(in crate::cri) fn exit_of(exit: &ProcessExit) -> ExitFacts {
    let reason = match (exit.oom_killed, exit.code) {
        (true, _) => "OOMKilled",
        (false, 0) => "Completed",
        (false, _) => "Error",
    };
    let finished_at = i64::try_from(exit.exited_at_ns).unwrap_or_else(|_| now());
    (exit.code, reason, String::new(), finished_at)
}
