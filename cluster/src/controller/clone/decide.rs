//! How a copy goes on: a pure function of what was observed.
//!
//! A snapshot is taken, unless the source is one, and restored into the target; then both go.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use podvisor_cluster_types::snapshot::{ObjectReference, RestoreSpec, SnapshotSpec};

use super::patches;
use crate::controller::names;
use crate::objects::{
    ClonePhase, CloneStatus, Condition, SnapshotPhase, VirtualMachine, VirtualMachineClone,
    VirtualMachineRestore, VirtualMachineSnapshot, VirtualMachineSnapshotContent, condition,
    is_true, set_condition,
};

/// When to look again while nothing happens that leads to a look.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The copy.
    pub clone: &'a VirtualMachineClone,
    /// The virtual machine that is copied, if one is.
    pub source: Option<&'a VirtualMachine>,
    /// The snapshot.
    pub snapshot: Option<&'a VirtualMachineSnapshot>,
    /// What it contains.
    pub content: Option<&'a VirtualMachineSnapshotContent>,
    /// The restore.
    pub restore: Option<&'a VirtualMachineRestore>,
    /// Whether all claims of the restore have their volumes.
    pub are_bound: bool,
    /// Whether the target exists.
    pub has_target: bool,
    /// The time.
    pub now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Take a snapshot.
    CreateSnapshot(Box<VirtualMachineSnapshot>),
    /// Restore it.
    CreateRestore(Box<VirtualMachineRestore>),
    /// Delete the restore of this name.
    DeleteRestore(String),
    /// Delete the snapshot of this name.
    DeleteSnapshot(String),
}

/// What is done and written, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// What is done.
    pub actions: Vec<Action>,
    /// The status to write, if it differs.
    pub status: CloneStatus,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// The name of the snapshot of a copy.
pub(super) fn snapshot_name(clone: &VirtualMachineClone) -> String {
    match &clone.spec.source {
        Some(source) if !source.is_vm() => source.name.clone(),
        _ => format!("tmp-snapshot-{}", uid(clone)),
    }
}

/// The name of the restore of a copy.
pub(super) fn restore_name(clone: &VirtualMachineClone) -> String {
    format!("tmp-restore-{}", uid(clone))
}

/// The name of a copy.
pub(super) fn target_name(clone: &VirtualMachineClone) -> String {
    if let Some(target) = &clone.spec.target {
        return target.name.clone();
    }
    let source = clone.spec.source.as_ref().map(|source| &*source.name);
    let room = 63 - "clone--".len() - names::HASH;
    let short: String = source.unwrap_or_default().chars().take(room).collect();
    format!(
        "clone-{}-{}",
        short.trim_end_matches(['-', '.']),
        names::hash(uid(clone))
    )
}

fn uid(clone: &VirtualMachineClone) -> &str {
    clone.metadata.uid.as_deref().unwrap_or_default()
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let clone = observed.clone;
    let mut decision = Decision {
        status: clone.status.clone(),
        ..Decision::default()
    };
    // What it has made goes with it.
    if clone.metadata.deletion_timestamp.is_some() {
        return decision;
    }
    match clone.status.phase {
        ClonePhase::Failed => {}
        ClonePhase::Succeeded => clean(observed, &mut decision),
        _ => go_on(observed, &mut decision),
    }
    decision
}

fn state(observed: &Observed<'_>, decision: &mut Decision, why: &str) {
    let is_ready = decision.status.phase == ClonePhase::Succeeded;
    let ends = is_ready || decision.status.phase == ClonePhase::Failed;
    for (kind, yes) in [("Progressing", !ends), ("Ready", is_ready)] {
        let condition = Condition {
            status: if yes { "True" } else { "False" }.to_owned(),
            reason: why.to_owned(),
            ..Condition::yes(kind)
        };
        set_condition(&mut decision.status.conditions, condition, &observed.now);
    }
}

fn fail(observed: &Observed<'_>, decision: &mut Decision, why: String) {
    decision.status.phase = ClonePhase::Failed;
    state(observed, decision, "Failed");
    for condition in &mut decision.status.conditions {
        condition.message.clone_from(&why);
    }
}

