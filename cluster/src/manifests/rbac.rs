//! Accounts and what they may do: no more than they need.

use serde_json::{Value, json};

use super::{Options, crds::GROUP};
use crate::{admission, api, certificates};

/// Everything that a controller does with the objects it owns.
const ALL: [&str; 7] = [
    "get", "list", "watch", "create", "update", "patch", "delete",
];

const READ: [&str; 3] = ["get", "list", "watch"];

fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> Value {
    json!({ "apiGroups": groups, "resources": resources, "verbs": verbs })
}

fn named(groups: &[&str], resources: &[&str], names: &[&str], verbs: &[&str]) -> Value {
    let mut rule = rule(groups, resources, verbs);
    rule["resourceNames"] = json!(names);
    rule
}

/// Accounts, roles and bindings.
pub(super) fn rbac(options: &Options) -> Vec<Value> {
    let events = || rule(&["", "events.k8s.io"], &["events"], &["create", "patch"]);
    let objects = [
        "virtualmachines",
        "virtualmachineinstances",
        "virtualmachineinstancereplicasets",
    ];
    let statuses = [
        "virtualmachines/status",
        "virtualmachineinstances/status",
        "virtualmachineinstancereplicasets/status",
        "virtualmachineinstancemigrations/status",
    ];
    let admissions = [
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
    ];
    let services: Vec<String> = api::VERSIONS
        .iter()
        .map(|version| format!("{version}.{}", api::GROUP))
        .collect();
    let services: Vec<&str> = services.iter().map(String::as_str).collect();

    let mut items = Vec::new();
    let mut component = |name: &str, cluster: Vec<Value>, own: Vec<Value>| {
        items.extend(account(&options.namespace, name, &cluster, &own));
    };
    component(
        "podvisor-controller",
        vec![
            rule(&[GROUP], &objects, &ALL),
            rule(&[GROUP], &["virtualmachineinstancemigrations"], &ALL),
            rule(&[GROUP], &statuses, &["get", "update", "patch"]),
            rule(&[GROUP], &["virtualmachines/finalizers"], &["update"]),
            rule(
                &[GROUP],
                &["virtualmachineinstances/finalizers"],
                &["update"],
            ),
            rule(&[""], &["pods"], &ALL),
            rule(&[""], &["persistentvolumeclaims", "nodes"], &READ),
            rule(&["apps"], &["controllerrevisions"], &ALL),
            rule(&["policy"], &["poddisruptionbudgets"], &ALL),
            events(),
        ],
        vec![rule(
            &["coordination.k8s.io"],
            &["leases"],
            &["get", "create", "update", "patch"],
        )],
    );
    component(
        "podvisor-admission",
        vec![
            rule(
                &[GROUP],
                &[
                    "virtualmachineinstances",
                    "virtualmachineinstancemigrations",
                ],
                &["get", "list"],
            ),
            named(
                &["admissionregistration.k8s.io"],
                &admissions,
                &[admission::NAME],
                &["get", "patch"],
            ),
        ],
        authority_rules(),
    );
    component(
        "podvisor-api",
        vec![
            rule(&[GROUP], &["virtualmachines"], &["get", "update", "patch"]),
            rule(
                &[GROUP],
                &["virtualmachineinstances"],
                &["get", "list", "patch", "delete"],
            ),
            rule(&[GROUP], &["virtualmachines/status"], &["get", "patch"]),
            rule(
                &[GROUP],
                &["virtualmachineinstancemigrations"],
                &["create", "get", "list"],
            ),
            rule(&[""], &["pods"], &["list", "delete"]),
            rule(
                &["authorization.k8s.io"],
                &["subjectaccessreviews"],
                &["create"],
            ),
            named(
                &["apiregistration.k8s.io"],
                &["apiservices"],
                &services,
                &["get", "patch"],
            ),
        ],
        authority_rules(),
    );
    // The certificate authority of the front proxy is public to servers that are aggregated.
    items.push(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": { "name": "podvisor-api-front-proxy", "namespace": "kube-system" },
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": "extension-apiserver-authentication-reader",
        },
        "subjects": [{
            "kind": "ServiceAccount",
            "name": "podvisor-api",
            "namespace": options.namespace,
        }],
    }));
    items.extend(account(
        &options.namespace,
        "podvisor-node",
        &[
            rule(&[GROUP], &["virtualmachineinstances"], &READ),
            rule(
                &[GROUP],
                &["virtualmachineinstances/status"],
                &["get", "patch"],
            ),
            rule(&[""], &["pods"], &READ),
            events(),
        ],
        &[],
    ));
    items.extend(users());
    items
}

