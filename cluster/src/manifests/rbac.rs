//! Accounts and what they may do: no more than they need.

use std::collections::BTreeSet;

use podvisor_cluster_types::{
    clone, datavolume, export, instancetype, migration::POLICY_GROUP, snapshot,
};
use serde_json::{Value, json};

use super::{Options, crds::GROUP};
use crate::{
    admission,
    api::{
        self,
        subresources::{Right, SUBRESOURCES, first_step},
    },
    certificates, copy,
    token::Grant as _,
    upload,
};

/// Everything that a controller does with the objects it owns.
const ALL: [&str; 7] = [
    "get", "list", "watch", "create", "update", "patch", "delete",
];

/// Instance types and preferences; the first two are a namespace's own.
const INSTANCETYPES: [&str; 4] = [
    "virtualmachineinstancetypes",
    "virtualmachinepreferences",
    "virtualmachineclusterinstancetypes",
    "virtualmachineclusterpreferences",
];

const READ: [&str; 3] = ["get", "list", "watch"];

/// Claims are made, and marked when they are filled; they go with their DataVolumes, or give way
/// to those of a restore.
const CLAIMS: [&str; 6] = ["get", "list", "watch", "create", "patch", "delete"];

const VOLUMES: [&str; 2] = ["datavolumes", "datasources"];

/// Exports of volumes.
const EXPORTS: &str = "virtualmachineexports";

