//! Plays the scheduler and the kubelet: pods get a node, run, and end when they are deleted.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// The node that pods get.
pub const NODE: &str = "node-1";

/// A task that plays the kubelet in a namespace until it is dropped.
pub struct Kubelet(tokio::task::JoinHandle<()>);

impl Kubelet {
    /// Begins to play.
    pub fn play(client: Client, namespace: &str) -> Self {
        Self::play_on(client, namespace, &[NODE])
    }

    /// Begins to play for several nodes, none of which gets two pods of one instance.
    pub fn play_on(client: Client, namespace: &str, nodes: &[&str]) -> Self {
        let nodes: Arc<[String]> = nodes.iter().map(|&node| node.to_owned()).collect();
        let pods = Api::<Pod>::namespaced(client, namespace);
        Self(tokio::spawn(async move {
            let stream = watcher(pods.clone(), watcher::Config::default())
                .default_backoff()
                .applied_objects();
            let mut stream = pin!(stream);
            let mut started = HashSet::new();
            let mut steps = JoinSet::new();
            while let Ok(Some(pod)) = stream.try_next().await {
                while steps.try_join_next().is_some() {}
                let runs = node_of(&pod).is_some()
                    && started.insert(pod.metadata.uid.clone().unwrap_or_default());
                steps.spawn(step(pods.clone(), pod, runs, Arc::clone(&nodes)));
            }
        }))
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Does what a pod waits for; `runs`: it got its node just now.
async fn step(pods: Api<Pod>, pod: Pod, runs: bool, nodes: Arc<[String]>) {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    if pod.metadata.deletion_timestamp.is_some() {
        // Another one may have the name by now.
        let mut params = DeleteParams::default().grace_period(0);
        params.preconditions = Some(Preconditions {
            uid: pod.metadata.uid.clone(),
            resource_version: None,
        });
        let _ = pods.delete(name, &params).await;
    } else if runs {
        run(&pods, name).await;
    } else if node_of(&pod).is_none() {
        schedule(&pods, &pod, &nodes).await;
    }
}

/// Gives a pod the node that it asks for by its name, or the first one that has no other pod of
/// its instance.
pub async fn schedule(pods: &Api<Pod>, pod: &Pod, nodes: &[String]) {
    let text = serde_json::to_value(pod).unwrap_or_default();
    let asked = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
                 /nodeSelectorTerms/0/matchFields/0/values/0";
    if let Some(node) = text.pointer(asked).and_then(Value::as_str) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        return bind(pods, name, node).await;
    }
    let label = "kubevirt.io/created-by";
    let labels = pod.metadata.labels.as_ref();
    let of = labels.and_then(|labels| labels.get(label));
    let taken = match of {
        Some(of) => {
            let list = ListParams::default().labels(&format!("{label}={of}"));
            let list = pods.list(&list).await;
            list.map(|list| list.items).unwrap_or_default()
        }
        None => Vec::new(),
    };
    let is_free = |node: &&String| taken.iter().all(|pod| node_of(pod) != Some(*node));
    if let Some(node) = nodes.iter().find(is_free) {
        bind(pods, pod.metadata.name.as_deref().unwrap_or_default(), node).await;
    }
}

/// Returns a pod's node, if it has one.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Gives a pod its node. That the pod is gone by now is none of the kubelet's business.
pub async fn bind(pods: &Api<Pod>, name: &str, node: &str) {
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let _: Result<Value, _> = pods
        .create_subresource("binding", name, &Default::default(), &binding)
        .await;
}

/// Reports that a pod's VM runs.
pub async fn run(pods: &Api<Pod>, name: &str) {
    let yes = |kind: &str| json!({"type": kind, "status": "True"});
    set_status(
        pods,
        name,
        json!({
            "phase": "Running",
            "podIP": "10.1.0.7",
            "podIPs": [{"ip": "10.1.0.7"}],
            "conditions": [yes("PodReadyToStartContainers"), yes("Ready"), yes("ContainersReady")],
            "containerStatuses": [container(json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}))],
        }),
    )
    .await;
}

/// Reports that a pod's VM ended with an exit code.
pub async fn exit(pods: &Api<Pod>, name: &str, code: i32) {
    exit_because(pods, name, code, "Exited").await;
}

/// Reports that a pod's VM ended, and why in a word.
pub async fn exit_because(pods: &Api<Pod>, name: &str, code: i32, reason: &str) {
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    let state = json!({"terminated": {"exitCode": code, "reason": reason}});
    set_status(
        pods,
        name,
        json!({
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted"}],
            "containerStatuses": [container(state)],
        }),
    )
    .await;
}

/// Ends a pod that is being deleted.
pub async fn finish(pods: &Api<Pod>, name: &str) {
    let at_once = DeleteParams::default().grace_period(0);
    let _ = pods.delete(name, &at_once).await;
}

fn container(state: Value) -> Value {
    json!({
        "name": "compute",
        "image": "i",
        "imageID": "i",
        "ready": true,
        "restartCount": 0,
        "state": state,
    })
}

/// Writes a pod's status; conditions of others stay.
pub async fn set_status(pods: &Api<Pod>, name: &str, status: Value) {
    let patch = Patch::Strategic(json!({ "status": status }));
    let _ = pods
        .patch_status(name, &PatchParams::default(), &patch)
        .await;
}
