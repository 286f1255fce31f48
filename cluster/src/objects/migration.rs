//! Migrations, and what the status of an instance says of its latest one.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Condition, GROUP, VERSION, or_default};

/// Finalizer of a migration: what it began ends first.
pub const MIGRATION_FINALIZER: &str = "kubevirt.io/migrationJobFinalize";

/// Annotation of a pod that does not boot: the unique id of the migration that it waits for.
pub const MIGRATION_ANNOTATION: &str = "podvisor.io/migration";

/// Label of a migration's target: the unique id of the migration.
pub const MIGRATION_UID_LABEL: &str = "kubevirt.io/migrationJobUID";

/// Annotation of a migration's target: the name of the migration.
pub const MIGRATION_NAME_ANNOTATION: &str = "kubevirt.io/migrationJobName";

/// Annotation of a migration that was made because its VM has to leave a node: that node.
pub const EVACUATION_ANNOTATION: &str = "kubevirt.io/evacuationMigration";

resource!(
    /// One move of an instance to another node.
    VirtualMachineInstanceMigration,
    "virtualmachineinstancemigrations",
    MigrationSpec,
    MigrationStatus
);

/// Which instance moves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationSpec {
    /// Its name.
    pub vmi_name: String,
    /// Labels that the target's node must have besides.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub added_node_selector: BTreeMap<String, String>,
    /// Which of those that wait comes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
}

/// What was observed of a migration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationStatus {
    /// How far it is.
    #[serde(skip_serializing_if = "is_unset")]
    pub phase: MigrationPhase,
    /// When it entered its phases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub phase_transition_timestamps: Vec<MigrationTransition>,
    /// Conditions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// What the instance's status said of it at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<MigrationState>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

fn is_unset(phase: &MigrationPhase) -> bool {
    *phase == MigrationPhase::Unset
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MigrationPhase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// It waits for its turn, and has no pod.
    Pending,
    /// Its pod does not wait for the VM yet.
    Scheduling,
    /// Its pod waits for the VM.
    Scheduled,
    /// The target's node is told who comes.
    PreparingTarget,
    /// The source's node is told where to go.
    TargetReady,
    /// The VM moves.
    Running,
    /// The VM runs at the target.
    Succeeded,
    /// The VM stays where it was, or has ended there.
    Failed,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

impl MigrationPhase {
    /// Whether the migration is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }

    /// Whether it takes one of the places of migrations that run in parallel.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        self > Self::Pending && self < Self::Succeeded
    }
}

/// When a migration entered a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigrationTransition {
    /// The phase.
    #[serde(default)]
    pub phase: MigrationPhase,
    /// When.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase_transition_timestamp: Option<Time>,
}

/// What the status of an instance says of its latest migration. It is written by the controller
/// alone, and says which of two pods the VM is in.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationState {
    /// When memory began to move.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<Time>,
    /// When it ended, either way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<Time>,
    /// From this node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source_node: String,
    /// To this node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_node: String,
    /// From this pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source_pod: String,
    /// To this pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_pod: String,
    /// Where the target's node is reached.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_node_address: String,
    /// `PreCopy`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// It is over.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub completed: bool,
    /// It failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Why it failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub failure_reason: String,
    /// A user asked for its end.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub abort_requested: bool,
    /// `Aborting`, `Succeeded`, `Failed`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub abort_status: String,
    /// Unique id of the migration.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub migration_uid: String,
    /// Its settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_configuration: Option<Value>,
    /// The policy that they come from.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub migration_policy_name: String,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl MigrationState {
    /// Whether it is not over: nobody but the migration's controller decides where the VM is.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.migration_uid.is_empty() && self.end_timestamp.is_none()
    }

    /// Whether the VM is on its way, or may be soon.
    #[must_use]
    pub fn is_going_on(&self) -> bool {
        self.end_timestamp.is_none() && (self.start_timestamp.is_some() || self.is_open())
    }

    /// The pod that the VM is in.
    #[must_use]
    pub fn pod(&self) -> &str {
        if self.completed && !self.failed {
            &self.target_pod
        } else {
            &self.source_pod
        }
    }

    /// Ends it; with a reason, as failed.
    pub fn end(&mut self, failure: Option<&str>, now: &Time) {
        self.completed = true;
        self.end_timestamp = Some(now.clone());
        if let Some(reason) = failure {
            self.failed = true;
            reason.clone_into(&mut self.failure_reason);
        }
        if self.abort_requested {
            let status = if self.failed { "Succeeded" } else { "Failed" };
            status.clone_into(&mut self.abort_status);
        }
    }
}
