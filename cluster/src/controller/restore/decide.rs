//! How a restore goes on: a pure function of what was observed.
//!
//! The target is stopped and locked, its claims are made of the snapshots of the volumes, it is
//! changed back or made, and the lock is given back. Each step leaves an object that tells the
//! next look where to go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use podvisor_cluster_types::snapshot::{GRACE_PERIOD, Naming, Readiness};

use super::{RESTORE_FINALIZER, RestoreError, claims, target};
use crate::controller::snapshot::{claim_of, locked_by, restored_by};
use crate::objects::{
    Condition, DataVolume, RestoreStatus, SnapshotPhase, SourceMachine, VirtualMachine,
    VirtualMachineInstance, VirtualMachineRestore, VirtualMachineSnapshot,
    VirtualMachineSnapshotContent, VmSpec, VolumeSnapshot, is_true, set_condition,
};

/// When to look again while nothing happens that leads to a look.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The restore.
    pub restore: &'a VirtualMachineRestore,
    /// The virtual machine.
    pub target: Option<&'a VirtualMachine>,
    /// Its instance.
    pub vmi: Option<&'a VirtualMachineInstance>,
    /// The snapshot.
    pub snapshot: Option<&'a VirtualMachineSnapshot>,
    /// What it contains.
    pub content: Option<&'a VirtualMachineSnapshotContent>,
    /// Claims of the restore's names.
    pub claims: &'a BTreeMap<String, Arc<PersistentVolumeClaim>>,
    /// Those of them that wait for a consumer.
    pub waiting: &'a BTreeSet<String>,
    /// The snapshots of volumes, by name.
    pub volumes: &'a BTreeMap<String, VolumeSnapshot>,
    /// DataVolumes that the target made, and those of the restore's names.
    pub data_volumes: &'a [Arc<DataVolume>],
    /// The time.
    pub now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Keep the restore until its target is unlocked; it goes with the target.
    Adopt,
    /// Halt the target.
    Stop,
    /// Lock the target.
    Lock,
    /// Delete the DataVolume with this name and unique id.
    DeleteVolume {
        /// Name.
        name: String,
        /// Unique id.
        uid: String,
    },
    /// Delete the claim with this name and unique id.
    DeleteClaim {
        /// Name.
        name: String,
        /// Unique id.
        uid: String,
    },
    /// Make a claim.
    CreateClaim(Box<PersistentVolumeClaim>),
    /// Make the target.
    CreateTarget(Box<VirtualMachine>),
    /// Give the target this specification.
    UpdateTarget(Box<VmSpec>),
    /// Give a claim to the target.
    OwnClaim(String),
    /// Give the lock back.
    Unlock,
    /// Let the restore go.
    RemoveFinalizer,
}

/// What is to be written and done: what is done comes first, but for the last.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: RestoreStatus,
    /// What is done.
    pub actions: Vec<Action>,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let restore = observed.restore;
    let mut decision = Decision {
        status: restore.status.clone(),
        ..Decision::default()
    };
    let finalizers = restore.metadata.finalizers.iter().flatten();
    let is_kept = finalizers.into_iter().any(|name| name == RESTORE_FINALIZER);
    if restore.metadata.deletion_timestamp.is_some() {
        if restore.status.complete != Some(true) {
            progress(observed, &mut decision, false, "VM restore is deleting");
        }
        unlock(observed, &mut decision);
        if is_kept {
            decision.actions.push(Action::RemoveFinalizer);
        }
        return decision;
    }
    if restore.status.complete == Some(true) || is_true(&restore.status.conditions, "Failure") {
        unlock(observed, &mut decision);
        return decision;
    }
    if !is_kept {
        decision.actions.push(Action::Adopt);
    }
    if decision.status.complete.is_none() {
        decision.status.complete = Some(false);
        let why = "Initializing VirtualMachineRestore";
        progress(observed, &mut decision, true, why);
    }
    match go_on(observed, &mut decision) {
        Ok(()) => {}
        Err(Obstacle::Waits(why)) => {
            progress(observed, &mut decision, false, &why);
            decision.again.get_or_insert(PATIENCE);
        }
        Err(Obstacle::Fails(why)) => {
            progress(observed, &mut decision, false, "Operation failed");
            condition(observed, &mut decision, "Failure", true, &why);
            unlock(observed, &mut decision);
        }
    }
    decision
}

/// Why a restore does not go on.
enum Obstacle {
    /// Something has to change first.
    Waits(String),
    /// It never will.
    Fails(String),
}

impl From<RestoreError> for Obstacle {
    fn from(error: RestoreError) -> Self {
        use std::error::Error as _;
        let cause = error.source().map(|source| format!(": {source}"));
        Self::Fails(format!("{error}{}", cause.unwrap_or_default()))
    }
}

