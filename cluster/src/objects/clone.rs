//! Copies of virtual machines.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::clone::{CloneSpec, GROUP, VERSIONS};
use serde::{Deserialize, Serialize};

use super::{Condition, or_default};

resource!(
    /// A copy of a virtual machine, or of a snapshot of one.
    VirtualMachineClone,
    (GROUP, VERSIONS[0]),
    "virtualmachineclones",
    CloneSpec,
    CloneStatus
);

/// How far a copy is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClonePhase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// The snapshot is taken.
    SnapshotInProgress,
    /// The target is made.
    CreatingTargetVM,
    /// The snapshot is restored.
    RestoreInProgress,
    /// The target exists.
    Succeeded,
    /// It will not be made.
    Failed,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

impl ClonePhase {
    fn is_unset(&self) -> bool {
        *self == Self::Unset
    }
}

/// What was observed of a copy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CloneStatus {
    /// When the target was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// How far it is.
    #[serde(skip_serializing_if = "ClonePhase::is_unset")]
    pub phase: ClonePhase,
    /// `Ready`, `Progressing`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The snapshot that is restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_name: Option<String>,
    /// The restore.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_name: Option<String>,
    /// The target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_name: Option<String>,
}
