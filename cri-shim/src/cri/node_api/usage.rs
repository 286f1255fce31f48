//! What the node's VMs have used.

use podvisor_node_api::messages::{CardUsage, Traffic, VmUsage, VmUsageList};

use super::view::PodOfVm;
use crate::cni::{Direction, InterfaceCounters};
use crate::cri::containers::in_time;
use crate::cri::node::Node;

impl Node {
    /// Returns what the VMs that run have used; one that does not say so in time is left out.
    pub(super) async fn usage_of_vms(&self) -> VmUsageList {
        self.all_settled().await;
        let pods = self.vm_pods();
        let found = in_time(pods.iter().map(|found| self.usage_of_vm(found))).await;
        VmUsageList {
            vms: found.into_iter().flatten().collect(),
        }
    }

    async fn usage_of_vm(&self, found: &PodOfVm) -> Option<VmUsage> {
        let (pod, container) = self.running_vm(&found.name).await.ok()?;
        let figures = self.figures(&container).await.ok()?;
        // A pod that ends meanwhile has no namespace any more.
        let cards = self.cni.counters(&pod.id).unwrap_or_default();
        Some(VmUsage {
            vm: Some(found.name.clone()),
            cpu_ns: figures.cpu_usage_us.saturating_mul(1000),
            memory_bytes: figures.memory_limit_bytes,
            resident_bytes: figures.memory_usage_bytes,
            cards: cards.into_iter().map(card).collect(),
            disk_read_bytes: figures.io_read_bytes,
            disk_write_bytes: figures.io_write_bytes,
            disk_reads: figures.io_read_operations,
            disk_writes: figures.io_write_operations,
        })
    }
}

fn card(counters: InterfaceCounters) -> CardUsage {
    CardUsage {
        name: counters.name,
        received: Some(traffic(counters.received)),
        sent: Some(traffic(counters.sent)),
    }
}

fn traffic(direction: Direction) -> Traffic {
    let Direction {
        bytes,
        packets,
        errors,
        dropped,
    } = direction;
    Traffic {
        bytes,
        packets,
        errors,
        dropped,
    }
}
