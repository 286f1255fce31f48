//! CustomResourceDefinitions.

use podvisor_cluster_types::{
    clone::{self, CloneSpec},
    datavolume::{self, DataSourceSpec, DataVolumeSpec},
    export::{self, ExportSpec},
    instancetype::{self, InstancetypeSpec, PreferenceSpec},
    migration::{MigrationPolicySpec, MigrationSpec, POLICY_GROUP, POLICY_VERSION},
    replica_set::ReplicaSetSpec,
    snapshot::{self, RestoreSpec, SnapshotSpec},
    vm::VmSpec,
    vmi::VmiSpec,
};
use serde_json::{Value, json};

use super::schema::{anything, structural};

/// The group of KubeVirt's objects.
pub const GROUP: &str = "kubevirt.io";

/// The served versions, the stored one first; they differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];

/// One kind.
struct Kind {
    group: &'static str,
    /// The stored one first.
    versions: &'static [&'static str],
    kind: &'static str,
    plural: &'static str,
    singular: &'static str,
    short: &'static [&'static str],
    spec: Value,
    columns: Value,
    scale: Option<Value>,
}

/// A printer column.
fn column(name: &str, kind: &str, path: &str) -> Value {
    json!({ "name": name, "type": kind, "jsonPath": path })
}

/// A printer column that `kubectl get -o wide` shows.
fn wide(name: &str, kind: &str, path: &str) -> Value {
    let mut column = column(name, kind, path);
    column["priority"] = json!(1);
    column
}

fn age() -> Value {
    column("Age", "date", ".metadata.creationTimestamp")
}

fn condition(name: &str) -> String {
    format!(".status.conditions[?(@.type=='{name}')].status")
}

/// The definitions of all kinds.
#[must_use]
pub fn crds() -> Vec<Value> {
    let ready = condition("Ready");
    let kinds = [
        Kind {
            group: GROUP,
            versions: &VERSIONS,
            kind: "VirtualMachine",
            plural: "virtualmachines",
            singular: "virtualmachine",
            short: &["vm", "vms"],
            spec: structural::<VmSpec>(),
            columns: json!([
                age(),
                column("Status", "string", ".status.printableStatus"),
                column("Ready", "string", &ready),
            ]),
            scale: None,
        },
        Kind {
            group: GROUP,
            versions: &VERSIONS,
            kind: "VirtualMachineInstance",
            plural: "virtualmachineinstances",
            singular: "virtualmachineinstance",
            short: &["vmi", "vmis"],
            spec: structural::<VmiSpec>(),
            columns: json!([
                age(),
                column("Phase", "string", ".status.phase"),
                column("IP", "string", ".status.interfaces[0].ipAddress"),
                column("NodeName", "string", ".status.nodeName"),
                column("Ready", "string", &ready),
                wide("Live-Migratable", "string", &condition("LiveMigratable")),
                wide("Paused", "string", &condition("Paused")),
            ]),
            scale: None,
        },
        Kind {
            group: GROUP,
            versions: &VERSIONS,
            kind: "VirtualMachineInstanceMigration",
            plural: "virtualmachineinstancemigrations",
            singular: "virtualmachineinstancemigration",
            short: &["vmim", "vmims"],
            spec: structural::<MigrationSpec>(),
            columns: json!([
                column("Phase", "string", ".status.phase"),
                column("VMI", "string", ".spec.vmiName"),
                age(),
            ]),
            scale: None,
        },
        Kind {
            group: GROUP,
            versions: &VERSIONS,
            kind: "VirtualMachineInstanceReplicaSet",
            plural: "virtualmachineinstancereplicasets",
            singular: "virtualmachineinstancereplicaset",
            short: &["vmirs", "vmirss"],
            spec: structural::<ReplicaSetSpec>(),
            columns: json!([
                column("Desired", "integer", ".spec.replicas"),
                column("Current", "integer", ".status.replicas"),
                column("Ready", "integer", ".status.readyReplicas"),
                age(),
            ]),
            scale: Some(json!({
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.labelSelector",
            })),
        },
        Kind {
            group: datavolume::GROUP,
            versions: &[datavolume::VERSION],
            kind: "DataVolume",
            plural: "datavolumes",
            singular: "datavolume",
            short: &["dv", "dvs"],
            spec: structural::<DataVolumeSpec>(),
            columns: json!([
                column("Phase", "string", ".status.phase"),
                column("Progress", "string", ".status.progress"),
                column("Restarts", "integer", ".status.restartCount"),
                age(),
            ]),
            scale: None,
        },
        Kind {
            group: datavolume::GROUP,
            versions: &[datavolume::VERSION],
            kind: "DataSource",
            plural: "datasources",
            singular: "datasource",
            short: &["das"],
            spec: structural::<DataSourceSpec>(),
            columns: json!([column("Ready", "string", &ready), age()]),
            scale: None,
        },
    ];
    let all = kinds
        .into_iter()
        .chain([of_the_cluster()])
        .chain(of_snapshots())
        .chain([of_exports()]);
    let mut definitions: Vec<Value> = all.map(definition).collect();
    definitions.extend(of_instancetypes());
    definitions.push(of_policies());
    definitions.push(of_uploads());
    definitions
}

