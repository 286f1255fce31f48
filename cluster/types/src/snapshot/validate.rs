//! Causes to refuse snapshots and restores.

use super::{ObjectReference, RestoreSpec, SnapshotSpec, validate_patches};
use crate::{
    Cause, CauseReason, Causes, FieldPath, cause::shown, duration, names::is_dns_subdomain,
};

impl ObjectReference {
    /// Adds causes unless this names an object of one of these groups and kinds.
    pub fn validate(&self, path: &FieldPath, kinds: &[(&str, &str)], causes: &mut Causes) {
        let group = path.child("apiGroup");
        match self.api_group.as_deref().filter(|group| !group.is_empty()) {
            None => {
                let known = kinds.first().map_or("", |(group, _)| group);
                causes.add(
                    CauseReason::NotFound,
                    &group,
                    format_args!("is missing: {known}"),
                );
            }
            Some(given) if !kinds.iter().any(|(known, _)| *known == given) => {
                causes.invalid(
                    &group,
                    format_args!("is {}, which is not known", shown(given)),
                );
            }
            Some(given) if !kinds.contains(&(given, self.kind.as_str())) => {
                let kind = path.child("kind");
                let given = shown(&self.kind);
                causes.invalid(&kind, format_args!("is {given}, which is not known here"));
            }
            Some(_) => {}
        }
        let name = path.child("name");
        if self.name.is_empty() {
            causes.required(&name, "is required");
        } else if !is_dns_subdomain(&self.name) {
            let given = shown(&self.name);
            causes.invalid(&name, format_args!("is {given}, not the name of an object"));
        }
    }
}

/// What snapshots are taken of, and restored to.
const MACHINES: [(&str, &str); 1] = [("kubevirt.io", "VirtualMachine")];

impl SnapshotSpec {
    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let source = self.source.clone().unwrap_or_default();
        source.validate(&path.child("source"), &MACHINES, &mut causes);
        if let Some(policy) = &self.deletion_policy {
            let field = path.child("deletionPolicy");
            causes.one_of(&field, policy, &["Delete", "Retain"]);
        }
        if let Some(deadline) = &self.failure_deadline
            && duration::parse(deadline).is_none()
        {
            let given = shown(deadline);
            let field = path.child("failureDeadline");
            causes.invalid(
                &field,
                format_args!("is {given}, not a duration such as 5m"),
            );
        }
        if let Some(mode) = &self.snapshot_mode {
            causes.one_of(&path.child("snapshotMode"), mode, &["Direct"]);
        }
        if self.overlay_scratch_size.is_some() {
            let field = path.child("overlayScratchSize");
            causes.not_supported(
                &field,
                "is not supported: guests write to their disks alone",
            );
        }
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        immutable(self == old, path)
    }
}

impl RestoreSpec {
    /// Every cause to refuse this specification by itself, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let target = self.target.clone().unwrap_or_default();
        target.validate(&path.child("target"), &MACHINES, &mut causes);
        let snapshot = path.child("virtualMachineSnapshotName");
        if self.virtual_machine_snapshot_name.is_empty() {
            causes.required(&snapshot, "is required");
        } else if !is_dns_subdomain(&self.virtual_machine_snapshot_name) {
            let given = shown(&self.virtual_machine_snapshot_name);
            causes.invalid(
                &snapshot,
                format_args!("is {given}, not the name of an object"),
            );
        }
        let words: [(&str, &Option<String>, &[&str]); 3] = [
            (
                "targetReadinessPolicy",
                &self.target_readiness_policy,
                &[
                    "StopTarget",
                    "WaitGracePeriod",
                    "FailImmediate",
                    "WaitEventually",
                ],
            ),
            (
                "volumeRestorePolicy",
                &self.volume_restore_policy,
                &["RandomizeNames", "InPlace", "PrefixTargetName"],
            ),
            (
                "volumeOwnershipPolicy",
                &self.volume_ownership_policy,
                &["Vm", "None"],
            ),
        ];
        for (name, given, known) in words {
            if let Some(given) = given {
                causes.one_of(&path.child(name), given, known);
            }
        }
        let overrides = path.child("volumeRestoreOverrides");
        for (index, of) in self.volume_restore_overrides.iter().enumerate() {
            let path = overrides.index(index);
            if of.volume_name.is_empty() {
                causes.required(&path.child("volumeName"), "is required");
            }
            if of.restore_name.is_empty() && of.labels.is_empty() && of.annotations.is_empty() {
                causes.required(&path, "must have restoreName, labels or annotations");
            }
            if !of.restore_name.is_empty() && !is_dns_subdomain(&of.restore_name) {
                let given = shown(&of.restore_name);
                let field = path.child("restoreName");
                causes.invalid(
                    &field,
                    format_args!("is {given}, not the name of an object"),
                );
            }
        }
        validate_patches(&self.patches, &path.child("patches"), &mut causes);
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        immutable(self == old, path)
    }
}

/// A cause unless a specification is as it was.
pub(crate) fn immutable(is_same: bool, path: &FieldPath) -> Vec<Cause> {
    let mut causes = Causes::default();
    if !is_same {
        causes.invalid(path, "cannot change: delete the object and create another");
    }
    causes.into_vec()
}
