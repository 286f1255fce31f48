//! How much a pod matters to its node: its share of CPU time, how much of the node's swap its
//! machine may use, and how readily the host's kernel kills that when the node has no memory left.
//! All are what the kubelet says of its containers, put together: the host sees one process.

use tracing::{debug, warn};

use crate::cri::node::{Node, Pod};
use crate::cri::state::{ContainerRecord, PodRecord};

/// The value of processes that are killed before all others.
const MOST: i64 = 1000;

/// The lowest value of a pod: the kubelet and this daemon are killed after it.
const LOWEST: i64 = -998;

/// The lowest value of a pod of the class Burstable, as the kubelet sets it.
const BURSTABLE: i64 = 3;

impl Node {
    /// Applies CPU shares and OOM score of the pod's containers to its machine.
    pub(in crate::cri) fn set_importance(&self, pod: &Pod) {
        let Ok(client) = pod.client() else { return };
        if let Some(shares) = cpu_shares(&pod.record()) {
            client.set_cpu_shares(shares);
        }
        let mut records: Vec<_> = (self.containers_of(&pod.id).iter())
            .map(|container| container.record())
            .collect();
        records.retain(|record| record.phase.is_there());
        client.limit_swap(swap_limit(&pod.record(), &records));
        let values: Vec<i64> = records.into_iter().map(wanted_by).collect();
        // Without containers it keeps its value: others may be created.
        let Some(value) = oom_score_adj(&values) else {
            return;
        };
        debug!(pod = pod.id, value, "the machine's oom_score_adj");
        if let Err(error) = client.set_oom_score_adj(value) {
            warn!(pod = pod.id, value, %error, "failed to set the machine's oom_score_adj");
        }
    }
}

fn wanted_by(record: ContainerRecord) -> i64 {
    let resources = record.config.linux.and_then(|linux| linux.resources);
    let wanted = resources.map_or(0, |resources| resources.oom_score_adj);
    // The range that the kernel accepts.
    wanted.clamp(-MOST, MOST)
}

/// The bytes of the node's swap that a pod's machine may use: as much as its containers together;
/// `None` is no limit. The memory of all of them is the machine's.
fn swap_limit(pod: &PodRecord, containers: &[ContainerRecord]) -> Option<u64> {
    let linux = pod.config.linux.as_ref();
    let is_kubelets = linux.is_some_and(|linux| !linux.cgroup_parent.is_empty());
    if containers.is_empty() {
        // Secrets may be there already, and what was swapped out remains so.
        return is_kubelets.then_some(0);
    }
    let limits = containers.iter().map(|record| {
        let resources = record.config.linux.as_ref()?.resources.as_ref()?;
        resources
            .unified
            .get("memory.swap.max")?
            .parse::<u64>()
            .ok()
    });
    limits.sum::<Option<u64>>()
}

fn cpu_shares(record: &PodRecord) -> Option<u64> {
    let resources = record.config.linux.as_ref()?.resources.as_ref()?;
    u64::try_from(resources.cpu_shares)
        .ok()
        .filter(|shares| *shares > 0)
}

/// Returns the value for containers that are killed together. The kubelet gives a Burstable one
/// 1000 less the thousandths of the node's memory that it requests: these add up. A Guaranteed one
/// has -997, one of the class BestEffort 1000.
fn oom_score_adj(values: &[i64]) -> Option<i16> {
    let lowest = values.iter().min()?;
    let requested: i64 = values.iter().map(|value| MOST - value).sum();
    let value = (MOST - requested)
        .max(BURSTABLE.min(*lowest))
        .clamp(LOWEST, MOST);
    i16::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{
        LinuxContainerConfig, LinuxContainerResources, LinuxPodSandboxConfig,
    };

    use super::*;
    use crate::cri::state::{container_record, pod_record};

    #[test]
    fn swap_that_containers_may_have_is_their_machines() {
        let container = |limit: Option<&str>| {
            let mut record = container_record("a", "pod");
            let unified = limit.map(|limit| ("memory.swap.max".to_owned(), limit.to_owned()));
            record.config.linux = Some(LinuxContainerConfig {
                resources: Some(LinuxContainerResources {
                    unified: unified.into_iter().collect(),
                    ..Default::default()
                }),
                ..Default::default()
            });
            record
        };
        let mut pod = pod_record("pod");
        for (limits, expected) in [
            (&[Some("0"), Some("0")][..], Some(0)),
            (&[Some("0"), Some("4096"), Some("8192")], Some(12_288)),
            (&[Some("0"), None], None),
            (&[Some("max"), Some("0")], None),
            (&[], None),
        ] {
            let containers: Vec<_> = limits.iter().map(|limit| container(*limit)).collect();
            assert_eq!(swap_limit(&pod, &containers), expected, "{limits:?}");
        }
        pod.config.linux = Some(LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/pod".to_owned(),
            ..Default::default()
        });
        assert_eq!(swap_limit(&pod, &[]), Some(0));
        assert_eq!(swap_limit(&pod, &[container(None)]), None);
    }

    #[test]
    fn a_machine_is_killed_as_readily_as_its_containers_together() {
        for (values, expected) in [
            (&[][..], None),
            (&[-997, -997], Some(-997)),
            (&[1000, 1000], Some(1000)),
            (&[900, 700], Some(600)),
            // Requests of more than the node has.
            (&[100, 100], Some(3)),
            (&[0, 0], Some(0)),
            (&[-1000, 1000], Some(-998)),
        ] {
            assert_eq!(oom_score_adj(values), expected, "{values:?}");
        }
    }
}
