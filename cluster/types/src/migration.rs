//! The VirtualMachineInstanceMigration: one move of a VMI to another node.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    Cause, Causes, FieldPath, Quantity,
    cause::shown,
    names::is_dns_subdomain,
    vmi::{Condition, MigrationState, PhaseTransition, VmiStatus},
};

/// The label by which the migrations of a VMI are found.
pub const SELECTOR_LABEL: &str = "kubevirt.io/vmi-name";

object! {
    /// Which VMI is to move (`spec`).
    pub struct MigrationSpec {
        /// Its name.
        pub vmi_name: String,
        /// Labels that the target's node must have too.
        pub added_node_selector: BTreeMap<String, String>,
        /// Set by the controllers alone.
        pub priority: Option<String>,
        /// Refused.
        pub send_to: Option<Value>,
        /// Refused.
        pub receive: Option<Value>,
    }

    /// What is reported of a migration (`status`).
    pub struct MigrationStatus {
        /// How far it is.
        pub phase: Option<String>,
        /// When each phase was entered.
        pub phase_transition_timestamps: Vec<PhaseTransition>,
        /// Conditions.
        pub conditions: Vec<Condition>,
        /// What the VMI's status says of it.
        pub migration_state: Option<MigrationState>,
    }
}

/// The group of policies.
pub const POLICY_GROUP: &str = "migrations.kubevirt.io";

/// Its version.
pub const POLICY_VERSION: &str = "v1alpha1";

object! {
    /// How the migrations of some VMs are carried out (`spec`).
    pub struct MigrationPolicySpec {
        /// Which VMs.
        pub selectors: Option<PolicySelectors>,
        /// Whether a guest that writes faster than its memory is sent is slowed down.
        pub allow_auto_converge: Option<bool>,
        /// Most bytes per second while the guest runs; 0 for no limit.
        pub bandwidth_per_migration: Option<Quantity>,
        /// Seconds that each GiB of memory may take.
        #[serde(rename = "completionTimeoutPerGiB")]
        pub completion_timeout_per_gi_b: Option<i64>,
        /// Refused.
        pub allow_post_copy: Option<bool>,
        /// Whether a guest may stand still for as long as it takes.
        pub allow_workload_disruption: Option<bool>,
    }

    /// Which VMs a policy is for: those that have all of these labels.
    pub struct PolicySelectors {
        /// Labels of the namespace.
        pub namespace_selector: BTreeMap<String, String>,
        /// Labels of the VMI.
        pub virtual_machine_instance_selector: BTreeMap<String, String>,
    }
}

impl MigrationPolicySpec {
    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        if self.selectors.is_none() {
            causes.required(&path.child("selectors"), "is required");
        }
        if self
            .completion_timeout_per_gi_b
            .is_some_and(|seconds| seconds < 0)
        {
            let path = path.child("completionTimeoutPerGiB");
            causes.invalid(&path, "must not be negative");
        }
        if let Some(bandwidth) = &self.bandwidth_per_migration
            && bandwidth.bytes().is_none()
        {
            let given = shown(bandwidth.as_str());
            let path = path.child("bandwidthPerMigration");
            causes.invalid(&path, format_args!("is {given}, not a number of bytes"));
        }
        if self.allow_post_copy == Some(true) {
            causes.not_supported(
                &path.child("allowPostCopy"),
                "is not supported: memory is copied before the VM moves",
            );
        }
        causes.into_vec()
    }
}

impl MigrationStatus {
    /// Whether it is over.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.phase.as_deref(), Some("Succeeded" | "Failed"))
    }
}

impl MigrationSpec {
    /// Every cause to refuse this specification by itself, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let name = path.child("vmiName");
        if self.vmi_name.is_empty() {
            causes.required(&name, "is required");
        } else if !is_dns_subdomain(&self.vmi_name) {
            let given = shown(&self.vmi_name);
            causes.invalid(&name, format_args!("is {given}, not the name of an object"));
        }
        for (field, given) in [("sendTo", &self.send_to), ("receive", &self.receive)] {
            if given.is_some() {
                let message = "is not supported: VMs move within one namespace of one cluster";
                causes.not_supported(&path.child(field), message);
            }
        }
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        if self != old {
            causes.forbidden(
                path,
                "cannot change: delete the migration and create another",
            );
        }
        causes.into_vec()
    }
}

/// Why a VMI in this state cannot migrate; `None` where it can.
#[must_use]
pub fn refusal(status: &VmiStatus) -> Option<String> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Some("Cannot migrate VMI in finalized state.".to_owned());
    }
    let condition = status
        .conditions
        .iter()
        .find(|condition| condition.kind == "LiveMigratable");
    let condition = condition.filter(|condition| condition.status == "False")?;
    Some(format!(
        "Cannot migrate VMI, Reason: {}, Message: {}",
        condition.reason.as_deref().unwrap_or_default(),
        condition.message.as_deref().unwrap_or_default()
    ))
}
