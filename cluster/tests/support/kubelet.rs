//! Plays the scheduler and the kubelet: pods get a node, run, and end when they are deleted.

use std::collections::HashSet;
use std::pin::pin;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams};
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
                let runs = pod_node(&pod).is_some()
                    && started.insert(pod.metadata.uid.clone().unwrap_or_default());
                steps.spawn(step(pods.clone(), pod, runs));
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
async fn step(pods: Api<Pod>, pod: Pod, runs: bool) {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    if pod.metadata.deletion_timestamp.is_some() {
        finish(&pods, name).await;
    } else if runs {
        run(&pods, name).await;
    } else if pod_node(&pod).is_none() {
        bind(&pods, name).await;
    }
}

fn pod_node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Gives a pod its node. That the pod is gone by now is none of the kubelet's business.
pub async fn bind(pods: &Api<Pod>, name: &str) {
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
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
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    let state = json!({"terminated": {"exitCode": code, "reason": "Exited"}});
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