fn go_on(observed: &Observed<'_>, decision: &mut Decision) {
    let clone = observed.clone;
    let is_of_vm = clone
        .spec
        .source
        .as_ref()
        .is_none_or(ObjectReference::is_vm);
    decision.again = Some(PATIENCE);
    decision.status.phase = ClonePhase::SnapshotInProgress;
    state(observed, decision, "Still processing");
    let Some(snapshot) = observed.snapshot else {
        if decision.status.restore_name.is_some() {
            let name = snapshot_name(clone);
            fail(
                observed,
                decision,
                format!("the snapshot {name} does not exist any more"),
            );
        } else if !is_of_vm {
            state(observed, decision, "Source does not exist");
        } else if observed.source.is_some() {
            decision
                .actions
                .push(Action::CreateSnapshot(Box::new(snapshot_of(clone))));
            decision.status.snapshot_name = Some(snapshot_name(clone));
        } else {
            state(observed, decision, "Source does not exist");
        }
        return;
    };
    decision.status.snapshot_name = snapshot.metadata.name.clone();
    if snapshot.status.phase == SnapshotPhase::Failed {
        let error = snapshot.status.error.as_ref();
        let error = error.and_then(|error| error.message.as_deref());
        let why = format!(
            "the snapshot failed: {}",
            error.unwrap_or("it says no more")
        );
        fail(observed, decision, why);
        return;
    }
    let source = observed
        .content
        .and_then(|content| content.spec.source.virtual_machine.as_ref());
    let (Some(source), Some(true)) = (source, snapshot.status.ready_to_use) else {
        return;
    };
    decision.status.phase = ClonePhase::RestoreInProgress;
    let Some(restore) = observed.restore else {
        if observed.has_target {
            let name = target_name(clone);
            fail(
                observed,
                decision,
                format!("the target {name} already exists"),
            );
            return;
        }
        let patches = patches::of(&clone.spec, source);
        let restore = restore_of(clone, snapshot, patches);
        decision
            .actions
            .push(Action::CreateRestore(Box::new(restore)));
        decision.status.restore_name = Some(restore_name(clone));
        return;
    };
    decision.status.restore_name = restore.metadata.name.clone();
    if is_true(&restore.status.conditions, "Failure") {
        let failure = condition(&restore.status.conditions, "Failure");
        let why = failure.map_or("", |failure| failure.reason.as_str());
        fail(observed, decision, format!("the restore failed: {why}"));
        return;
    }
    if restore.status.complete != Some(true) {
        return;
    }
    decision.status.phase = ClonePhase::CreatingTargetVM;
    if observed.has_target {
        decision.status.phase = ClonePhase::Succeeded;
        decision.status.target_name = Some(target_name(clone));
        decision.status.creation_time = Some(observed.now.clone());
        state(observed, decision, "Ready");
        clean(observed, decision);
    }
}

/// What is needed no more goes: a snapshot of the source, when all its volumes were restored.
fn clean(observed: &Observed<'_>, decision: &mut Decision) {
    let Some(restore) = decision.status.restore_name.clone() else {
        decision.again = None;
        return;
    };
    if observed.restore.is_some() && !observed.are_bound {
        decision.again = Some(PATIENCE);
        return;
    }
    decision.again = None;
    decision.actions.push(Action::DeleteRestore(restore));
    decision.status.restore_name = None;
    if let Some(snapshot) = decision.status.snapshot_name.take() {
        let source = observed.clone.spec.source.as_ref();
        if source.is_some_and(ObjectReference::is_vm) {
            decision.actions.push(Action::DeleteSnapshot(snapshot));
        }
    }
}

/// What is made for a copy goes with it.
fn made_for(clone: &VirtualMachineClone, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: clone.metadata.namespace.clone(),
        owner_references: Some(vec![OwnerReference {
            api_version: clone.api_version.clone(),
            kind: clone.kind.clone(),
            name: clone.metadata.name.clone().unwrap_or_default(),
            uid: uid(clone).to_owned(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]),
        ..ObjectMeta::default()
    }
}

fn snapshot_of(clone: &VirtualMachineClone) -> VirtualMachineSnapshot {
    let spec = SnapshotSpec {
        source: clone.spec.source.clone(),
        ..SnapshotSpec::default()
    };
    VirtualMachineSnapshot::new(made_for(clone, snapshot_name(clone)), spec)
}

fn restore_of(
    clone: &VirtualMachineClone,
    snapshot: &VirtualMachineSnapshot,
    patches: Vec<String>,
) -> VirtualMachineRestore {
    let spec = RestoreSpec {
        target: Some(ObjectReference {
            api_group: Some("kubevirt.io".to_owned()),
            kind: "VirtualMachine".to_owned(),
            name: target_name(clone),
        }),
        virtual_machine_snapshot_name: snapshot.metadata.name.clone().unwrap_or_default(),
        volume_restore_policy: clone.spec.volume_name_policy.clone(),
        patches,
        ..RestoreSpec::default()
    };
    VirtualMachineRestore::new(made_for(clone, restore_name(clone)), spec)
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
