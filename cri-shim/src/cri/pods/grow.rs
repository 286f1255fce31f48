//! The memory of a pod's guest follows the limits of its containers.

use std::time::Duration;

use tracing::{debug, info, warn};

use crate::cri::error::{CriError, Result};
use crate::cri::newer::UpdatePodSandboxResourcesRequest;
use crate::cri::node::{Node, Pod};
use crate::cri::spec;
use crate::cri::state::{ContainerPhase, ContainerRecord, PodRecord};

/// How long a guest may take to put memory to use that it is given.
const PATIENCE: Duration = Duration::from_secs(30);

/// What guests are given memory by: 2 MiB.
const STEP: u64 = 2 << 20;

/// A container's limit that is about to be another one.
#[derive(Debug, Clone, Copy)]
pub(in crate::cri) struct NewLimit<'a> {
    pub(in crate::cri) container: &'a str,
    /// In bytes; 0 for none.
    pub(in crate::cri) memory: i64,
}

impl Node {
    /// Gives the pod's guest the memory that the limits of its containers ask for, and waits until
    /// it has put it to use. With `new` as well as it is now: what the one or the other asks for.
    pub(in crate::cri) async fn make_room(
        &self,
        pod: &Pod,
        new: Option<NewLimit<'_>>,
    ) -> Result<()> {
        let mut given = pod.growth.lock().await;
        let wanted = self.wanted(pod, None).max(self.wanted(pod, new));
        // A guest that has more keeps it for now.
        if given.is_some_and(|given| given >= wanted) || given.is_none() && wanted == 0 {
            return Ok(());
        }
        let size = pod.record().size;
        let client = pod.client()?;
        // Noted first: of a call that is not waited for to its end, it is not known what it did.
        *given = None;
        let grown = client.grow(size.memory, wanted, PATIENCE).await?;
        *given = Some(wanted);
        info!(pod = pod.id, wanted, grown, "the guest grows");
        match grown < wanted {
            false => Ok(()),
            true => Err(CriError::NoRoom {
                id: pod.id.clone(),
                wanted: size.memory.saturating_add(wanted),
                has: size.memory.saturating_add(grown),
            }),
        }
    }

    /// Takes back what the limits of the pod's containers do not ask for any more, as far as it is
    /// not in use.
    pub(in crate::cri) async fn give_back(&self, pod: &Pod) {
        let mut given = pod.growth.lock().await;
        let wanted = self.wanted(pod, None);
        let size = pod.record().size;
        if size.growth == 0 || *given == Some(wanted) || given.is_none() && wanted == 0 {
            return;
        }
        let Ok(client) = pod.client() else { return };
        *given = None;
        match client.grow(size.memory, wanted, Duration::ZERO).await {
            Ok(_) => *given = Some(wanted),
            Err(error) => debug!(pod = pod.id, %error, "the guest keeps its memory"),
        }
    }

    /// UpdatePodSandboxResources: the guest gets what the pod may use from now on.
    pub(in crate::cri) async fn update_pod_resources(
        &self,
        request: UpdatePodSandboxResourcesRequest,
    ) -> Result<()> {
        let pod = self.pod(&request.pod_sandbox_id)?;
        let _turn = pod.turn.lock().await;
        pod.client()?;
        for resources in [&request.overhead, &request.resources] {
            spec::resources(&resources.clone().unwrap_or_default())?;
        }
        pod.update(&self.database, |record| {
            let linux = record.config.linux.get_or_insert_default();
            for (kept, new) in [
                (&mut linux.overhead, request.overhead),
                (&mut linux.resources, request.resources),
            ] {
                if new.is_some() {
                    *kept = new;
                }
            }
        })?;
        let made = self.make_room(&pod, None).await;
        // Less is wanted than before.
        self.give_back(&pod).await;
        made
    }

    /// How much more than at first the pod's guest needs, in bytes.
    fn wanted(&self, pod: &Pod, new: Option<NewLimit<'_>>) -> u64 {
        let record = pod.record();
        let Some(guest) = self.config.guest(&record.handler) else {
            // The handler is not configured any more.
            return 0;
        };
        let containers = self.containers_of(&pod.id);
        let records = containers.iter().map(|container| container.record());
        let limits = limits(records, new);
        growth(&record, guest.sizes.memory(&record.config, limits))
    }
}