/// What users make of snapshots; what these contain is made by the system alone.
const SNAPSHOTS: [&str; 2] = ["virtualmachinesnapshots", "virtualmachinerestores"];
const CONTENTS: &str = "virtualmachinesnapshotcontents";

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
    let services: Vec<String> = api::VERSIONS
        .iter()
        .map(|version| format!("{version}.{}", api::GROUP))
        .chain([format!("{}.{}", upload::VERSION, upload::GROUP)])
        .collect();
    let services: Vec<&str> = services.iter().map(String::as_str).collect();
    let reviews = format!("{}.{}", admission::VERSION, admission::GROUP);

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
            rule(&[instancetype::GROUP], &INSTANCETYPES, &["get"]),
            rule(&[""], &["pods"], &ALL),
            rule(&[""], &["nodes"], &READ),
            rule(&[""], &["persistentvolumeclaims"], &CLAIMS),
            // Certificates of pods for uploads, copies and exports, and tokens; none is read.
            rule(&[""], &["secrets"], &["create"]),
            rule(&["storage.k8s.io"], &["storageclasses"], &["get", "list"]),
            rule(&[datavolume::GROUP], &["datavolumes"], &ALL),
            rule(&[datavolume::GROUP], &["datasources"], &READ),
            rule(&[datavolume::GROUP], &["datasources/status"], &["patch"]),
            // Where uploads go: one that says nothing is made, and its status is written.
            rule(&[datavolume::GROUP], &["cdiconfigs"], &["create"]),
            named(
                &[datavolume::GROUP],
                &["cdiconfigs"],
                &["config"],
                &["get", "patch"],
            ),
            rule(
                &[datavolume::GROUP],
                &["datavolumes/status", "datavolumes/finalizers"],
                &["update", "patch"],
            ),
            rule(&[snapshot::GROUP], &SNAPSHOTS, &ALL),
            rule(&[snapshot::GROUP], &[CONTENTS], &ALL),
            rule(&[clone::GROUP], &["virtualmachineclones"], &READ),
            rule(
                &[clone::GROUP],
                &[
                    "virtualmachineclones/status",
                    "virtualmachineclones/finalizers",
                ],
                &["update", "patch"],
            ),
            rule(
                &[snapshot::GROUP],
                &[
                    "virtualmachinesnapshots/status",
                    "virtualmachinesnapshots/finalizers",
                    "virtualmachinesnapshotcontents/status",
                    "virtualmachinesnapshotcontents/finalizers",
                    "virtualmachinerestores/status",
                    "virtualmachinerestores/finalizers",
                ],
                &["update", "patch"],
            ),
            // They are deleted when their time has come.
            rule(
                &[export::GROUP],
                &[EXPORTS],
                &["get", "list", "watch", "delete"],
            ),
            rule(
                &[export::GROUP],
                &["virtualmachineexports/status"],
                &["patch"],
            ),
            // Each export is reached by one.
            rule(&[""], &["services"], &["get", "create"]),
            rule(
                &["snapshot.storage.k8s.io"],
                &["volumesnapshots"],
                &["get", "list", "watch", "create"],
            ),
            rule(
                &["snapshot.storage.k8s.io"],
                &["volumesnapshotclasses"],
                &["get", "list"],
            ),
            // Guests write nothing while their disks are taken.
            rule(
                &[api::GROUP],
                &[
                    "virtualmachineinstances/freeze",
                    "virtualmachineinstances/unfreeze",
                ],
                &["update"],
            ),
            rule(
                &[api::GROUP],
                &["virtualmachineinstances/guestosinfo"],
                &["get"],
            ),
            // Readiness gates.
            rule(&[""], &["pods/status"], &["patch"]),
            // What the scheduler counts of VMs that get more CPUs and memory.
            rule(&[""], &["pods/resize"], &["patch"]),
            rule(&["apps"], &["controllerrevisions"], &ALL),
            rule(&["policy"], &["poddisruptionbudgets"], &ALL),
            // Which policy a migration has.
            rule(&[POLICY_GROUP], &["migrationpolicies"], &["list"]),
            rule(&[""], &["namespaces"], &["get"]),
            events(),
        ],
        // It shows nodes a certificate of the authority.
        authority_rules()
            .into_iter()
            .chain([
                rule(
                    &["coordination.k8s.io"],
                    &["leases"],
                    &["get", "create", "update", "patch"],
                ),
                // One that says nothing is made, and asking the webhooks changes none.
                rule(
                    &[GROUP],
                    &["kubevirts"],
                    &["get", "list", "watch", "create", "patch"],
                ),
                rule(&[GROUP], &["kubevirts/status"], &["patch"]),
                // Whether a copy was allowed.
                named(&[""], &["secrets"], &[copy::Grant::SECRET], &["get"]),
            ])
            .collect(),
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
            rule(
                &[snapshot::GROUP],
                &["virtualmachinerestores"],
                &["get", "list"],
            ),
            // Evictions of VMs' pods mark the VMs that have to move.
            rule(&[""], &["pods"], &["get"]),
            rule(&[GROUP], &["virtualmachineinstances/status"], &["patch"]),
            rule(&[instancetype::GROUP], &INSTANCETYPES, &["get"]),
            // Labels that name the instance type of a VM.
            rule(&[""], &["persistentvolumeclaims"], &["get"]),
            rule(&[datavolume::GROUP], &VOLUMES, &["get"]),
            // Whether a user may copy a claim.
            rule(
                &["authorization.k8s.io"],
                &["subjectaccessreviews"],
                &["create"],
            ),
            named(
                &["apiregistration.k8s.io"],
                &["apiservices"],
                &[&reviews],
                &["get", "patch"],
            ),
        ],
        authority_rules()
            .into_iter()
            .chain([
                rule(&[GROUP], &["kubevirts"], &READ),
                named(&[""], &["secrets"], &[copy::Grant::SECRET], &["get"]),
            ])
            .collect(),
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
            rule(&[GROUP], &["virtualmachineinstances/status"], &["patch"]),
            rule(&[instancetype::GROUP], &INSTANCETYPES, &["get"]),
            rule(&[""], &["pods"], &["list", "delete"]),
            // Whether a claim waits for an upload, or has room for a dump.
            rule(&[""], &["persistentvolumeclaims"], &["get"]),
            // Where a node is reached, and by what it is known.
            rule(&[""], &["nodes"], &["get"]),
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
        authority_rules()
            .into_iter()
            .chain([
                named(&[""], &["configmaps"], &[certificates::SECRET], &["patch"]),
                named(&[""], &["secrets"], &[upload::Grant::SECRET], &["get"]),
            ])
            .collect(),
    );
    component(
        upload::PROXY,
        // Where a claim's upload is taken.
        vec![rule(&[""], &["persistentvolumeclaims"], &["get"])],
        authority_rules()
            .into_iter()
            .chain([named(
                &[""],
                &["secrets"],
                &[upload::Grant::SECRET],
                &["get"],
            )])
            .collect(),
    );
    // The certificate authority of the front proxy is public to servers that are aggregated.
    let subjects = [admission::NAME, api::NAME].map(
        |name| json!({ "kind": "ServiceAccount", "name": name, "namespace": options.namespace }),
    );
    items.push(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": { "name": "podvisor-front-proxy", "namespace": "kube-system" },
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": "extension-apiserver-authentication-reader",
        },
        "subjects": subjects,
    }));
    items.extend(nodes(&options.namespace));
    items.extend(users());
    items.extend(everybody());
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

