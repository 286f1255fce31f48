//! The status of pod sandboxes, as reported to clients.

use std::collections::HashMap;
use std::sync::Arc;

use podvisor_cri_messages::{
    ContainerEventResponse, ContainerEventType, ContainerStatus, LinuxPodSandboxStatus, Namespace,
    PodIp, PodSandbox, PodSandboxFilter, PodSandboxNetworkStatus, PodSandboxState,
    PodSandboxStatus, PodSandboxStatusResponse,
};

use crate::cri::error::Result;
use crate::cri::limits::cgroup;
use crate::cri::node::{Container, Node, Pod, matches_labels};
use crate::cri::state::{ContainerPhase, PodPhase, PodRecord};

/// How many pods a message names.
const MAX_NAMED: usize = 5;

/// Returns a pod's namespace and name in Kubernetes.
fn full_name(record: &PodRecord) -> String {
    let metadata = record.config.metadata.clone().unwrap_or_default();
    format!("{}/{}", metadata.namespace, metadata.name)
}

fn state(record: &PodRecord) -> i32 {
    match record.phase {
        PodPhase::Ready => PodSandboxState::SandboxReady.into(),
        _ => PodSandboxState::SandboxNotready.into(),
    }
}

fn shown(record: &PodRecord) -> PodSandbox {
    PodSandbox {
        id: record.id.clone(),
        metadata: record.config.metadata.clone(),
        state: state(record),
        created_at: record.created_at,
        labels: record.config.labels.clone(),
        annotations: record.config.annotations.clone(),
        runtime_handler: record.handler.clone(),
    }
}

fn status(record: &PodRecord) -> PodSandboxStatus {
    let mut addresses = record.addresses.iter().map(ToString::to_string);
    let security = record.config.linux.as_ref();
    let security = security.and_then(|linux| linux.security_context.as_ref());
    let options = security.and_then(|security| security.namespace_options.clone());
    // A stopped pod has released its addresses.
    let is_ready = record.phase == PodPhase::Ready;
    let network = is_ready.then(|| PodSandboxNetworkStatus {
        ip: addresses.next().unwrap_or_default(),
        additional_ips: addresses.map(|ip| PodIp { ip }).collect(),
    });
    PodSandboxStatus {
        id: record.id.clone(),
        metadata: record.config.metadata.clone(),
        state: state(record),
        created_at: record.created_at,
        network: Some(network.unwrap_or_default()),
        linux: Some(LinuxPodSandboxStatus {
            namespaces: Some(Namespace { options }),
        }),
        labels: record.config.labels.clone(),
        annotations: record.config.annotations.clone(),
        runtime_handler: record.handler.clone(),
    }
}

impl Node {
    /// PodSandboxStatus.
    pub(in crate::cri) async fn pod_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<PodSandboxStatusResponse> {
        let pod = self.settled_pod(id).await?;
        // A kubelet keeps the newer of two: what changes while this is read counts as later.
        let timestamp = self.clock.now();
        let record = pod.record();
        let mut info = HashMap::new();
        if verbose {
            let reason = match &record.phase {
                PodPhase::Stopped { reason, .. } => reason.clone(),
                _ => None,
            };
            let boot = match self.container_of_vm(&pod) {
                Some(container) if pod.is_vm() => self.boot_of(&container).await,
                _ => None,
            };
            let details = serde_json::json!({
                "sandboxID": record.id,
                "pid": pod.client().map(|client| client.pid()).unwrap_or_default(),
                "vcpus": record.size.vcpus,
                "memoryBytes": record.size.memory,
                "directory": self.dir(&record.id),
                "netns": self.cni.netns(&record.id),
                "runtimeSpec": {"linux": {"namespaces": self.namespaces(&record.id)}},
                "outsideCgroup": self.is_outside_cgroup(&pod),
                "reason": reason,
                "boot": boot,
                "config": record.config,
            });
            info.insert("info".to_owned(), details.to_string());
        }
        let containers = self.shown_of(&pod.id);
        Ok(PodSandboxStatusResponse {
            status: Some(status(&record)),
            info,
            containers_statuses: containers,
            timestamp,
        })
    }

    /// Whether a pod's machine runs outside of the control group that the kubelet made for the pod.
    pub(in crate::cri) fn is_outside_cgroup(&self, pod: &Pod) -> bool {
        let Ok(client) = pod.client() else {
            return false;
        };
        pod.with_record(|record| cgroup::is_outside(&record.config, client.pid()))
    }

