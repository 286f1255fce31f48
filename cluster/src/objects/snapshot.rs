//! Snapshots, what they contain, restores; and the snapshots of volumes that CSI takes.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::snapshot::{GROUP, RestoreSpec, SnapshotSpec, VERSIONS};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Condition, VmSpec, or_default};

resource!(
    /// A snapshot of a virtual machine.
    VirtualMachineSnapshot,
    (GROUP, VERSIONS[0]),
    "virtualmachinesnapshots",
    SnapshotSpec,
    SnapshotStatus
);

resource!(
    /// What a snapshot contains: the virtual machine as it was, and the snapshots of its volumes.
    VirtualMachineSnapshotContent,
    (GROUP, VERSIONS[0]),
    "virtualmachinesnapshotcontents",
    ContentSpec,
    ContentStatus
);

resource!(
    /// A restore of a snapshot.
    VirtualMachineRestore,
    (GROUP, VERSIONS[0]),
    "virtualmachinerestores",
    RestoreSpec,
    RestoreStatus
);

resource!(
    /// A snapshot of a volume, which its CSI driver takes.
    VolumeSnapshot,
    ("snapshot.storage.k8s.io", "v1"),
    "volumesnapshots",
    Value,
    VolumeSnapshotStatus
);

/// How far a snapshot is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotPhase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// It is taken.
    InProgress,
    /// It was taken.
    Succeeded,
    /// It was not taken in time.
    Failed,
    /// It is deleted before it was taken.
    Deleting,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

impl SnapshotPhase {
    fn is_unset(&self) -> bool {
        *self == Self::Unset
    }

    /// Whether nothing more is taken.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// What was observed of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotStatus {
    /// The unique id of the virtual machine.
    #[serde(rename = "sourceUID", skip_serializing_if = "Option::is_none")]
    pub source_uid: Option<String>,
    /// The name of what it contains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_content_name: Option<String>,
    /// When the disks were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// How far it is.
    #[serde(skip_serializing_if = "SnapshotPhase::is_unset")]
    pub phase: SnapshotPhase,
    /// Whether it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// `Ready`, `Progressing`, `Failure`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// What the virtual machine was like.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub indications: Vec<String>,
    /// The same in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source_indications: Vec<SourceIndication>,
    /// Which volumes it contains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_volumes: Option<SnapshotVolumes>,
}

/// What a virtual machine was like when a snapshot of it was taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceIndication {
    /// In a word.
    pub indication: String,
    /// What follows from it.
    pub message: String,
}

/// Which volumes a snapshot contains.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotVolumes {
    /// Those that it contains.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub included_volumes: Vec<String>,
    /// Those that it does not contain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub excluded_volumes: Vec<String>,
}

/// What went wrong, and when.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotError {
    /// When.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// What.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What a snapshot contains.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContentSpec {
    /// The snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_name: Option<String>,
    /// What it was taken of.
    pub source: SourceSpec,
    /// The volumes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_backups: Vec<VolumeBackup>,
}

/// What a snapshot was taken of.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceSpec {
    /// The virtual machine as it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine: Option<SourceMachine>,
}

/// A virtual machine as it was.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceMachine {
    /// Name, labels, annotations.
    pub metadata: ObjectMeta,
    /// Its specification.
    pub spec: VmSpec,
}

/// A volume of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeBackup {
    /// Its name in the virtual machine.
    pub volume_name: String,
    /// Its claim as it was.
    pub persistent_volume_claim: ClaimBackup,
    /// The snapshot of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_name: Option<String>,
}

/// A claim as it was.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimBackup {
    /// Name, labels, annotations.
    pub metadata: ObjectMeta,
    /// Its specification.
    pub spec: PersistentVolumeClaimSpec,
}

/// What was observed of a snapshot's contents.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContentStatus {
    /// When all volumes were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether all can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// The volumes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_snapshot_status: Vec<VolumeSnapshotState>,
}

/// How far the snapshot of a volume is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotState {
    /// Its name.
    pub volume_snapshot_name: String,
    /// When it was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
}

/// What CSI says of a snapshot of a volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotStatus {
    /// When it was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The size that a volume made of it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<Quantity>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
}

/// What was observed of a restore.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RestoreStatus {
    /// Its volumes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub restores: Vec<VolumeRestore>,
    /// When it was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_time: Option<Time>,
    /// DataVolumes of the virtual machine that it does not use any more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deleted_data_volumes: Vec<String>,
    /// Whether it is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub complete: Option<bool>,
    /// `Ready`, `Progressing`, `Failure`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A volume of a restore.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeRestore {
    /// Its name in the virtual machine.
    pub volume_name: String,
    /// The name of its claim.
    #[serde(rename = "persistentVolumeClaim")]
    pub claim: String,
    /// The snapshot of the volume.
    pub volume_snapshot_name: String,
    /// The name of its DataVolume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_volume_name: Option<String>,
}
