//! What a new daemon finds: pods that run on, pods whose machine is gone, and what one that
//! was killed had half made or half removed.

use std::sync::Arc;

use tracing::{info, warn};

use super::stop::shut_down;
use crate::cri::error::Result;
use crate::cri::node::{Container, Node, Pod};
use crate::cri::state::{ContainerPhase, ContainerRecord, PodPhase, PodRecord};
use crate::cri::volumes;
use crate::sandbox::{ContainerState, SandboxClient, SandboxExit};

impl Node {
    /// Takes up what the database knows, and cleans what it does not.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<()> {
        for record in self.database.all::<PodRecord>()? {
            self.add_pod(&Pod::new(record))?;
        }
        for record in self.database.all::<ContainerRecord>()? {
            match self.pod(&record.pod) {
                Ok(pod) => self.add_container(&Container::new(record, pod))?,
                Err(_) => self.database.remove::<ContainerRecord>(&record.id)?,
            }
        }
        for pod in self.pods() {
            let _turn = pod.turn.lock().await;
            if let Err(error) = self.recover_pod(&pod).await {
                warn!(pod = pod.id, %error, "the pod is not as it was");
            }
        }
        self.clean().await
    }

    async fn recover_pod(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<()> {
        let dir = self.dir(&pod.id);
        let client = match SandboxClient::connect(&dir).await {
            Ok(client) => Some(client),
            Err(error) => {
                info!(pod = pod.id, %error, "no sandbox process");
                None
            }
        };
        pod.set_client(client.clone());
        match (pod.phase(), client) {
            (PodPhase::Ready, Some(client)) => {
                self.recover_containers(pod, &client).await?;
                self.watch_pod(pod, client);
                if let Err(error) = self.cni.check(&pod.id).await {
                    warn!(pod = pod.id, %error, "the pod's network is not as it was made");
                }
                info!(pod = pod.id, "the pod sandbox runs on");
            }
            (PodPhase::Ready, None) => self.note_end(pod, &SandboxExit::Died)?,
            (PodPhase::Stopped { .. }, client) => {
                if let Some(client) = client {
                    shut_down(&client).await?;
                    pod.set_client(None);
                }
            }
            (PodPhase::Creating | PodPhase::Removing, _) => {
                info!(pod = pod.id, "the pod was half made or half removed");
                for container in self.containers_of(&pod.id) {
                    self.forget_container(&container.id)?;
                }
                self.tear_down(pod).await?;
                self.forget_pod(&pod.id)?;
            }
        }
        Ok(())
    }

    /// Takes over what the sandbox knows of its containers.
    async fn recover_containers(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        client: &SandboxClient,
    ) -> Result<()> {
        let there = client.list().await?;
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

    /// Removes networks and directories that belong to no pod.
    async fn clean(self: &Arc<Self>) -> Result<()> {
        for id in self.cni.known()? {
            if self.pod(&id).is_err() {
                info!(pod = id, "removing a network that no pod has");
                if let Err(error) = self.cni.detach(&id).await {
                    warn!(pod = id, %error, "the network stays for now");
                }
            }
        }
        let known: Vec<_> = self.pods().iter().map(|pod| self.dir(&pod.id)).collect();
        for dir in self.dirs()? {
            if known.contains(&dir) {
                continue;
            }
            info!(dir = %dir.display(), "removing a sandbox that no pod has");
            if let Ok(client) = SandboxClient::connect(&dir).await {
                shut_down(&client).await?;
            }
            volumes::remove_dir(&dir)?;
        }
        Ok(())
    }
}
