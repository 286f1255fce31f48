//! How much a pod matters to its node: its share of CPU time, and how readily the host's kernel
//! kills its machine when the node has no memory left. Both are what the kubelet says of its
//! containers, put together: the host sees one process.

use tracing::{debug, warn};

use crate::cri::node::{Node, Pod};
use crate::cri::state::{ContainerRecord, PodRecord};

/// What is killed before all others.
const MOST: i64 = 1000;

/// The lowest that a pod may have: the kubelet and this daemon go after it.
const LOWEST: i64 = -998;

/// The lowest value of a pod of the class Burstable, as the kubelet has it.
const BURSTABLE: i64 = 3;

impl Node {
    /// Has the host's kernel treat the pod's machine as its containers are to be treated.
    pub(in crate::cri) fn weigh(&self, pod: &Pod) {
        let Ok(client) = pod.client() else { return };
        if let Some(shares) = cpu_shares(&pod.record()) {
            client.set_cpu_shares(shares);
        }
        let mut records: Vec<_> = (self.containers_of(&pod.id).iter())
            .map(|container| container.record())
            .collect();
        records.retain(|record| record.phase.is_there());
        let values: Vec<i64> = records.into_iter().map(wanted_by).collect();
        // One without containers keeps what it had: others may come.
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
    // A process has no others.
    wanted.clamp(-MOST, MOST)
}

fn cpu_shares(record: &PodRecord) -> Option<u64> {
    let resources = record.config.linux.as_ref()?.resources.as_ref()?;
    u64::try_from(resources.cpu_shares)
        .ok()
        .filter(|shares| *shares > 0)
}

/// What fits containers that are killed together. The kubelet gives a Burstable one 1000 less the
/// thousandths of the node's memory that it requests: these add up. A Guaranteed one has -997, one
/// of the class BestEffort 1000.
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
    use super::*;

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
