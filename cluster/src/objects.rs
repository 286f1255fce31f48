//! The objects as the controllers see them: what they decide by is typed, everything else is kept
//! as it came.
//!
//! A controller passes a user's specification on (from a VirtualMachine to its instance, from the
//! instance to its pod) and must not lose a field that it does not know.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::replica_set::LabelSelector;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The API group of the objects.
pub const GROUP: &str = "kubevirt.io";

/// The version that the controllers read and write.
pub const VERSION: &str = "v1";

/// Finalizer of a VirtualMachine: its instance goes first.
pub const VM_FINALIZER: &str = "kubevirt.io/virtualMachineControllerFinalize";

/// Finalizer of an instance: its pod goes first.
pub const VMI_FINALIZER: &str = "kubevirt.io/foregroundDeleteVirtualMachine";

/// Annotation of a pod: the instance's metadata and specification, as JSON.
pub const VMI_ANNOTATION: &str = "podvisor.io/vmi";

/// Annotation of a pod that keeps a claim on a VM's node: for whom, and which.
pub const ATTACHMENT_ANNOTATION: &str = "podvisor.io/attachment";

/// Annotation of a claim to which memory was dumped: the name of the last dump, or that there is
/// none.
pub const MEMORY_DUMP_ANNOTATION: &str = "kubevirt.io/memory-dump";

/// Readiness gate of pods: the condition is False while the VM is paused, so that no service sends
/// it anything.
pub const UNPAUSED_GATE: &str = "kubevirt.io/virtual-machine-unpaused";

/// Label of every pod of an instance, with the value [`LAUNCHER`].
pub const COMPONENT_LABEL: &str = "kubevirt.io";

/// See [`COMPONENT_LABEL`].
pub const LAUNCHER: &str = "virt-launcher";

/// The value of [`COMPONENT_LABEL`] of pods that keep a claim on a VM's node.
pub const HOTPLUG: &str = "hotplug-disk";

/// The value of [`COMPONENT_LABEL`] of pods that serve exports.
pub const EXPORTER: &str = "virt-exporter";

/// Label of a pod: the unique id of its instance.
pub const CREATED_BY_LABEL: &str = "kubevirt.io/created-by";

/// Label of a pod: the name of its instance.
pub const NAME_LABEL: &str = "vm.kubevirt.io/name";

/// Label of an instance's pods: what Services select that `virtctl expose` makes.
pub const ID_LABEL: &str = "vmi.kubevirt.io/id";

/// The value of [`NAME_LABEL`]: the beginning of the name that can be a label's value, which ends
/// with a letter or digit.
#[must_use]
pub fn name_label(name: &str) -> String {
    let beginning: String = name.chars().take(63).collect();
    beginning
        .trim_end_matches(|last: char| !last.is_ascii_alphanumeric())
        .to_owned()
}

/// Label of an instance: the node that it runs on.
pub const NODE_NAME_LABEL: &str = "kubevirt.io/nodeName";

