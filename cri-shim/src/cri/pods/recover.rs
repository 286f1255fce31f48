//! What a new daemon finds: pods that run on, pods whose machine is gone, and what one that
//! was killed had half made or half removed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::stop::shut_down;
use crate::cri::error::Result;
use crate::cri::node::{Container, Node, Pod};
use crate::cri::state::{ContainerPhase, ContainerRecord, PodPhase, PodRecord};
use crate::cri::volumes;
use crate::patience::timeout;
use crate::sandbox::{ContainerInfo, ContainerState, SandboxClient, SandboxError, SandboxExit};

/// How long a pod's process may take to answer on a node that has just begun.
const ANSWERS: Duration = Duration::from_secs(60);

/// How long the node waits for all of its pods before it serves: those that take longer go on.
const RECOVERY: Duration = Duration::from_secs(20);

impl Node {
    /// Takes up what the database knows. What takes as long as CNI plugins and guests like is left
    /// to tasks: removing what belongs to no pod, or to one that was half made or half removed.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<()> {
        for record in self.database.all::<PodRecord>()? {
            self.add_pod(&Pod::new(record))?;
        }
        for record in self.database.all::<ContainerRecord>()? {
            match self.pod(&record.pod) {
                Ok(pod) => {
                    for name in &record.volumes {
                        pod.mounted.lock().add(name, &record.id);
                    }
                    self.add_container(&Container::new(record, pod))?;
                }
                Err(_) => self.database.remove::<ContainerRecord>(&record.id)?,
            }
        }
        let mut recovering = JoinSet::new();
        for pod in self.pods() {
            let node = Arc::clone(self);
            // Whoever wants something of the pod waits for the turn.
            let turn = Arc::clone(&pod.turn).lock_owned().await;
            recovering.spawn(async move {
                if let Err(error) = node.recover_pod(&pod, turn).await {
                    warn!(pod = pod.id, %error, "the pod is not as it was");
                }
            });
        }
        let all = async { while recovering.join_next().await.is_some() {} };
        if timeout(RECOVERY, all).await.is_err() {
            warn!(pods = recovering.len(), "pods are still being recovered");
            recovering.detach_all();
        }
        self.check_networks();
        self.clean()
    }

    async fn recover_pod(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        turn: OwnedMutexGuard<()>,
    ) -> Result<()> {
        let dir = self.dir(&pod.id);
        let client = match SandboxClient::connect_within(&dir, ANSWERS).await {
            Ok(client) => Some(client),
            Err(error @ SandboxError::Unresponsive { .. }) => {
                // What cannot be asked cannot be a pod any more.
                warn!(pod = pod.id, %error, "the pod's machine is killed");
                SandboxClient::kill(&dir).await?;
                None
            }
            Err(error) => {
                info!(pod = pod.id, %error, "no sandbox process");
                None
            }
        };
        pod.set_client(client.clone());
        match (pod.phase(), client) {
            (PodPhase::Ready, Some(client)) => {
                self.watch_pod(pod, client.clone());
                let Ok(there) = timeout(ANSWERS, client.list()).await else {
                    // It says who it is and no more. Its end is noted by the watch.
                    warn!(
                        pod = pod.id,
                        "the pod's machine does not answer and is killed"
                    );
                    return Ok(client.kill_now().await?);
                };
                self.recover_containers(pod, &client, there?).await?;
                self.watch_pressure(pod);
                info!(pod = pod.id, "the pod sandbox runs on");
            }
            (PodPhase::Ready, None) => self.note_end(pod, &SandboxExit::Died),
            (PodPhase::Stopped { .. }, Some(client)) => {
                let pod = Arc::clone(pod);
                tokio::spawn(async move {
                    let _turn = turn;
                    match shut_down(&client).await {
                        Ok(()) => pod.set_client(None),
                        Err(error) => warn!(pod = pod.id, %error, "a stopped machine runs on"),
                    }
                });
            }
            (PodPhase::Stopped { .. }, None) => {}
            (PodPhase::Creating | PodPhase::Removing, _) => {
                info!(pod = pod.id, "the pod was half made or half removed");
                for container in self.containers_of(&pod.id) {
                    self.forget_container(&container)?;
                }
                let (node, pod) = (Arc::clone(self), Arc::clone(pod));
                // Whoever wants to have its name waits for the turn.
                tokio::spawn(async move {
                    let _turn = turn;
                    node.undo_pod(&pod).await;
                });
            }
        }
        Ok(())
    }

    /// Takes over what the sandbox knows of its containers.
    async fn recover_containers(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        client: &SandboxClient,
        there: Vec<ContainerInfo>,
    ) -> Result<()> {
        for container in self.containers_of(&pod.id) {
            let found = there.iter().find(|info| info.id == container.id);
            match (container.phase(), found) {
                (ContainerPhase::Creating | ContainerPhase::Removing, _) => {
                    self.remove_container_now(&container).await?;
                }
                // A start was under way: the sandbox knows whether it came to it.
                (ContainerPhase::Created, Some(info)) if info.state != ContainerState::Created => {
                    let started_at = i64::try_from(info.started_at_ns).unwrap_or(i64::MAX);
                    container.update(&self.database, |record| {
                        record.phase = ContainerPhase::Running { started_at };
                    })?;
                    self.watch_container(&container, client.clone());
                }
                (ContainerPhase::Running { .. }, _) => {
                    self.watch_container(&container, client.clone());
                }
                (ContainerPhase::Created | ContainerPhase::Exited(_), _) => {}
            }
        }
        for info in there {
            if self.container(&info.id).is_err() {
                client.delete_container(&info.id).await?;
            }
        }
        Ok(())
    }

    /// Asks the plugins of pods that run on, one after the other: it is for the log.
    fn check_networks(self: &Arc<Self>) {
        let mut pods = self.pods();
        pods.retain(|pod| pod.phase() == PodPhase::Ready);
        let node = Arc::clone(self);
        tokio::spawn(async move {
            for pod in pods {
                let checked = node.cni.check(&pod.id).await;
                // One that was stopped meanwhile has no network any more.
                if let Err(error) = checked
                    && pod.phase() == PodPhase::Ready
                {
                    warn!(pod = pod.id, %error, "the pod's network is not as it was made");
                }
            }
        });
    }

    /// Removes networks and directories that belong to no pod.
    fn clean(self: &Arc<Self>) -> Result<()> {
        let mut networks = self.cni.known()?;
        networks.retain(|id| self.pod(id).is_err());
        let known: Vec<_> = self.pods().iter().map(|pod| self.dir(&pod.id)).collect();
        let mut dirs = self.dirs()?;
        dirs.retain(|dir| !known.contains(dir));
        let node = Arc::clone(self);
        // Pods that come meanwhile have other ids.
        tokio::spawn(async move {
            for dir in dirs {
                info!(dir = %dir.display(), "removing a sandbox that no pod has");
                if let Err(error) = remove_sandbox(&dir).await {
                    warn!(dir = %dir.display(), %error, "the sandbox stays for now");
                }
            }
            for id in networks {
                info!(pod = id, "removing a network that no pod has");
                if let Err(error) = node.cni.detach(&id).await {
                    warn!(pod = id, %error, "the network stays for now");
                }
            }
        });
        Ok(())
    }
}

async fn remove_sandbox(dir: &Path) -> Result<()> {
    match SandboxClient::connect_within(dir, ANSWERS).await {
        Ok(client) => shut_down(&client).await?,
        Err(SandboxError::Unresponsive { .. }) => SandboxClient::kill(dir).await?,
        Err(_) => {}
    }
    volumes::remove_dir(dir).await
}
