//! The VirtualMachineInstanceMigration: one move of a VMI to another node.

use std::collections::BTreeMap;

use crate::{
    Cause, Causes, FieldPath,
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