/// The definition of where uploads go: of the cluster, written by administrators and the system.
fn of_uploads() -> Value {
    // Without a scheme, clients take it for HTTPS.
    let url = json!({ "type": "string", "maxLength": 2048, "pattern": "^\\S*$" });
    let schema = json!({
        "type": "object",
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": { "type": "object", "properties": { "uploadProxyURLOverride": url } },
            "status": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
        },
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("cdiconfigs.{}", datavolume::GROUP) },
        "spec": {
            "group": datavolume::GROUP,
            "scope": "Cluster",
            "names": {
                "kind": "CDIConfig",
                "listKind": "CDIConfigList",
                "plural": "cdiconfigs",
                "singular": "cdiconfig",
            },
            "versions": [{
                "name": datavolume::VERSION,
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// What an administrator decides.
fn of_the_cluster() -> Kind {
    // What it says that is not known must reach the webhook, which refuses it by its path.
    let mut spec = anything();
    spec["type"] = json!("object");
    // Clients patch what is in it, and take it for granted.
    let mut configuration = spec.clone();
    configuration["default"] = json!({});
    spec["properties"] = json!({ "configuration": configuration });
    Kind {
        group: GROUP,
        versions: &VERSIONS,
        kind: "KubeVirt",
        plural: "kubevirts",
        singular: "kubevirt",
        short: &["kv", "kvs"],
        spec,
        columns: json!([age(), column("Phase", "string", ".status.phase")]),
        scale: None,
    }
}

/// Snapshots, what they contain, restores, and copies.
fn of_snapshots() -> [Kind; 4] {
    let ready = || column("ReadyToUse", "boolean", ".status.readyToUse");
    let created = || column("CreationTime", "date", ".status.creationTime");
    let error = || column("Error", "string", ".status.error.message");
    let kind = |kind, plural, singular, short, spec, columns| Kind {
        group: snapshot::GROUP,
        versions: &snapshot::VERSIONS,
        kind,
        plural,
        singular,
        short,
        spec,
        columns,
        scale: None,
    };
    // Written by the system alone: nothing of the virtual machine is cut.
    let mut content = anything();
    content["type"] = json!("object");
    [
        kind(
            "VirtualMachineSnapshot",
            "virtualmachinesnapshots",
            "virtualmachinesnapshot",
            &["vmsnapshot", "vmsnapshots"],
            structural::<SnapshotSpec>(),
            json!([
                column("SourceKind", "string", ".spec.source.kind"),
                column("SourceName", "string", ".spec.source.name"),
                column("Phase", "string", ".status.phase"),
                ready(),
                created(),
                error(),
            ]),
        ),
        kind(
            "VirtualMachineSnapshotContent",
            "virtualmachinesnapshotcontents",
            "virtualmachinesnapshotcontent",
            &["vmsnapshotcontent", "vmsnapshotcontents"],
            content,
            json!([ready(), created(), error()]),
        ),
        kind(
            "VirtualMachineRestore",
            "virtualmachinerestores",
            "virtualmachinerestore",
            &["vmrestore", "vmrestores"],
            structural::<RestoreSpec>(),
            json!([
                column("TargetKind", "string", ".spec.target.kind"),
                column("TargetName", "string", ".spec.target.name"),
                column("Complete", "boolean", ".status.complete"),
                column("RestoreTime", "date", ".status.restoreTime"),
                error(),
            ]),
        ),
        Kind {
            group: clone::GROUP,
            versions: &clone::VERSIONS,
            kind: "VirtualMachineClone",
            plural: "virtualmachineclones",
            singular: "virtualmachineclone",
            short: &["vmclone", "vmclones"],
            spec: structural::<CloneSpec>(),
            columns: json!([
                column("Phase", "string", ".status.phase"),
                column("SourceVirtualMachine", "string", ".spec.source.name"),
                column("TargetVirtualMachine", "string", ".status.targetName"),
            ]),
            scale: None,
        },
    ]
}

/// Exports of volumes.
fn of_exports() -> Kind {
    Kind {
        group: export::GROUP,
        versions: &export::VERSIONS,
        kind: "VirtualMachineExport",
        plural: "virtualmachineexports",
        singular: "virtualmachineexport",
        short: &["vmexport", "vmexports"],
        spec: structural::<ExportSpec>(),
        columns: json!([
            column("SourceKind", "string", ".spec.source.kind"),
            column("SourceName", "string", ".spec.source.name"),
            column("Phase", "string", ".status.phase"),
        ]),
        scale: None,
    }
}

/// The definition of migration policies: of the cluster, and without a status.
fn of_policies() -> Value {
    let schema = json!({
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": structural::<MigrationPolicySpec>(),
            "status": { "type": "object", "nullable": true },
        },
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("migrationpolicies.{POLICY_GROUP}") },
        "spec": {
            "group": POLICY_GROUP,
            "scope": "Cluster",
            "names": {
                "kind": "MigrationPolicy",
                "listKind": "MigrationPolicyList",
                "plural": "migrationpolicies",
                "singular": "migrationpolicy",
            },
            "versions": [{
                "name": POLICY_VERSION,
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// The definitions of instance types and preferences: without a status, and of the cluster too.
fn of_instancetypes() -> Vec<Value> {
    let of_type = structural::<InstancetypeSpec>();
    let mut of_preference = structural::<PreferenceSpec>();
    // Preferences for what is not there are taken, and not applied: they are no typing errors.
    for part in ["devices", "requirements"] {
        of_preference["properties"][part]["x-kubernetes-preserve-unknown-fields"] = json!(true);
    }
    let kinds: [(&str, &str, &Value, [&str; 4]); 4] = [
        (
            "VirtualMachineInstancetype",
            "Namespaced",
            &of_type,
            ["vminstancetype", "vminstancetypes", "vmf", "vmfs"],
        ),
        (
            "VirtualMachineClusterInstancetype",
            "Cluster",
            &of_type,
            [
                "vmclusterinstancetype",
                "vmclusterinstancetypes",
                "vmcf",
                "vmcfs",
            ],
        ),
        (
            "VirtualMachinePreference",
            "Namespaced",
            &of_preference,
            ["vmpref", "vmprefs", "vmp", "vmps"],
        ),
        (
            "VirtualMachineClusterPreference",
            "Cluster",
            &of_preference,
            ["vmclusterpref", "vmclusterprefs", "vmcp", "vmcps"],
        ),
    ];
    let define = |(kind, scope, spec, short): (&str, &str, &Value, [&str; 4])| {
        let singular = kind.to_ascii_lowercase();
        let group = instancetype::GROUP;
        let schema = json!({
            "type": "object",
            "required": ["spec"],
            "properties": {
                "apiVersion": { "type": "string" },
                "kind": { "type": "string" },
                "metadata": { "type": "object" },
                "spec": spec,
            },
        });
        json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": format!("{singular}s.{group}") },
            "spec": {
                "group": group,
                "scope": scope,
                "names": {
                    "kind": kind,
                    "listKind": format!("{kind}List"),
                    "plural": format!("{singular}s"),
                    "singular": singular,
                    "shortNames": short,
                },
                "versions": [{
                    "name": crate::instancetypes::VERSION,
                    "served": true,
                    "storage": true,
                    "schema": { "openAPIV3Schema": schema },
                }],
            },
        })
    };
    kinds.into_iter().map(define).collect()
}

/// A list of objects that have different values under `key`.
fn keyed_list(key: &str) -> Value {
    json!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": {
            "type": "object",
            "required": [key],
            "properties": { key: { "type": "string" } },
            "x-kubernetes-preserve-unknown-fields": true,
        },
    })
}

fn definition(kind: Kind) -> Value {
    // A status is written by the system alone: what it writes is not cut to what is known here.
    let mut status = anything();
    status["type"] = json!("object");
    status["nullable"] = json!(true);
    if kind.kind == "VirtualMachineInstance" {
        // Two write it, the controller and the node: each has entries of its own.
        status["properties"] = json!({
            "conditions": keyed_list("type"),
            "interfaces": keyed_list("name"),
        });
    }
    let schema = json!({
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": kind.spec,
            "status": status,
        },
    });
    let mut subresources = json!({ "status": {} });
    if let Some(scale) = kind.scale {
        subresources["scale"] = scale;
    }
    let versions: Vec<Value> = kind
        .versions
        .iter()
        .enumerate()
        .map(|(index, version)| {
            json!({
                "name": version,
                "served": true,
                "storage": index == 0,
                "schema": { "openAPIV3Schema": schema },
                "subresources": subresources,
                "additionalPrinterColumns": kind.columns,
            })
        })
        .collect();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{}", kind.plural, kind.group) },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": format!("{}List", kind.kind),
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": kind.short,
                "categories": ["all"],
            },
            "versions": versions,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_fits_into_the_annotation_that_kubectl_apply_writes() {
        for crd in crds() {
            let name = crd["metadata"]["name"].as_str().unwrap();
            let size = crd.to_string().len();
            assert!(size < 256 << 10, "{name} has {size} bytes");
        }
    }

    /// Whether a schema has a field, or keeps what it does not have.
    fn has(mut schema: &Value, path: &[&str]) -> bool {
        for field in path {
            if let Some(items) = schema.get("items") {
                schema = items;
            }
            match schema.pointer(&format!("/properties/{field}")) {
                Some(inner) => schema = inner,
                None => {
                    let keeps = |mark: &str| schema.get(mark).is_some();
                    return keeps("x-kubernetes-preserve-unknown-fields")
                        || keeps("x-kubernetes-int-or-string")
                        || keeps("additionalProperties");
                }
            }
        }
        true
    }

    /// The list is of KubeVirt 1.7 and CDI 1.63. What is not in a schema is cut before a webhook
    /// sees it: nobody would be told that it does nothing.
    #[test]
    fn no_field_of_kubevirt_is_cut() {
        let definitions = crds();
        let schema = |kind: &str| {
            let mut all = definitions.iter();
            let found = all.find(|crd| crd["spec"]["names"]["kind"] == kind);
            &found.unwrap()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        };
        let fields = include_str!("../../tests/kubevirt-fields.txt").lines();
        let cut = fields.filter(|line| {
            let path: Vec<&str> = line.split('.').collect();
            !has(schema(path[0]), &path[1..])
        });
        assert_eq!(cut.collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn one_version_is_stored_and_both_are_served() {
        for crd in crds().iter().filter(|crd| crd["spec"]["group"] == GROUP) {
            let versions = crd["spec"]["versions"].as_array().unwrap();
            let stored: Vec<_> = versions.iter().filter(|v| v["storage"] == true).collect();
            assert_eq!(stored.len(), 1);
            assert_eq!(stored[0]["name"], "v1");
            assert!(versions.iter().all(|version| version["served"] == true));
        }
    }
}
