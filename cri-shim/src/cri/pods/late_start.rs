//! Containers whose start was in progress when the previous daemon ended: their sandbox carries it
//! out whether or not a daemon waits for it.

use std::sync::Arc;
use std::time::Duration;

use podvisor_cri_messages::ContainerEventType;
use tokio::sync::OwnedMutexGuard;
use tokio::time::sleep;
use tracing::{debug, info};

use super::recover::{ATTEMPT_TIMEOUT, list_within};
use crate::cri::node::{Container, Node};
use crate::cri::state::ContainerPhase;
use crate::sandbox::{ContainerInfo, ContainerState, SandboxClient};

/// Interval for asking whether a start has succeeded.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The message of a container whose start has failed.
const START_FAILED: &str = "the start of the container failed while no daemon ran";

impl Node {
    /// Takes over a container that was started, as its sandbox knows, and is recorded as created.
    pub(super) fn take_over_started(
        self: &Arc<Self>,
        container: &Arc<Container>,
        info: &ContainerInfo,
        client: SandboxClient,
    ) {
        let started_at = i64::try_from(info.started_at_ns).unwrap_or(i64::MAX);
        self.note_container(container, |record| {
            record.phase = ContainerPhase::Running { started_at };
        });
        self.watch_container(container, client);
    }

    /// Waits until the sandbox knows whether a container runs, and takes it over then. Calls that
    /// change the container wait for its turn.
    pub(super) fn await_start(
        self: &Arc<Self>,
        container: Arc<Container>,
        turn: OwnedMutexGuard<()>,
        client: SandboxClient,
    ) {
        let node = Arc::clone(self);
        tokio::spawn(async move {
            let _turn = turn;
            info!(
                container = container.id,
                "a start of the container is in progress"
            );
            loop {
                tokio::select! {
                    () = sleep(POLL_INTERVAL) => {}
                    // It ends with the machine, or is stopped when the turn is free.
                    () = container.pod.is_to_end() => return,
                }
                let there = match list_within(&client, ATTEMPT_TIMEOUT).await {
                    Ok(there) => there,
                    // It never ran as far as anybody knows, and has no exit to report.
                    Err(error) if error.is_gone() => return,
                    Err(error) => {
                        debug!(container = container.id, %error, "its start is asked for again");
                        continue;
                    }
                };
                match there.iter().find(|info| info.id == container.id) {
                    Some(info) if info.is_starting => {}
                    Some(info) if info.state != ContainerState::Created => {
                        node.take_over_started(&container, info, client);
                        node.emit(&container, ContainerEventType::ContainerStartedEvent);
                        return;
                    }
                    _ => {
                        // As after a start that this daemon has asked for.
                        node.undo_in_guest(&client, &container.id).await;
                        node.note_start_error(&container, START_FAILED);
                        return;
                    }
                }
            }
        });
    }
}
