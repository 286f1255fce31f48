//! Webhook configurations, and the APIServices.
//!
//! Webhooks are called by way of the API server itself, which aggregates their group: to its own
//! Service it speaks with an account of its own, and to servers of aggregated groups with a
//! certificate. The `caBundle` of APIServices is missing here: who serves them writes it, and keeps
//! it fresh.

use podvisor_cluster_types::{clone, datavolume, export, migration, snapshot};
use serde_json::{Value, json};

use super::crds::GROUP;
use crate::{admission, api, objects, upload};

/// The mutating and the validating configuration.
#[must_use]
pub fn webhooks() -> Vec<Value> {
    let kinds = [
        "virtualmachines",
        "virtualmachineinstances",
        "virtualmachineinstancemigrations",
        "virtualmachineinstancereplicasets",
    ];
    let statuses: Vec<String> = kinds.iter().map(|name| format!("{name}/status")).collect();
    let rule = |operations: &[&str], resources: Value| {
        json!({
            "apiGroups": [GROUP],
            "apiVersions": ["v1"],
            "operations": operations,
            "resources": resources,
            "scope": "Namespaced",
        })
    };
    let webhook = |name: &str, path: &str, rules: Vec<Value>| {
        json!({
            "name": name,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            // Requests of the other served version are converted, not missed.
            "matchPolicy": "Equivalent",
            "timeoutSeconds": 10,
            "rules": rules,
            "clientConfig": { "service": {
                "namespace": "default",
                "name": "kubernetes",
                "path": path,
                "port": 443,
            } },
        })
    };
    let configuration = |kind: &str, webhooks: Vec<Value>| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": { "name": admission::NAME },
            "webhooks": webhooks,
        })
    };
    let changes = || rule(&["CREATE", "UPDATE"], json!(kinds));
    let policies = json!({
        "apiGroups": [migration::POLICY_GROUP],
        "apiVersions": [migration::POLICY_VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["migrationpolicies"],
        "scope": "Cluster",
    });
    let eviction = json!({
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods/eviction"],
        "scope": "Namespaced",
    });
    let mut evictions = webhook("evict.kubevirt.io", admission::VALIDATE, vec![eviction]);
    // It marks the VM that has to move.
    evictions["sideEffects"] = json!("NoneOnDryRun");
    // Other pods must be evicted without us, and VMs have disruption budgets.
    evictions["failurePolicy"] = json!("Ignore");
    evictions["matchConditions"] = json!([{
        "name": "is-a-vm",
        "expression": format!("request.name.startsWith('{}-')", objects::LAUNCHER),
    }]);
    let of_volumes = || {
        let mut rule = rule(&["CREATE", "UPDATE"], json!(["datavolumes", "datasources"]));
        rule["apiGroups"] = json!([datavolume::GROUP]);
        rule["apiVersions"] = json!([datavolume::VERSION]);
        rule
    };
    // Whether its source may be copied is asked when it is made.
    let new_volumes = || {
        let mut rule = of_volumes();
        rule["operations"] = json!(["CREATE"]);
        rule["resources"] = json!(["datavolumes"]);
        rule
    };
    let of_snapshots = || {
        let kinds = json!(["virtualmachinesnapshots", "virtualmachinerestores"]);
        let mut rule = rule(&["CREATE", "UPDATE"], kinds);
        rule["apiGroups"] = json!([snapshot::GROUP]);
        rule["apiVersions"] = json!([snapshot::VERSIONS[0]]);
        rule
    };
    let of_clones = || {
        let mut rule = rule(&["CREATE", "UPDATE"], json!(["virtualmachineclones"]));
        rule["apiGroups"] = json!([clone::GROUP]);
        rule["apiVersions"] = json!([clone::VERSIONS[0]]);
        rule
    };
    let of_exports = || {
        let mut rule = rule(&["CREATE", "UPDATE"], json!(["virtualmachineexports"]));
        rule["apiGroups"] = json!([export::GROUP]);
        rule["apiVersions"] = json!([export::VERSIONS[0]]);
        rule
    };
    vec![
        configuration(
            "MutatingWebhookConfiguration",
            vec![webhook(
                "default.kubevirt.io",
                admission::MUTATE,
                vec![changes(), rule(&["UPDATE"], json!(statuses)), new_volumes()],
            )],
        ),
        configuration(
            "ValidatingWebhookConfiguration",
            vec![
                webhook(
                    "validate.kubevirt.io",
                    admission::VALIDATE,
                    vec![
                        changes(),
                        rule(&["CREATE", "UPDATE"], json!(["kubevirts"])),
                        of_volumes(),
                        of_snapshots(),
                        of_clones(),
                        of_exports(),
                        policies,
                    ],
                ),
                evictions,
            ],
        ),
    ]
}

/// The group of the subresources in both versions, that of the tokens of uploads, and that of the
/// webhooks.
#[must_use]
pub fn api_services(namespace: &str) -> Vec<Value> {
    let groups = api::VERSIONS
        .iter()
        .map(|version| (api::GROUP, *version, api::NAME));
    groups
        .chain([
            (upload::GROUP, upload::VERSION, api::NAME),
            (admission::GROUP, admission::VERSION, admission::NAME),
        ])
        .enumerate()
        .map(|(index, (group, version, service))| {
            json!({
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": { "name": format!("{version}.{group}") },
                "spec": {
                    "group": group,
                    "version": version,
                    "groupPriorityMinimum": 1000,
                    "versionPriority": 15 - index,
                    "service": { "namespace": namespace, "name": service, "port": 443 },
                },
            })
        })
        .collect()
}
