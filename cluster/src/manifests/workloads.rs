//! Deployments, and the services in front of them.

use serde_json::{Value, json};

use super::Options;
use crate::{admission, api, upload};

/// The port that servers listen on.
const PORT: u16 = 8443;

/// The port of the controller's metrics.
const METRICS: u16 = 8080;

/// Everything that runs.
pub(super) fn workloads(options: &Options) -> Vec<Value> {
    let mut items = vec![
        deployment(options, "podvisor-controller", "controller", false),
        deployment(options, admission::NAME, "admission", true),
        deployment(options, api::NAME, "api", true),
        deployment(options, upload::PROXY, "upload-proxy", true),
    ];
    let servers = [admission::NAME, api::NAME, upload::PROXY];
    for name in servers {
        items.push(json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": options.namespace },
            "spec": {
                "selector": labels(name),
                "ports": [{ "name": "https", "port": 443, "targetPort": PORT }],
            },
        }));
    }
    for name in ["podvisor-controller"].into_iter().chain(servers) {
        items.push(json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": { "name": name, "namespace": options.namespace },
            "spec": { "maxUnavailable": 1, "selector": { "matchLabels": labels(name) } },
        }));
    }
    items
}

fn labels(name: &str) -> Value {
    json!({ "app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "podvisor" })
}

/// A field of the pod in the environment.
fn field(name: &str, path: &str) -> Value {
    json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } })
}

fn container(options: &Options, subcommand: &str) -> Value {
    json!({
        "name": subcommand,
        "image": options.image,
        "args": [subcommand],
        "env": [
            { "name": "RUST_LOG", "value": "info" },
            field("POD_NAME", "metadata.name"),
            field("POD_NAMESPACE", "metadata.namespace"),
        ],
        "resources": {
            "requests": { "cpu": "10m", "memory": "32Mi" },
            "limits": { "memory": "256Mi" },
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
    })
}

fn deployment(options: &Options, name: &str, subcommand: &str, serves: bool) -> Value {
    let mut container = container(options, subcommand);
    if !serves {
        container["args"] = json!([
            subcommand,
            format!("--metrics=0.0.0.0:{METRICS}"),
            format!("--importer-image={}", options.image),
        ]);
        container["ports"] = json!([{ "name": "metrics", "containerPort": METRICS }]);
    }
    if serves {
        container["ports"] = json!([{ "name": "https", "containerPort": PORT }]);
        container["readinessProbe"] =
            json!({ "httpGet": { "path": "/healthz", "port": PORT, "scheme": "HTTPS" } });
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": options.namespace },
        "spec": {
            "replicas": options.replicas,
            "selector": { "matchLabels": labels(name) },
            "template": {
                "metadata": { "labels": labels(name) },
                "spec": {
                    "serviceAccountName": name,
                    "priorityClassName": "system-cluster-critical",
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": 65532,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "topologySpreadConstraints": [{
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": { "matchLabels": labels(name) },
                    }],
                    "containers": [container],
                },
            },
        },
    })
}