/// What a node's part may do, which acts as the node's kubelet. It reads no instance, and a policy
/// keeps it to those of its node.
fn nodes(namespace: &str) -> Vec<Value> {
    let name = "podvisor-node";
    let group = "rbac.authorization.k8s.io";
    let subjects = json!([{ "kind": "Group", "name": "system:nodes", "apiGroup": group }]);
    let object = |kind: &str, namespace: Option<&str>| {
        let mut metadata = json!({ "name": name });
        if let Some(namespace) = namespace {
            metadata["namespace"] = json!(namespace);
        }
        json!({ "apiVersion": format!("{group}/v1"), "kind": kind, "metadata": metadata })
    };
    let role = |kind: &str, namespace, rules: Value| {
        let mut role = object(kind, namespace);
        role["rules"] = rules;
        role
    };
    let binding = |kind: &str, of: &str, namespace| {
        let mut binding = object(kind, namespace);
        binding["roleRef"] = json!({ "apiGroup": group, "kind": of, "name": name });
        binding["subjects"] = subjects.clone();
        binding
    };
    let cluster = json!([
        rule(&[GROUP], &["virtualmachineinstances/status"], &["patch"]),
        rule(&["", "events.k8s.io"], &["events"], &["create", "patch"]),
    ]);
    let own = json!([named(
        &[""],
        &["configmaps"],
        &[certificates::SECRET],
        &["get"]
    )]);
    vec![
        role("ClusterRole", None, cluster),
        binding("ClusterRoleBinding", "ClusterRole", None),
        role("Role", Some(namespace), own),
        binding("RoleBinding", "Role", Some(namespace)),
        // The API writes into it whom nodes trust.
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": certificates::SECRET, "namespace": namespace },
        }),
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

/// What clients ask of the whole cluster before they do anything in a namespace: rights that a role
/// of one namespace cannot give.
fn everybody() -> [Value; 2] {
    let (name, group) = ("podvisor-default", "rbac.authorization.k8s.io");
    let version = format!("{group}/v1");
    [
        json!({
            "apiVersion": version,
            "kind": "ClusterRole",
            "metadata": { "name": name },
            "rules": [
                // Reading what has no name is `list` to RBAC.
                rule(&[api::GROUP], &["version", "guestfs"], &["get", "list"]),
                rule(&[GROUP], &["kubevirts"], &["get", "list"]),
                rule(&[datavolume::GROUP], &["cdiconfigs"], &READ),
                rule(&[instancetype::GROUP], &INSTANCETYPES[2..], &READ),
            ],
        }),
        json!({
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": { "name": name },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "Group", "name": "system:authenticated", "apiGroup": group }],
        }),
    ]
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
    let named = |verb: &str, rights: &[Right]| -> Vec<String> {
        let names: BTreeSet<String> = SUBRESOURCES
            .iter()
            .filter(|sub| sub.verb == verb && rights.contains(&sub.right))
            .map(|sub| format!("{}/{}", sub.resource, first_step(sub.name)))
            .collect();
        names.into_iter().collect()
    };
    let read = named("get", &[Right::View]);
    let get = named("get", &[Right::View, Right::Edit]);
    let mut update = named("update", &[Right::Edit]);
    update.push("expand-vm-spec".to_owned());
    fn words(list: &[String]) -> Vec<&str> {
        list.iter().map(String::as_str).collect()
    }
    let both = ["admin", "edit"];
    vec![
        role(
            "podvisor-vm-view",
            &["view"],
            vec![
                rule(&[GROUP], &objects, &READ),
                rule(&[GROUP], &["kubevirts"], &READ),
                rule(&[datavolume::GROUP], &VOLUMES, &READ),
                rule(&[snapshot::GROUP], &SNAPSHOTS, &READ),
                rule(&[clone::GROUP], &["virtualmachineclones"], &READ),
                rule(&[export::GROUP], &[EXPORTS], &READ),
                rule(&[snapshot::GROUP], &[CONTENTS], &READ),
                rule(&[instancetype::GROUP], &INSTANCETYPES, &READ),
                rule(&[api::GROUP], &words(&read), &["get"]),
            ],
        ),
        role(
            "podvisor-vm-edit",
            &both,
            vec![
                rule(&[GROUP], &objects, &verbs),
                rule(&[datavolume::GROUP], &VOLUMES, &verbs),
                // Their namespace's claims may be copied into other namespaces.
                rule(&[datavolume::GROUP], &["datavolumes/source"], &["create"]),
                rule(&[snapshot::GROUP], &SNAPSHOTS, &verbs),
                rule(&[clone::GROUP], &["virtualmachineclones"], &verbs),
                rule(&[export::GROUP], &[EXPORTS], &verbs),
                rule(
                    &[snapshot::GROUP],
                    &[CONTENTS],
                    &["get", "list", "watch", "delete", "deletecollection"],
                ),
                rule(&[instancetype::GROUP], &INSTANCETYPES, &READ),
                rule(&[instancetype::GROUP], &INSTANCETYPES[..2], &verbs),
                rule(&[upload::GROUP], &[upload::RESOURCE], &["create"]),
                rule(&[api::GROUP], &words(&update), &["update"]),
                rule(&[api::GROUP], &words(&get), &["get"]),
            ],
        ),
    ]
}
