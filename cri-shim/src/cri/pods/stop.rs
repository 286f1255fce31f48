//! Stopping and removing pod sandboxes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use podvisor_cri_messages::ContainerEventType;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::blocking::in_place;
use crate::cri::containers::{ExitFacts, exit_of};
use crate::cri::error::Result;
use crate::cri::flights::to_the_end;
use crate::cri::node::{Container, Node, Pod, now};
use crate::cri::state::{PodPhase, PodRecord};
use crate::cri::volumes;
use crate::sandbox::{SandboxClient, SandboxExit, exit_record};

/// How long a guest may take to power itself off before its machine is killed.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long its containers may take to be killed before that.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why a machine is gone.
#[derive(Debug, Clone, Copy)]
enum StopReason<'a> {
    /// A caller stopped it.
    Stopped,
    /// It ended by itself, for this reason.
    Ended(&'a str),
    /// The host's kernel killed it because memory ran out, with this reason.
    OutOfMemory(&'a str),
}

impl<'a> StopReason<'a> {
    /// Returns the reason from a pod's phase; `None` if the pod is ready.
    fn by(phase: &'a PodPhase) -> Option<Self> {
        match phase {
            PodPhase::Ready => None,
            PodPhase::Stopped {
                reason: Some(reason),
                is_out_of_memory,
            } => Some(match is_out_of_memory {
                true => Self::OutOfMemory(reason),
                false => Self::Ended(reason),
            }),
            PodPhase::Creating | PodPhase::Stopped { .. } | PodPhase::Removing => {
                Some(Self::Stopped)
            }
        }
    }

    /// Returns the exit of a container about which nothing better is known.
    fn exit(self) -> ExitFacts {
        match self {
            // As for a killed container.
            Self::Stopped => {
                let message = "the pod sandbox was stopped".to_owned();
                (137, "Error", message, now())
            }
            // As for a lost process.
            Self::Ended(reason) => {
                let message = format!("the pod sandbox has ended: {reason}");
                (255, "SandboxGone", message, now())
            }
            // As for a container that its own kernel kills for that.
            Self::OutOfMemory(reason) => {
                let message = format!("the pod sandbox has ended: {reason}");
                (137, "OOMKilled", message, now())
            }
        }
    }
}

impl Node {
    /// StopPodSandbox; succeeds also if the pod is stopped or gone.
    pub(in crate::cri) async fn stop_pod(self: &Arc<Self>, id: &str) -> Result<()> {
        let stop = |node: Arc<Self>, pod| async move { node.stop_pod_now(&pod).await };
        self.end_pod(id, stop).await
    }

    /// RemovePodSandbox with its containers; succeeds also if the pod is gone.
    pub(in crate::cri) async fn remove_pod(self: &Arc<Self>, id: &str) -> Result<()> {
        let remove = |node: Arc<Self>, pod| async move { node.remove_pod_now(&pod).await };
        self.end_pod(id, remove).await
    }

    /// Does `work` with a pod in its turn, to its end; nothing if the pod is gone.
    async fn end_pod<F>(
        self: &Arc<Self>,
        id: &str,
        work: impl FnOnce(Arc<Self>, Arc<Pod>) -> F + Send + 'static,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let pod = match self.settled_pod(id).await {
            Ok(pod) => pod,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let node = Arc::clone(self);
        to_the_end(async move {
            let _ending = pod.end();
            let _turn = pod.turn.lock().await;
            work(node, Arc::clone(&pod)).await
        })
        .await
    }

    /// Removes a pod, unless another call has meanwhile.
    async fn remove_pod_now(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<()> {
        if self.pod(&pod.id).is_err() {
            return Ok(());
        }
        self.stop_pod_now(pod).await?;
        match pod.update(&self.database, begin_removal) {
            // Its containers' volumes, which images declare, may be what fills the disk. Until
            // they are removed, the disk has a pod that is stopped.
            Err(error) if error.is_disk_full() => {
                self.remove_all_image_volumes(&pod.id).await?;
                pod.update(&self.database, begin_removal)?;
            }
            begun => begun?,
        }
        for container in self.containers_of(&pod.id) {
            self.remove_container_now(&container).await?;
        }
        self.tear_down(pod).await?;
        self.forget_pod(pod)?;
        self.emit_pod(pod, ContainerEventType::ContainerDeletedEvent);
        info!(pod = pod.id, "the pod sandbox is removed");
        Ok(())
    }

    /// Stops containers and machine, and undoes the network. To be repeated until it succeeds.
    async fn stop_pod_now(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<()> {
        if let Ok(client) = pod.client()
            && let Some(exit) = client.ended().now_or_never()
        {
            // Its end has not been recorded yet.
            self.note_end(pod, &exit);
        }
        let was_ready = pod.phase() == PodPhase::Ready;
        let Ok(client) = pod.client() else {
            let released = self.note_stop(pod, was_ready);
            self.detach(pod).await?;
            return released;
        };
        self.kill_all(pod, &client).await;
        let mut shut_down = pin!(shut_down(&client));
        let is_gone = tokio::select! {
            biased;
            gone = &mut shut_down => gone.map(|()| true)?,
            _ = client.machine_ended() => false,
        };
        // The guest needs no network any more while its process cleans up.
        let stopped = async {
            if !is_gone {
                shut_down.await?;
            }
            pod.set_client(None);
            self.note_stop(pod, was_ready)
        };
        let (stopped, detached) = tokio::join!(stopped, self.detach(pod));
        detached?;
        stopped
    }

    /// Records that a pod whose machine is gone is stopped, and releases its volumes.
    fn note_stop(self: &Arc<Self>, pod: &Arc<Pod>, was_ready: bool) -> Result<()> {
        self.mark_containers_lost(pod);
        self.note_pod(pod, |record| {
            if matches!(record.phase, PodPhase::Ready | PodPhase::Creating) {
                record.phase = PodPhase::stopped(None);
            }
        });
        self.pod_flights.forget(&pod.id);
        if was_ready {
            self.emit_pod(pod, ContainerEventType::ContainerStoppedEvent);
            info!(pod = pod.id, "the pod sandbox is stopped");
        }
        // The caller unmounts their sources next.
        self.release_volumes(pod)
    }

    /// Undoes a pod's network.
    async fn detach(&self, pod: &Pod) -> Result<()> {
        let _network = pod.network.lock().await;
        Ok(self.cni.detach(&pod.id).await?)
    }

    /// Unmounts the host's volumes of the containers whose machine is gone.
    pub(super) fn release_volumes(&self, pod: &Pod) -> Result<()> {
        let shared = self.dir(&pod.id).join(volumes::SHARED);
        in_place(|| volumes::release_all(&shared, &pod.mounted))
    }

    /// Kills all running containers at the same time, and those that are being started as soon as
    /// they run, so that their exits are known. Those that take too long end with the machine.
    async fn kill_all(&self, pod: &Pod, client: &SandboxClient) {
        let containers = self.containers_of(&pod.id);
        let killed = join_all(containers.iter().map(|container| async move {
            let _turn = container.turn.lock().await;
            if let Err(error) = self.kill(container, client).await {
                warn!(container = container.id, %error, "cannot kill the container");
            }
        }));
        if timeout(KILL_TIMEOUT, killed).await.is_err() {
            warn!(
                pod = pod.id,
                "timed out killing containers; powering off the machine"
            );
        }
    }

    /// Undoes everything that was created for a pod, in any state.
    pub(super) async fn tear_down(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<()> {
        if let Ok(client) = pod.client() {
            shut_down(&client).await?;
            pod.set_client(None);
        }
        self.detach(pod).await?;
        volumes::remove_dir(&self.dir(&pod.id)).await?;
        self.remove_all_image_volumes(&pod.id).await
    }

    /// Records the end of a pod's machine when it happens.
    pub(super) fn watch_pod(self: &Arc<Self>, pod: &Arc<Pod>, client: SandboxClient) {
        let (node, pod) = (Arc::clone(self), Arc::clone(pod));
        tokio::spawn(async move {
            let exit = client.ended().await;
            let _turn = pod.turn.lock().await;
            node.note_end(&pod, &exit);
        });
    }

    /// Records that a pod's machine is gone, unless a caller stopped it.
    pub(super) fn note_end(self: &Arc<Self>, pod: &Arc<Pod>, exit: &SandboxExit) {
        if pod.phase() != PodPhase::Ready {
            return;
        }
        warn!(pod = pod.id, %exit, "the pod sandbox exited unexpectedly");
        pod.set_client(None);
        self.pod_flights.forget(&pod.id);
        // Before that of its containers, so that a client that sees a container's end sees the
        // reason.
        self.note_pod(pod, |record| record.phase = ended(exit));
        self.mark_containers_lost(pod);
        self.emit_pod(pod, ContainerEventType::ContainerStoppedEvent);
        if let Err(error) = self.release_volumes(pod) {
            // StopPodSandbox tries again.
            warn!(pod = pod.id, %error, "failed to unmount the pod's volumes; will retry");
        }
    }

    /// Marks containers that ran in a machine that is gone as exited. A container that never ran
    /// stays created: it has no exit to report.
    pub(super) fn mark_containers_lost(self: &Arc<Self>, pod: &Arc<Pod>) {
        let phase = pod.phase();
        let gone = StopReason::by(&phase).unwrap_or(StopReason::Stopped);
        // The last state that the machine's process recorded.
        let last = in_place(|| exit_record(&self.dir(&pod.id)));
        let last = last.map_or_else(Vec::new, |last| last.containers);
        for container in self.containers_of(&pod.id) {
            let known = last.iter().find(|info| info.id == container.id);
            let exit = match known.and_then(|info| info.exit) {
                Some(exit) if !exit.of_machine => exit_of(&exit),
                _ => gone.exit(),
            };
            self.note_exit(&container, exit);
        }
    }

    /// Marks a container that was recorded as running after its pod's end was recorded.
    pub(in crate::cri) async fn mark_lost_later(self: &Arc<Self>, container: &Arc<Container>) {
        let _turn = container.pod.turn.lock().await;
        let phase = container.pod.phase();
        // Otherwise the pod's watcher does this for all of its containers.
        if let Some(gone) = StopReason::by(&phase) {
            self.note_exit(container, gone.exit());
        }
    }
}

fn begin_removal(record: &mut PodRecord) {
    record.phase = PodPhase::Removing;
}

/// Returns the phase of a pod whose machine has ended by itself.
fn ended(exit: &SandboxExit) -> PodPhase {
    let advice = match exit {
        SandboxExit::OutOfMemory { group: Some(_) } => {
            "; raise the memory overhead of the pod's RuntimeClass, or the pod's memory limit"
        }
        SandboxExit::OutOfMemory { group: None } => {
            "; if that was the node's, have its pods request what they use, with the memory \
             overhead of their RuntimeClass"
        }
        _ => "",
    };
    PodPhase::Stopped {
        reason: Some(format!("{exit}{advice}")),
        is_out_of_memory: matches!(exit, SandboxExit::OutOfMemory { .. }),
    }
}

/// Ends a machine; it is not an error if it has ended.
pub(super) async fn shut_down(client: &SandboxClient) -> Result<()> {
    match client.shutdown(POWER_OFF_TIMEOUT).await {
        Err(error) if !error.is_gone() => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;

    use podvisor_cri_messages::ContainerMetadata;

    use super::*;
    use crate::cri::node::TestNode;
    use crate::cri::state::{ContainerPhase, container_record, pod_record};
    use crate::small_disk::SmallDisk;

    #[tokio::test]
    async fn a_pod_is_removed_though_a_volume_of_it_fills_the_disk_and_else_nothing_of_it_is() {
        let disk = SmallDisk::new();
        let node = TestNode::with_root(&disk.path().join("root"));
        let mut record = pod_record("p");
        // It needs more room than the file has.
        record.config.hostname = "x".repeat(1 << 20);
        let pod = Pod::new(record);
        node.add_pod(&pod).unwrap();
        pod.write(&node.database).unwrap();
        // The first one that is removed has no volume.
        for (id, name) in [("c", "first"), ("d", "second")] {
            let mut record = container_record(id, "p");
            record.config.metadata = Some(ContainerMetadata {
                name: name.to_owned(),
                attempt: 0,
            });
            let container = Container::new(record, Arc::clone(&pod));
            node.add_container(&container).unwrap();
            container.write(&node.database).unwrap();
        }
        disk.fill();
        let refused = node.remove_pod("p").await.unwrap_err();
        assert!(refused.is_disk_full(), "{refused}");
        assert_eq!(pod.phase(), PodPhase::stopped(None));
        for container in node.containers_of("p") {
            assert_eq!(container.phase(), ContainerPhase::Created);
        }
        disk.clear();

        let volumes = node.config.root.join("volumes/p/d/0");
        fs::create_dir_all(&volumes).unwrap();
        let full = fs::write(volumes.join("data"), vec![0; 7 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let refused = pod.update(&node.database, begin_removal).unwrap_err();
        assert!(refused.is_disk_full(), "{refused}");
        node.remove_pod("p").await.unwrap();
        assert!(!volumes.exists());
        assert!(node.pod("p").is_err());
        let stored = node.database.all::<PodRecord>().unwrap();
        assert_eq!(stored.records, []);
    }
}