    /// Returns which pods' machines are outside of their control groups, and what to do about it;
    /// `None` if all are inside.
    pub(in crate::cri) fn cgroup_fault(&self) -> Option<String> {
        let pods = self.pods().into_iter();
        let outside = pods.filter(|pod| self.is_outside_cgroup(pod));
        let names: Vec<String> = outside.map(|pod| pod.with_record(full_name)).collect();
        let named = names.iter().take(MAX_NAMED);
        let named: Vec<&str> = named.map(String::as_str).collect();
        (!names.is_empty()).then(|| {
            format!(
                "the machines of {} pods are outside of their control groups, which have no room \
                 for them: name an overhead in their RuntimeClass ({}{})",
                names.len(),
                named.join(", "),
                if names.len() > MAX_NAMED { ", …" } else { "" },
            )
        })
    }

    /// Returns the namespaces of a pod on the node, as a runtime specification lists them: agents
    /// of CNI plugins look for the network's there.
    pub(in crate::cri) fn namespaces(&self, pod: &str) -> serde_json::Value {
        serde_json::json!([{"type": "network", "path": self.cni.netns(pod)}])
    }

    /// Returns the statuses of a pod's containers, without those that are being created, which may
    /// fail. The newest come first: of several attempts, a kubelet that takes its state from here
    /// uses the first.
    fn shown_of(&self, pod: &str) -> Vec<ContainerStatus> {
        let containers = self.containers_of(pod).into_iter();
        let made = containers.filter(|container| container.phase() != ContainerPhase::Creating);
        let shown = made.map(|container| self.status_of(&container));
        let mut shown: Vec<ContainerStatus> = shown.collect();
        shown.sort_by_key(|status| std::cmp::Reverse(status.created_at));
        shown
    }

    /// ListPodSandbox.
    pub(in crate::cri) async fn list_pods(
        &self,
        filter: Option<PodSandboxFilter>,
    ) -> Vec<PodSandbox> {
        self.all_settled().await;
        let filter = filter.unwrap_or_default();
        let wanted = filter.state.map(|state| state.state);
        let is_wanted = |record: &PodRecord| {
            record.phase != PodPhase::Creating
                && record.id.starts_with(&filter.id)
                && wanted.is_none_or(|wanted| wanted == state(record))
                && matches_labels(&record.config.labels, &filter.label_selector)
        };
        // A kubelet asks each second: only what is shown is copied.
        let shown = self
            .pods()
            .into_iter()
            .filter_map(|pod| pod.with_record(|record| is_wanted(record).then(|| shown(record))));
        let mut shown: Vec<PodSandbox> = shown.collect();
        shown.sort_by_key(|shown| std::cmp::Reverse(shown.created_at));
        shown
    }

    /// Sends an event of a container.
    pub(in crate::cri) fn emit(&self, container: &Arc<Container>, kind: ContainerEventType) {
        self.send_event(&container.id, &container.pod, kind);
    }

    /// Sends an event of a pod sandbox, which counts as a container here.
    pub(in crate::cri) fn emit_pod(&self, pod: &Arc<Pod>, kind: ContainerEventType) {
        self.send_event(&pod.id, pod, kind);
    }

    fn send_event(&self, id: &str, pod: &Arc<Pod>, kind: ContainerEventType) {
        // Built while the listeners are locked, so that events are in the order of their states.
        self.events.send(|| ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind.into(),
            created_at: self.clock.now(),
            pod_sandbox_status: Some(status(&pod.record())),
            containers_statuses: self.shown_of(&pod.id),
        });
        if pod.is_vm() {
            self.vms.changed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::node::TestNode;
    use crate::cri::state::pod_record;

    #[tokio::test]
    async fn statuses_and_events_are_not_older_than_what_was_told_before() {
        let node = TestNode::new();
        let pod = Pod::new(pod_record("a"));
        node.add_pod(&pod).unwrap();
        // The clock is set back by an hour.
        let before = node.clock.at(node.clock.now() + 3_600_000_000_000);
        let mut events = node.events.listen();
        node.emit_pod(&pod, ContainerEventType::ContainerStartedEvent);
        let event = events.recv().await.unwrap().unwrap();
        assert_eq!(event.created_at, before);
        let status = node.pod_status("a", false).await.unwrap();
        assert_eq!(status.timestamp, before);
    }
}