/// What it takes to keep the authority.
fn authority_rules() -> Vec<Value> {
    vec![
        rule(&[""], &["secrets"], &["create"]),
        named(
            &[""],
            &["secrets"],
            &[certificates::SECRET],
            &["get", "update"],
        ),
    ]
}

/// An account with its rights in the cluster and in its own namespace.
fn account(namespace: &str, name: &str, cluster: &[Value], own: &[Value]) -> Vec<Value> {
    let subjects = json!([{ "kind": "ServiceAccount", "name": name, "namespace": namespace }]);
    let group = "rbac.authorization.k8s.io";
    let version = format!("{group}/v1");
    let reference = |kind: &str| json!({ "apiGroup": group, "kind": kind, "name": name });
    let mut items = vec![
        json!({
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": { "name": name, "namespace": namespace },
        }),
        json!({
            "apiVersion": version,
            "kind": "ClusterRole",
            "metadata": { "name": name },
            "rules": cluster,
        }),
        json!({
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": { "name": name },
            "roleRef": reference("ClusterRole"),
            "subjects": subjects,
        }),
    ];
    if !own.is_empty() {
        items.push(json!({
            "apiVersion": version,
            "kind": "Role",
            "metadata": { "name": name, "namespace": namespace },
            "rules": own,
        }));
        items.push(json!({
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": { "name": name, "namespace": namespace },
            "roleRef": reference("Role"),
            "subjects": subjects,
        }));
    }
    items
}

/// Roles for users, which Kubernetes' own `view`, `edit` and `admin` take up.
fn users() -> Vec<Value> {
    let objects = [
        "virtualmachines",
        "virtualmachineinstances",
        "virtualmachineinstancemigrations",
        "virtualmachineinstancereplicasets",
    ];
    let verbs: Vec<&str> = ALL.into_iter().chain(["deletecollection"]).collect();
    let role = |name: &str, into: &[&str], rules: Vec<Value>| {
        let labels: serde_json::Map<String, Value> = into
            .iter()
            .map(|role| {
                let label = format!("rbac.authorization.k8s.io/aggregate-to-{role}");
                (label, json!("true"))
            })
            .collect();
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": { "name": name, "labels": labels },
            "rules": rules,
        })
    };
    let read = [
        "virtualmachineinstances/guestosinfo",
        "virtualmachineinstances/filesystemlist",
        "virtualmachineinstances/userlist",
    ];
    let update = [
        "virtualmachines/start",
        "virtualmachines/stop",
        "virtualmachines/restart",
        "virtualmachines/migrate",
        "virtualmachineinstances/pause",
        "virtualmachineinstances/unpause",
        "virtualmachineinstances/softreboot",
        "virtualmachineinstances/reset",
        "virtualmachineinstances/freeze",
        "virtualmachineinstances/unfreeze",
    ];
    let streams = [
        "virtualmachineinstances/console",
        "virtualmachineinstances/portforward",
    ];
    let both = ["admin", "edit"];
    vec![
        role(
            "podvisor-vm-view",
            &["view"],
            vec![
                rule(&[GROUP], &objects, &READ),
                rule(&[api::GROUP], &read, &["get"]),
            ],
        ),
        role(
            "podvisor-vm-edit",
            &both,
            vec![
                rule(&[GROUP], &objects, &verbs),
                rule(&[api::GROUP], &update, &["update"]),
                rule(&[api::GROUP], &streams, &["get"]),
                rule(&[api::GROUP], &read, &["get"]),
            ],
        ),
    ]
}