/// Reads what is malformed as if it were missing: one such object must not hide all others, which
/// come by the same watch.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::de::DeserializeOwned + Default,
{
    let value = Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

macro_rules! resource {
    ($(#[$meta:meta])* $name:ident, $plural:literal, $spec:ty, $status:ty) => {
        resource!($(#[$meta])* $name, (GROUP, VERSION), $plural, $spec, $status);
    };
    (
        $(#[$meta:meta])* $name:ident, ($group:expr, $version:expr), $plural:literal, $spec:ty,
        $status:ty
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {
            /// Group and version.
            #[serde(default)]
            pub api_version: String,
            /// The kind's name.
            #[serde(default)]
            pub kind: String,
            /// Name, labels, owners.
            #[serde(default)]
            pub metadata: ObjectMeta,
            /// What the user asks for.
            #[serde(default, deserialize_with = "or_default")]
            pub spec: $spec,
            /// What was observed.
            #[serde(default, deserialize_with = "or_default")]
            pub status: $status,
        }

        impl $name {
            /// Makes an object of this kind.
            #[must_use]
            pub fn new(metadata: ObjectMeta, spec: $spec) -> Self {
                Self {
                    api_version: format!("{}/{}", $group, $version),
                    kind: stringify!($name).to_owned(),
                    metadata,
                    spec,
                    status: Default::default(),
                }
            }
        }

        impl kube::Resource for $name {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;

            fn kind(_: &()) -> std::borrow::Cow<'_, str> {
                stringify!($name).into()
            }

            fn group(_: &()) -> std::borrow::Cow<'_, str> {
                $group.into()
            }

            fn version(_: &()) -> std::borrow::Cow<'_, str> {
                $version.into()
            }

            fn plural(_: &()) -> std::borrow::Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(
    /// A virtual machine: whether it should run, and the template of its instances.
    VirtualMachine,
    "virtualmachines",
    VmSpec,
    VmStatus
);

resource!(
    /// A run of a virtual machine. It is one pod, and never another one.
    VirtualMachineInstance,
    "virtualmachineinstances",
    Value,
    VmiStatus
);

resource!(
    /// As many equal instances as wanted.
    VirtualMachineInstanceReplicaSet,
    "virtualmachineinstancereplicasets",
    ReplicaSetSpec,
    ReplicaSetStatus
);

mod clone;
mod datasource;
mod datavolume;
mod export;
mod kubevirt;
mod migration;
mod snapshot;

pub use clone::{ClonePhase, CloneStatus, VirtualMachineClone};
pub use datasource::{DataSource, DataSourceStatus};
pub(crate) use datavolume::{CDI_COMPONENT_LABEL, IMPORTER, annotation};
pub use datavolume::{DataVolume, DataVolumePhase, DataVolumeStatus, VolumeState};
pub use export::{
    ExportFormat, ExportLink, ExportLinks, ExportPhase, ExportStatus, ExportVolume,
    VirtualMachineExport,
};
pub use kubevirt::{KubeVirt, KubeVirtStatus};

pub use migration::{
    EVACUATION_ANNOTATION, MIGRATION_ANNOTATION, MIGRATION_FINALIZER, MIGRATION_NAME_ANNOTATION,
    MIGRATION_UID_LABEL, MigrationPhase, MigrationSpec, MigrationState, MigrationStatus,
    MigrationTransition, VirtualMachineInstanceMigration,
};

pub use snapshot::{
    ClaimBackup, ContentSpec, ContentStatus, RestoreStatus, SnapshotError, SnapshotPhase,
    SnapshotStatus, SnapshotVolumes, SourceIndication, SourceMachine, SourceSpec,
    VirtualMachineRestore, VirtualMachineSnapshot, VirtualMachineSnapshotContent, VolumeBackup,
    VolumeRestore, VolumeSnapshot, VolumeSnapshotState, VolumeSnapshotStatus,
};

/// How many instances of which template.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaSetSpec {
    /// How many; one, if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Which instances are meant.
    #[serde(default)]
    pub selector: LabelSelector,
    /// What they are made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
    /// Nothing is made, and nothing deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
}

/// What was observed of a replica set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ReplicaSetStatus {
    /// How many instances there are that have not ended.
    pub replicas: i32,
    /// How many of them are ready.
    pub ready_replicas: i32,
    /// The selector as text, for `kubectl scale`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub label_selector: String,
    /// Conditions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// What a user asks of a virtual machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VmSpec {
    /// Whether it runs: the older form of `Always` and `Halted`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<bool>,
    /// When it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_strategy: Option<String>,
    /// What its instances are made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What instances are made of.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Their labels and annotations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ObjectMeta>,
    /// Their specification.
    #[serde(default)]
    pub spec: Value,
}

/// What was observed of a virtual machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VmStatus {
    /// Whether an instance exists.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub created: bool,
    /// Whether the instance is ready.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ready: bool,
    /// The state, in a word.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub printable_status: String,
    /// The run strategy that the controller last acted by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_strategy: Option<String>,
    /// The generation that the running instance was made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The generation that the next instance will be made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_generation: Option<i64>,
    /// Starts and stops that users asked for and that are not done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub state_change_requests: Vec<StateChangeRequest>,
    /// Starts that failed one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_failure: Option<StartFailure>,
    /// Conditions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// A start or a stop that a user asked for.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateChangeRequest {
    /// `Start` or `Stop`.
    pub action: String,
    /// The instance that is to be stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Options of a start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub data: BTreeMap<String, String>,
}

impl StateChangeRequest {
    /// A request to start.
    #[must_use]
    pub fn start() -> Self {
        Self {
            action: "Start".to_owned(),
            ..Self::default()
        }
    }

    /// A request to stop the instance with this unique id.
    #[must_use]
    pub fn stop(uid: &str) -> Self {
        Self {
            action: "Stop".to_owned(),
            uid: Some(uid.to_owned()),
            ..Self::default()
        }
    }
}

/// Starts that failed one after the other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartFailure {
    /// How many.
    #[serde(default)]
    pub consecutive_fail_count: u32,
    /// The last instance that was counted.
    #[serde(rename = "lastFailedVMIUID", skip_serializing_if = "Option::is_none")]
    pub last_failed_vmi_uid: Option<String>,
    /// When the next start may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_timestamp: Option<Time>,
}

/// One aspect of an object's state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which aspect.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in one word.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When `status` changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// When it was last looked at; null in the objects of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
}

/// How far an instance is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// It has no pod.
    Pending,
    /// Its pod has no node, or no VM yet.
    Scheduling,
    /// Its pod is on a node.
    Scheduled,
    /// Its VM runs.
    Running,
    /// Its guest powered off.
    Succeeded,
    /// Its VM crashed, or its pod went away.
    Failed,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