fn condition(observed: &Observed<'_>, decision: &mut Decision, kind: &str, yes: bool, why: &str) {
    let condition = Condition {
        status: if yes { "True" } else { "False" }.to_owned(),
        reason: why.to_owned(),
        ..Condition::yes(kind)
    };
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

/// Says what is done, and that it is not done yet.
fn progress(observed: &Observed<'_>, decision: &mut Decision, yes: bool, why: &str) {
    condition(observed, decision, "Progressing", yes, why);
    condition(observed, decision, "Ready", false, why);
}

fn unlock(observed: &Observed<'_>, decision: &mut Decision) {
    let holder = observed.target.and_then(restored_by);
    if holder.is_some() && holder == observed.restore.metadata.name.as_deref() {
        decision.actions.push(Action::Unlock);
    }
}

/// Takes the next step.
fn go_on(observed: &Observed<'_>, decision: &mut Decision) -> Result<(), Obstacle> {
    let restore = observed.restore;
    if observed.target.is_some() && observed.vmi.is_some() {
        return not_ready(observed, decision);
    }
    let name = &restore.spec.virtual_machine_snapshot_name;
    let waits = |why: String| Err(Obstacle::Waits(why));
    let Some(snapshot) = observed.snapshot else {
        return waits(format!("VirtualMachineSnapshot {name} does not exist"));
    };
    if snapshot.status.phase == SnapshotPhase::Failed {
        return waits(format!(
            "VirtualMachineSnapshot {name} failed and is invalid to use"
        ));
    }
    if snapshot.status.ready_to_use != Some(true) {
        return waits(format!("VirtualMachineSnapshot {name} not ready"));
    }
    let source = observed
        .content
        .and_then(|content| content.spec.source.virtual_machine.as_ref());
    let (Some(content), Some(source)) = (observed.content, source) else {
        return waits(format!("VirtualMachineSnapshot {name} has no contents"));
    };
    let is_done = observed
        .target
        .is_some_and(|target| target::is_restored(target, restore));
    if let Some(target) = observed.target.filter(|_| !is_done)
        && !lock(observed, snapshot, target, decision)?
    {
        return Ok(());
    }
    if !is_done {
        if !make_claims(observed, content, source, decision)? {
            return Ok(());
        }
        make_target(observed, source, decision)?;
        progress(observed, decision, true, "Updating target spec");
        return Ok(());
    }
    finish(observed, decision);
    Ok(())
}

/// The target runs.
fn not_ready(observed: &Observed<'_>, decision: &mut Decision) -> Result<(), Obstacle> {
    let restore = observed.restore;
    let why = "Waiting for target to be ready";
    match restore.spec.readiness() {
        Readiness::FailImmediate => {
            return Err(Obstacle::Fails("Restore target not ready".to_owned()));
        }
        Readiness::StopTarget => decision.actions.push(Action::Stop),
        Readiness::WaitGracePeriod => {
            let created = restore.metadata.creation_timestamp.as_ref();
            let waited = created.map(|created| observed.now.0.duration_since(created.0));
            let limit = SignedDuration::try_from(GRACE_PERIOD).unwrap_or(SignedDuration::MAX);
            let left = limit.saturating_sub(waited.unwrap_or_default());
            if left.is_negative() {
                let seconds = GRACE_PERIOD.as_secs();
                let why = format!("Restore target failed to be ready within {seconds} s");
                return Err(Obstacle::Fails(why));
            }
            let left = Duration::try_from(left).unwrap_or_default();
            decision.again = Some(left + Duration::from_secs(1));
        }
        _ => {}
    }
    progress(observed, decision, false, why);
    Ok(())
}

/// Locks the target; whether it is.
fn lock(
    observed: &Observed<'_>,
    snapshot: &VirtualMachineSnapshot,
    target: &VirtualMachine,
    decision: &mut Decision,
) -> Result<bool, Obstacle> {
    if target.metadata.uid != snapshot.status.source_uid {
        let why = "restore source and restore target are different but restore target already \
                   exists";
        return Err(Obstacle::Waits(why.to_owned()));
    }
    if let Some(other) = locked_by(target) {
        let why = format!("Target is locked by the VirtualMachineSnapshot {other}");
        return Err(Obstacle::Waits(why));
    }
    match restored_by(target) {
        Some(holder) if observed.restore.metadata.name.as_deref() == Some(holder) => Ok(true),
        Some(other) => {
            let why = format!("vm restore {other} in progress");
            Err(Obstacle::Waits(why))
        }
        None => {
            decision.actions.push(Action::Lock);
            Ok(false)
        }
    }
}

/// Makes the claims; whether all exist and can be used.
fn make_claims(
    observed: &Observed<'_>,
    content: &VirtualMachineSnapshotContent,
    source: &SourceMachine,
    decision: &mut Decision,
) -> Result<bool, Obstacle> {
    let restore = observed.restore;
    let backups = &content.spec.volume_backups;
    if restore.status.restores.is_empty() {
        let restores = claims::restores(restore, source, backups.iter());
        if !restores.is_empty() {
            decision.status.restores = restores;
            progress(observed, decision, true, "Creating new PVCs");
            return Ok(false);
        }
    }
    let mut is_ready = true;
    for of in &restore.status.restores {
        let claim = observed.claims.get(&of.claim);
        match claim {
            Some(claim) if !claims::is_of(claim, restore) => {
                is_ready = false;
                replace(observed, claim, decision)?;
            }
            Some(claim) => match phase(claim) {
                "Bound" => {}
                "Lost" => {
                    let why = format!("the claim {} has lost its volume", of.claim);
                    return Err(Obstacle::Waits(why));
                }
                _ => is_ready &= observed.waiting.contains(&of.claim),
            },
            None => {
                is_ready = false;
                let mut backups = backups.iter();
                let backup = backups.find(|backup| backup.volume_name == of.volume_name);
                let taken = observed.volumes.get(&of.volume_snapshot_name);
                let (Some(backup), Some(taken)) = (backup, taken) else {
                    let why = format!("VolumeSnapshot {} is missing", of.volume_snapshot_name);
                    return Err(Obstacle::Waits(why));
                };
                let claim = claims::claim(restore, observed.target, source, backup, of, taken);
                decision.actions.push(Action::CreateClaim(Box::new(claim)));
            }
        }
    }
    if !is_ready {
        progress(observed, decision, true, "Waiting for new PVCs");
        decision.again = Some(PATIENCE);
    }
    Ok(is_ready)
}

fn phase(claim: &PersistentVolumeClaim) -> &str {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}

/// Makes room for a claim: one of its name exists.
fn replace(
    observed: &Observed<'_>,
    claim: &PersistentVolumeClaim,
    decision: &mut Decision,
) -> Result<(), Obstacle> {
    let name = claim.metadata.name.clone().unwrap_or_default();
    if observed.restore.spec.naming() != Naming::InPlace {
        let why = format!("a claim {name} exists that is not of this restore");
        return Err(Obstacle::Waits(why));
    }
    // Whoever made the claim would make it again.
    let named = observed
        .data_volumes
        .iter()
        .filter(|volume| volume.metadata.name.as_ref() == Some(&name));
    for volume in named {
        if let Some(uid) = volume.metadata.uid.clone()
            && volume.metadata.deletion_timestamp.is_none()
        {
            let name = name.clone();
            decision.actions.push(Action::DeleteVolume { name, uid });
        }
    }
    if let Some(uid) = claim.metadata.uid.clone()
        && claim.metadata.deletion_timestamp.is_none()
    {
        decision.actions.push(Action::DeleteClaim { name, uid });
    }
    Ok(())
}

/// Makes the target, or changes it back.
fn make_target(
    observed: &Observed<'_>,
    source: &SourceMachine,
    decision: &mut Decision,
) -> Result<(), Obstacle> {
    let restore = observed.restore;
    decision.actions.push(match observed.target {
        None => Action::CreateTarget(Box::new(target::machine(restore, source)?)),
        Some(vm) => {
            let spec = target::spec_of(vm, source, &restore.status.restores);
            Action::UpdateTarget(Box::new(spec))
        }
    });
    Ok(())
}

/// The target is as it was: what is left over goes.
fn finish(observed: &Observed<'_>, decision: &mut Decision) {
    let restore = observed.restore;
    let Some(vm) = observed.target else { return };
    if restore.spec.owns_claims() {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        for of in &restore.status.restores {
            let claim = observed.claims.get(&of.claim);
            if claim.is_some_and(|claim| !is_owned(claim, uid)) {
                decision.actions.push(Action::OwnClaim(of.claim.clone()));
            }
        }
    }
    let template = vm.spec.template.as_ref();
    let volumes = template.and_then(|template| template.spec.get("volumes"));
    let volumes = volumes.and_then(|volumes| volumes.as_array());
    let used: BTreeSet<&str> = volumes.into_iter().flatten().filter_map(claim_of).collect();
    for volume in observed.data_volumes {
        let (Some(name), Some(uid)) = (&volume.metadata.name, &volume.metadata.uid) else {
            continue;
        };
        let owners = volume.metadata.owner_references.iter().flatten();
        let is_own = owners
            .into_iter()
            .any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref());
        if is_own && !used.contains(name.as_str()) {
            if !decision.status.deleted_data_volumes.contains(name) {
                decision.status.deleted_data_volumes.push(name.clone());
            }
            let (name, uid) = (name.clone(), uid.clone());
            decision.actions.push(Action::DeleteVolume { name, uid });
        }
    }
    unlock(observed, decision);
    decision.status.complete = Some(true);
    decision.status.restore_time = Some(observed.now.clone());
    condition(
        observed,
        decision,
        "Progressing",
        false,
        "Operation complete",
    );
    condition(observed, decision, "Ready", true, "Operation complete");
}

fn is_owned(claim: &PersistentVolumeClaim, uid: &str) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    // One that has a controller goes with that.
    owners
        .into_iter()
        .any(|owner| owner.uid == uid || owner.controller == Some(true))
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