/// The limits of all containers that use memory, or will, in bytes.
fn limits(records: impl Iterator<Item = ContainerRecord>, new: Option<NewLimit<'_>>) -> u64 {
    let uses_memory = |record: &ContainerRecord| {
        !matches!(
            record.phase,
            ContainerPhase::Exited(_) | ContainerPhase::Removing
        )
    };
    let limits = records.filter(uses_memory).map(|record| {
        let resources = record.config.linux.and_then(|linux| linux.resources);
        let limit = match new {
            Some(new) if new.container == record.id => new.memory,
            _ => resources.map_or(0, |resources| resources.memory_limit_in_bytes),
        };
        u64::try_from(limit).unwrap_or(0)
    });
    limits.fold(0, u64::saturating_add)
}

/// How much more than at first a guest of `memory` bytes has.
fn growth(record: &PodRecord, memory: u64) -> u64 {
    let size = record.size;
    let more = memory.saturating_sub(size.memory);
    let more = more.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
    if more > size.growth && size.growth > 0 {
        warn!(
            pod = record.id,
            wanted = more,
            most = size.growth,
            "a guest cannot grow as much as its containers' limits"
        );
    }
    more.min(size.growth)
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerConfig, LinuxContainerConfig, LinuxContainerResources};

    use super::*;
    use crate::cri::state::{GuestSize, PodPhase};

    fn container(id: &str, phase: ContainerPhase, limit: i64) -> ContainerRecord {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: limit,
            ..Default::default()
        };
        ContainerRecord {
            id: id.to_owned(),
            pod: "pod".to_owned(),
            config: ContainerConfig {
                linux: Some(LinuxContainerConfig {
                    resources: Some(resources),
                    security_context: None,
                }),
                ..Default::default()
            },
            image: String::new(),
            image_ref: String::new(),
            stop_signal: 15,
            log_path: String::new(),
            volumes: Vec::new(),
            process: Default::default(),
            user: String::new(),
            groups: Default::default(),
            identity: None,
            created_at: 0,
            phase,
        }
    }

    #[test]
    fn limits_of_containers_that_are_there_count() {
        let ended = ContainerPhase::Exited(crate::cri::state::ContainerExit {
            started_at: 0,
            finished_at: 0,
            code: 0,
            reason: String::new(),
            message: String::new(),
        });
        let all = || {
            [
                container("a", ContainerPhase::Running { started_at: 1 }, 100),
                container("b", ContainerPhase::Created, 20),
                container("c", ContainerPhase::Created, -1),
                container("d", ended.clone(), 7),
                container("e", ContainerPhase::Removing, 7),
            ]
            .into_iter()
        };
        assert_eq!(limits(all(), None), 120);
        let new = |container, memory| Some(NewLimit { container, memory });
        assert_eq!(limits(all(), new("a", 300)), 320);
        assert_eq!(limits(all(), new("a", 0)), 20);
        assert_eq!(limits(all(), new("d", 300)), 120);
    }

    #[test]
    fn a_guest_grows_by_steps_and_as_far_as_it_can() {
        let record = PodRecord {
            id: "pod".to_owned(),
            config: Default::default(),
            handler: String::new(),
            created_at: 0,
            phase: PodPhase::Ready,
            addresses: Vec::new(),
            size: GuestSize {
                memory: 256 << 20,
                growth: 1 << 30,
            },
        };
        let grown = |memory: u64| growth(&record, memory);
        assert_eq!(grown(100 << 20), 0);
        assert_eq!(grown(257 << 20), 2 << 20);
        assert_eq!(grown(512 << 20), 256 << 20);
        assert_eq!(grown(u64::MAX), 1 << 30);
        let fixed = PodRecord {
            size: GuestSize::default(),
            ..record.clone()
        };
        assert_eq!(growth(&fixed, 1 << 40), 0, "made by an older daemon");
    }
}