impl Phase {
    /// Whether the instance is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// When an instance entered a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTransition {
    /// The phase.
    #[serde(default)]
    pub phase: Phase,
    /// When.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase_transition_timestamp: Option<Time>,
}

/// What was observed of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VmiStatus {
    /// How far it is.
    #[serde(skip_serializing_if = "is_unset")]
    pub phase: Phase,
    /// When it entered its phases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub phase_transition_timestamps: Vec<PhaseTransition>,
    /// Why it failed, in one word.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The node that it runs on.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// The quality of service of its pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub qos_class: String,
    /// Unique ids of its pods, with their nodes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub active_pods: BTreeMap<String, String>,
    /// Its cards.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// Conditions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The ControllerRevision with the specification of the virtual machine that it was made of.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virtual_machine_revision_name: String,
    /// The latest migration.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "or_default"
    )]
    pub migration_state: Option<MigrationState>,
    /// How its disks migrate: `LiveMigration` or `BlockMigration`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub migration_method: String,
    /// The node that it has to leave.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub evacuation_node_name: String,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

fn is_unset(phase: &Phase) -> bool {
    *phase == Phase::Unset
}

/// A card of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Interface {
    /// Its name in the specification.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The first address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip_address: String,
    /// All addresses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ip_addresses: Vec<String>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Returns the condition of a kind.
#[must_use]
pub fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.kind == kind)
}

/// Returns whether the condition of a kind is `True`.
#[must_use]
pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    condition(conditions, kind).is_some_and(|condition| condition.status == "True")
}

/// Puts a condition in the place of the one of its kind; the time of its transition is `now` if
/// its status is another one.
pub fn set_condition(conditions: &mut Vec<Condition>, mut new: Condition, now: &Time) {
    match conditions.iter_mut().find(|old| old.kind == new.kind) {
        Some(old) => {
            new.last_transition_time = if old.status == new.status {
                old.last_transition_time.clone()
            } else {
                Some(now.clone())
            };
            *old = new;
        }
        None => {
            new.last_transition_time = Some(now.clone());
            conditions.push(new);
        }
    }
}

/// Removes the condition of a kind.
pub fn clear_condition(conditions: &mut Vec<Condition>, kind: &str) {
    conditions.retain(|condition| condition.kind != kind);
}

impl Condition {
    /// Makes a condition that is `True`.
    #[must_use]
    pub fn yes(kind: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            status: "True".to_owned(),
            ..Self::default()
        }
    }

    /// Makes a condition that is `False`.
    #[must_use]
    pub fn no(kind: &str, reason: &str, message: impl Into<String>) -> Self {
        Self {
            kind: kind.to_owned(),
            status: "False".to_owned(),
            reason: reason.to_owned(),
            message: message.into(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_are_not_known_are_kept() {
        let given = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": "a"},
            "spec": {"runStrategy": "Always", "dataVolumeTemplates": [{"x": 1}],
                     "template": {"spec": {"domain": {"unknown": true}}}},
            "status": {"snapshotInProgress": "s", "printableStatus": "Stopped"},
        });
        let vm: VirtualMachine = serde_json::from_value(given.clone()).unwrap();
        assert_eq!(serde_json::to_value(vm).unwrap(), given);
    }

    #[test]
    fn a_malformed_object_is_read_as_one_without_the_part() {
        let vm: VirtualMachine = serde_json::from_value(json!({
            "metadata": {"name": "a"},
            "spec": {"runStrategy": 5, "template": []},
            "status": {"startFailure": {"retryAfterTimestamp": "yesterday"}},
        }))
        .unwrap();
        assert_eq!(vm.metadata.name.as_deref(), Some("a"));
        assert_eq!(
            (vm.spec, vm.status),
            (VmSpec::default(), VmStatus::default())
        );
        let vmi: VirtualMachineInstance =
            serde_json::from_value(json!({"spec": 5, "status": "x"})).unwrap();
        assert_eq!((vmi.spec, vmi.status), (json!(5), VmiStatus::default()));
    }

    #[test]
    fn a_phase_of_others_is_read() {
        let status: VmiStatus = serde_json::from_value(json!({"phase": "WaitingForSync"})).unwrap();
        assert_eq!(status.phase, Phase::Unknown);
        let status: VmiStatus = serde_json::from_value(json!({})).unwrap();
        assert_eq!(status.phase, Phase::Unset);
    }

    #[test]
    fn a_condition_keeps_its_time_until_its_status_changes() {
        let time = |second| Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap());
        let mut conditions = Vec::new();
        set_condition(&mut conditions, Condition::yes("Ready"), &time(1));
        set_condition(&mut conditions, Condition::yes("Ready"), &time(2));
        assert_eq!(conditions[0].last_transition_time, Some(time(1)));
        set_condition(&mut conditions, Condition::no("Ready", "A", "b"), &time(3));
        assert_eq!(conditions[0].last_transition_time, Some(time(3)));
        assert_eq!(conditions.len(), 1);
    }
}
