//! Stopping and removing containers.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::select;
use podvisor_cri_messages::ContainerEventType;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::blocking::in_place;
use crate::cri::error::{CriError, Result};
use crate::cri::flights::to_the_end;
use crate::cri::node::{Container, Node};
use crate::cri::state::{ContainerPhase, ContainerRecord};
use crate::cri::volumes;
use crate::sandbox::{RefusalKind, SandboxClient, SandboxError};
use crate::signal::SIGKILL;

/// How long the guest may take to take the signal, and to end the container.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a guest that did not may take to answer anything at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

impl Node {
    /// StopContainer; succeeds also if the container has ended or is gone.
    pub(in crate::cri) async fn stop_container(
        self: &Arc<Self>,
        id: &str,
        seconds: i64,
    ) -> Result<()> {
        let container = match self.settled_container(id).await {
            Ok(container) => container,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let node = Arc::clone(self);
        to_the_end(async move { node.stop_now(&container, seconds).await }).await
    }

    async fn stop_now(&self, container: &Arc<Container>, seconds: i64) -> Result<()> {
        if container.phase() == ContainerPhase::Created {
            // It may be starting. The turn is not kept: whoever kills it meanwhile needs it.
            drop(container.turn.lock().await);
        }
        if container.running().is_err() {
            return Ok(());
        }
        let Ok(client) = container.pod.client() else {
            // Its machine is gone; that is being recorded.
            return Ok(());
        };
        if let Ok(seconds) = u64::try_from(seconds)
            && seconds > 0
        {
            let grace = Duration::from_secs(seconds);
            if !container.was_signaled.swap(true, Ordering::Relaxed) {
                let signal = container.record().stop_signal;
                // The machine's process keeps the deadline, even if this one ends before it.
                let sent = client.stop_container(&container.id, signal, grace).await;
                let sent = passing(&client, sent).await;
                if sent.is_err() {
                    container.was_signaled.store(false, Ordering::Relaxed);
                }
                sent?;
            }
            if timeout(grace, ended(container, &client)).await.is_ok() {
                return Ok(());
            }
        }
        self.kill(container, &client).await
    }

    /// Kills all processes of a container and waits until they have exited. A guest that hangs is
    /// killed as a whole: its kubelet restarts none of its containers before this one has ended.
    pub(in crate::cri) async fn kill(
        &self,
        container: &Arc<Container>,
        client: &SandboxClient,
    ) -> Result<()> {
        if container.running().is_err() {
            return Ok(());
        }
        let killed = async {
            let killed = client.signal(&container.id, None, SIGKILL.into(), true);
            passing(client, killed.await).await?;
            ended(container, client).await;
            Ok(())
        };
        if let Ok(killed) = timeout(KILL_TIMEOUT, killed).await {
            return killed;
        }
        let asked = client.stats_in_brief(&container.id);
        if timeout(ANSWER_TIMEOUT, asked).await.is_ok() {
            // One of its processes waits for a disk or a file server, which others may not need.
            return Err(CriError::Unkillable {
                id: container.id.clone(),
            });
        }
        warn!(
            container = container.id,
            pod = container.pod.id,
            "the guest does not answer and is killed"
        );
        Ok(client.kill_now().await?)
    }

    /// RemoveContainer: kills it first if it runs; succeeds also if it is gone.
    pub(in crate::cri) async fn remove_container(self: &Arc<Self>, id: &str) -> Result<()> {
        let container = match self.settled_container(id).await {
            Ok(container) => container,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let node = Arc::clone(self);
        to_the_end(async move { node.remove_container_now(&container).await }).await
    }

    pub(in crate::cri) async fn remove_container_now(
        self: &Arc<Self>,
        container: &Arc<Container>,
    ) -> Result<()> {
        let _turn = container.turn.lock().await;
        if self.container(&container.id).is_err() {
            // Another call has removed it meanwhile.
            return Ok(());
        }
        let client = container.pod.client().ok();
        let removed = self.remove_with(container, client.as_ref()).await;
        if removed.is_err() && container.phase() == ContainerPhase::Creating {
            // Only what is listed is removed later.
            self.note_container(container, |record| record.phase = ContainerPhase::Removing);
        }
        removed
    }

    /// Removes a container whose turn is held.
    async fn remove_with(
        self: &Arc<Self>,
        container: &Arc<Container>,
        client: Option<&SandboxClient>,
    ) -> Result<()> {
        if let Some(client) = client {
            self.kill(container, client).await?;
        }
        match container.update(&self.database, begin_removal) {
            // Its volumes, which the image declares, may be what fills the disk. Until they are
            // removed, the disk has a container that has ended.
            Err(error) if error.is_disk_full() && has_ended(container) => {
                self.note_container(container, begin_removal);
            }
            begun => begun?,
        }
        if let Some(client) = client {
            passing(client, client.delete_container(&container.id).await).await?;
        }
        let shared = self.dir(&container.pod.id).join(volumes::SHARED);
        in_place(|| volumes::release(&shared, &container.pod.mounted, &container.id))?;
        self.remove_image_volumes(&container.pod.id, &container.id)
            .await?;
        self.forget_container(container)?;
        self.set_importance(&container.pod);
        self.give_back(&container.pod, None).await;
        self.emit(container, ContainerEventType::ContainerDeletedEvent);
        info!(container = container.id, "the container is removed");
        Ok(())
    }
}

fn begin_removal(record: &mut ContainerRecord) {
    match &record.phase {
        // Not listed yet, and not while it is undone.
        ContainerPhase::Creating => return,
        ContainerPhase::Exited(exit) => record.exit_before_removal = Some(exit.clone()),
        _ => {}
    }
    record.phase = ContainerPhase::Removing;
}

fn has_ended(container: &Container) -> bool {
    matches!(container.phase(), ContainerPhase::Exited(_))
}

/// Ignores the error that the process or its machine is gone.
async fn passing(client: &SandboxClient, done: Result<(), SandboxError>) -> Result<()> {
    let Err(error) = done else {
        return Ok(());
    };
    let is_nothing_to_do = match error.kind() {
        Some(RefusalKind::NotFound | RefusalKind::WrongState) => true,
        _ => is_of_ended_machine(client, &error).await,
    };
    if is_nothing_to_do {
        debug!(%error, "nothing to do");
        return Ok(());
    }
    Err(error.into())
}

/// Returns whether a call failed because its machine has ended.
pub(super) async fn is_of_ended_machine(client: &SandboxClient, error: &SandboxError) -> bool {
    match error.kind() {
        // The answer of a process that still reports how its machine ended.
        Some(RefusalKind::Internal) => client.has_ended().await,
        _ => error.is_gone(),
    }
}

/// Waits until a container or its machine has ended. The machine's end is recorded by a task that
/// needs the pod's turn, which the caller may hold.
async fn ended(container: &Container, client: &SandboxClient) {
    let mut ended = container.ended.subscribe();
    let container_ends = async {
        // The sender lives as long as the container.
        let _ = ended.wait_for(|ended| *ended).await;
    };
    let machine_ends = client.machine_ended().map(drop);
    let (container_ends, machine_ends) = (pin!(container_ends), pin!(machine_ends));
    select(container_ends, machine_ends).await;
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;

    use super::*;
    use crate::cri::node::{Pod, TestNode};
    use crate::cri::state::{ContainerExit, PodPhase, container_record, pod_record};
    use crate::small_disk::SmallDisk;

    /// A container whose machine is gone.
    fn add_container(node: &Node, record: ContainerRecord) -> Arc<Container> {
        let mut of_pod = pod_record(&record.pod);
        of_pod.phase = PodPhase::stopped(None);
        let pod = Pod::new(of_pod);
        node.add_pod(&pod).unwrap();
        let container = Container::new(record, pod);
        node.add_container(&container).unwrap();
        container
    }

    fn exited() -> ContainerPhase {
        ContainerPhase::Exited(ContainerExit {
            started_at: 1,
            finished_at: 2,
            code: 3,
            reason: "Error".to_owned(),
            message: String::new(),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_waits_for_a_start_that_is_under_way() {
        let node = TestNode::new();
        let container = add_container(&node, container_record("c", "p"));
        let starting = container.turn.lock().await;
        let mut stop = pin!(node.stop_container("c", 0));
        let early = timeout(Duration::from_secs(3600), &mut stop).await;
        assert!(early.is_err(), "{early:?}");
        container
            .update(&node.database, |record| {
                record.phase = ContainerPhase::Running { started_at: 1 };
            })
            .unwrap();
        drop(starting);
        stop.await.unwrap();
        // Others that have the turn need not be waited for.
        let _removing = container.turn.lock().await;
        for phase in [ContainerPhase::Running { started_at: 1 }, exited()] {
            container
                .update(&node.database, |record| record.phase = phase)
                .unwrap();
            let stop = node.stop_container("c", 0);
            timeout(KILL_TIMEOUT, stop).await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn a_container_whose_volumes_fill_the_disk_is_removed() {
        let disk = SmallDisk::new();
        let node = TestNode::with_root(&disk.path().join("root"));
        let mut record = container_record("c", "p");
        record.phase = exited();
        // It needs more room than the file has.
        record.log_path = "x".repeat(1 << 20);
        let container = add_container(&node, record);
        container.write(&node.database).unwrap();
        let volumes = node.config.root.join("volumes/p/c");
        fs::create_dir_all(volumes.join("0")).unwrap();
        let full = fs::write(volumes.join("0/data"), vec![0; 7 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let refused = container.update(&node.database, begin_removal).unwrap_err();
        assert!(refused.is_disk_full(), "{refused}");

        node.remove_container("c").await.unwrap();
        assert!(!volumes.exists());
        assert!(node.container("c").is_err());
        let stored = node.database.all::<ContainerRecord>().unwrap();
        assert_eq!(stored.records, []);
    }

    #[tokio::test]
    async fn only_one_that_has_ended_is_removed_without_a_record_of_it() {
        let disk = SmallDisk::new();
        let node = TestNode::with_root(&disk.path().join("root"));
        let mut record = container_record("c", "p");
        record.log_path = "x".repeat(1 << 20);
        let container = add_container(&node, record);
        container.write(&node.database).unwrap();
        disk.fill();
        let refused = node.remove_container("c").await.unwrap_err();
        assert!(refused.is_disk_full(), "{refused}");
        assert_eq!(container.phase(), ContainerPhase::Created);
    }
}
