//! Snapshots of virtual machines and their restores: the group `snapshot.kubevirt.io`.

mod patches;
mod validate;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{Quantity, duration};

pub use patches::validate_patches;
pub(crate) use validate::immutable;

/// The group.
pub const GROUP: &str = "snapshot.kubevirt.io";

/// The served versions, the stored one first; they differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

/// How long a snapshot may take that says nothing of it.
pub const FAILURE_DEADLINE: Duration = Duration::from_secs(300);

/// How long a restore waits for its target to be stopped.
pub const GRACE_PERIOD: Duration = Duration::from_secs(300);

object! {
    /// An object of the same namespace.
    pub struct ObjectReference {
        /// Its group.
        pub api_group: Option<String>,
        /// Its kind.
        pub kind: String,
        /// Its name.
        pub name: String,
    }

    /// Of what a snapshot is taken, and how (`spec`).
    pub struct SnapshotSpec {
        /// The virtual machine.
        pub source: Option<ObjectReference>,
        /// What becomes of the contents when the snapshot is deleted: `Delete` or `Retain`.
        pub deletion_policy: Option<String>,
        /// How long it may take, such as `5m`; 0 for as long as it takes.
        pub failure_deadline: Option<String>,
        /// `Direct`, the only way that is supported.
        pub snapshot_mode: Option<String>,
        /// Refused: belongs to another way.
        pub overlay_scratch_size: Option<Quantity>,
    }

    /// What is restored, and where (`spec`).
    pub struct RestoreSpec {
        /// The virtual machine, which is made if it does not exist.
        pub target: Option<ObjectReference>,
        /// The snapshot.
        pub virtual_machine_snapshot_name: String,
        /// What happens while the target runs.
        pub target_readiness_policy: Option<String>,
        /// How the restored claims are called.
        pub volume_restore_policy: Option<String>,
        /// Whether the restored claims belong to the virtual machine: `Vm` or `None`.
        pub volume_ownership_policy: Option<String>,
        /// Names, labels and annotations of single claims.
        pub volume_restore_overrides: Vec<VolumeRestoreOverride>,
        /// JSON patches for a target that is made.
        pub patches: Vec<String>,
    }

    /// How one volume is restored.
    pub struct VolumeRestoreOverride {
        /// The volume.
        pub volume_name: String,
        /// The name of its claim.
        pub restore_name: String,
        /// Labels of its claim.
        pub labels: BTreeMap<String, String>,
        /// Annotations of its claim.
        pub annotations: BTreeMap<String, String>,
    }
}

impl ObjectReference {
    /// Whether this is a virtual machine.
    #[must_use]
    pub fn is_vm(&self) -> bool {
        self.api_group.as_deref() == Some("kubevirt.io") && self.kind == "VirtualMachine"
    }
}

impl SnapshotSpec {
    /// How long it may take; `None` for as long as it takes.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let given = self.failure_deadline.as_deref();
        let deadline = given.map_or(Some(FAILURE_DEADLINE), duration::parse);
        deadline.filter(|deadline| !deadline.is_zero())
    }

    /// Whether its contents outlive it.
    #[must_use]
    pub fn retains(&self) -> bool {
        self.deletion_policy.as_deref() == Some("Retain")
    }
}

/// What happens while the target of a restore runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Readiness {
    /// It is stopped.
    StopTarget,
    /// The restore waits for [`GRACE_PERIOD`].
    WaitGracePeriod,
    /// The restore fails.
    FailImmediate,
    /// The restore waits.
    WaitEventually,
}

/// How the claims of a restore are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Naming {
    /// By the restore's unique id.
    Random,
    /// As they were: the claims that exist are replaced.
    InPlace,
    /// By the target's name.
    Target,
}

impl RestoreSpec {
    /// What happens while the target runs.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        match self.target_readiness_policy.as_deref() {
            Some("StopTarget") => Readiness::StopTarget,
            Some("FailImmediate") => Readiness::FailImmediate,
            Some("WaitEventually") => Readiness::WaitEventually,
            _ => Readiness::WaitGracePeriod,
        }
    }

    /// How claims are called.
    #[must_use]
    pub fn naming(&self) -> Naming {
        match self.volume_restore_policy.as_deref() {
            Some("InPlace") => Naming::InPlace,
            Some("PrefixTargetName") => Naming::Target,
            _ => Naming::Random,
        }
    }

    /// Whether the claims belong to the virtual machine.
    #[must_use]
    pub fn owns_claims(&self) -> bool {
        self.volume_ownership_policy.as_deref() != Some("None")
    }

    /// What is said of one volume.
    #[must_use]
    pub fn of_volume(&self, volume: &str) -> Option<&VolumeRestoreOverride> {
        let mut overrides = self.volume_restore_overrides.iter();
        overrides.find(|of| of.volume_name == volume)
    }
}
