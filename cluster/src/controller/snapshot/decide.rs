//! How a snapshot goes on: a pure function of what was observed.
//!
//! The virtual machine is locked, what it is like is stored, its guest is frozen, the snapshots of
//! its volumes are asked for, the guest is thawed when all were taken, and the lock is given back.
//! Each step leaves an object that tells the next look where to go on.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;

use super::indications;
use crate::objects::{
    Condition, ContentStatus, MigrationState, Phase, SnapshotError, SnapshotPhase, SnapshotStatus,
    VirtualMachine, VirtualMachineInstance, VirtualMachineSnapshot, VirtualMachineSnapshotContent,
    VolumeSnapshot, VolumeSnapshotState, is_true, set_condition,
};

/// Finalizer of a snapshot: its virtual machine is unlocked first.
pub const SNAPSHOT_FINALIZER: &str = "snapshot.kubevirt.io/vmsnapshot-protection";

/// Finalizer of a virtual machine of which a snapshot is taken.
pub const SOURCE_FINALIZER: &str = "snapshot.kubevirt.io/snapshot-source-protection";

/// Annotation of a snapshot's contents: until when the guest stays frozen at most.
pub(super) const FROZEN_UNTIL: &str = "snapshot.podvisor.io/frozen-until";

/// The longest time for which nodes freeze a guest.
const LONGEST_FREEZE: Duration = Duration::from_secs(600);

/// How long nothing may happen until it is looked again: whoever takes snapshots of volumes may
/// have been installed meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The snapshot.
    pub snapshot: &'a VirtualMachineSnapshot,
    /// The virtual machine.
    pub vm: Option<&'a VirtualMachine>,
    /// Its instance.
    pub vmi: Option<&'a VirtualMachineInstance>,
    /// What the snapshot contains.
    pub content: Option<&'a VirtualMachineSnapshotContent>,
    /// The snapshots of volumes that exist, by name.
    pub volumes: &'a BTreeMap<String, VolumeSnapshot>,
    /// A pod that uses a claim of the machine, which does not run.
    pub user: Option<&'a str>,
    /// The time.
    pub now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Keep the snapshot until the virtual machine is unlocked.
    AddFinalizer,
    /// Lock the virtual machine.
    Lock,
    /// Store what the virtual machine is like.
    CreateContent,
    /// Freeze the guest's file systems for so long at most.
    Freeze(Duration),
    /// Have the snapshot of a volume taken.
    CreateVolume(String),
    /// Thaw the guest's file systems.
    Thaw {
        /// It is tried again until it succeeds.
        must_succeed: bool,
    },
    /// Give the lock back.
    Unlock,
    /// Delete what the snapshot contains.
    DeleteContent {
        /// The unique id.
        uid: String,
    },
    /// Let the snapshot go.
    RemoveFinalizer,
}

impl Action {
    /// Whether it comes before the status is written.
    #[must_use]
    pub fn is_first(&self) -> bool {
        !matches!(
            self,
            Self::Unlock | Self::DeleteContent { .. } | Self::RemoveFinalizer
        )
    }
}

/// What is to be written and done.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: SnapshotStatus,
    /// The status of its contents.
    pub content: Option<ContentStatus>,
    /// What is done.
    pub actions: Vec<Action>,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let snapshot = observed.snapshot;
    let mut decision = Decision {
        status: snapshot.status.clone(),
        ..Decision::default()
    };
    let is_late = is_late(observed);
    if snapshot.metadata.deletion_timestamp.is_some() {
        if !decision.status.phase.is_final() {
            decision.status.phase = SnapshotPhase::Deleting;
            progress(observed, &mut decision, false, "VM snapshot is deleting");
        }
        give_up(observed, &mut decision);
        if has(&snapshot.metadata.finalizers, SNAPSHOT_FINALIZER) {
            decision.actions.push(Action::RemoveFinalizer);
        }
    } else if decision.status.phase == SnapshotPhase::Failed || is_late {
        fail(observed, &mut decision);
        give_up(observed, &mut decision);
    } else {
        if !has(&snapshot.metadata.finalizers, SNAPSHOT_FINALIZER) {
            decision.actions.push(Action::AddFinalizer);
        }
        if decision.status.phase == SnapshotPhase::Succeeded {
            follow(observed, &mut decision);
        } else {
            go_on(observed, &mut decision);
        }
        finish(observed, &mut decision);
    }
    decision
}

fn has(finalizers: &Option<Vec<String>>, name: &str) -> bool {
    let finalizers = finalizers.iter().flatten();
    finalizers.into_iter().any(|finalizer| finalizer == name)
}

/// How long the snapshot may still take; `None` for as long as it takes.
fn left(observed: &Observed<'_>) -> Option<SignedDuration> {
    let deadline = observed.snapshot.spec.deadline()?;
    let created = observed.snapshot.metadata.creation_timestamp.as_ref()?;
    let deadline = SignedDuration::try_from(deadline).ok()?;
    let end = created.0.checked_add(deadline).ok()?;
    Some(end.duration_since(observed.now.0))
}

fn is_late(observed: &Observed<'_>) -> bool {
    !observed.snapshot.status.phase.is_final()
        && left(observed).is_some_and(|left| left.is_negative())
}

fn condition(observed: &Observed<'_>, decision: &mut Decision, kind: &str, yes: bool, why: &str) {
    let condition = Condition {
        status: if yes { "True" } else { "False" }.to_owned(),
        reason: why.to_owned(),
        ..Condition::yes(kind)
    };
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

fn progress(observed: &Observed<'_>, decision: &mut Decision, yes: bool, why: &str) {
    condition(observed, decision, "Progressing", yes, why);
}

/// The snapshot was not taken in time.
fn fail(observed: &Observed<'_>, decision: &mut Decision) {
    const WHY: &str = "snapshot deadline exceeded";
    if decision.status.phase != SnapshotPhase::Failed {
        decision.status.phase = SnapshotPhase::Failed;
        decision.status.ready_to_use = Some(false);
        let because = decision.status.error.take().and_then(|error| error.message);
        let message = because.map_or(WHY.to_owned(), |because| format!("{WHY}: {because}"));
        decision.status.error = Some(SnapshotError {
            time: Some(observed.now.clone()),
            message: Some(message),
        });
    }
    condition(observed, decision, "Failure", true, WHY);
    progress(observed, decision, false, "Operation failed");
    condition(observed, decision, "Ready", false, "Not ready");
}

/// Undoes what was begun: contents that are not complete are of no use.
fn give_up(observed: &Observed<'_>, decision: &mut Decision) {
    if let Some(content) = observed.content {
        let is_taken = content.status.creation_time.is_some();
        if !is_taken && frozen_until(content).is_some() && is_running(observed.vmi) {
            decision.actions.push(Action::Thaw {
                must_succeed: false,
            });
        }
        let is_ready = content.status.ready_to_use == Some(true);
        let goes = !is_ready || !observed.snapshot.spec.retains();
        let uid = content.metadata.uid.clone();
        if let Some(uid) = uid.filter(|_| goes && content.metadata.deletion_timestamp.is_none()) {
            decision.actions.push(Action::DeleteContent { uid });
        }
    }
    unlock(observed, decision);
}

fn unlock(observed: &Observed<'_>, decision: &mut Decision) {
    let Some(vm) = observed.vm else { return };
    let holder = locked_by(vm);
    let is_left = holder.is_none() && has(&vm.metadata.finalizers, SOURCE_FINALIZER);
    if holder == observed.snapshot.metadata.name.as_deref() || is_left {
        decision.actions.push(Action::Unlock);
    }
}

/// The snapshot that a virtual machine is locked by.
#[must_use]
pub(in crate::controller) fn locked_by(vm: &VirtualMachine) -> Option<&str> {
    text(vm, "snapshotInProgress")
}

/// The restore that a virtual machine is locked by.
#[must_use]
pub(in crate::controller) fn restored_by(vm: &VirtualMachine) -> Option<&str> {
    text(vm, "restoreInProgress")
}

fn text<'a>(vm: &'a VirtualMachine, name: &str) -> Option<&'a str> {
    let text = vm.status.rest.get(name)?.as_str()?;
    (!text.is_empty()).then_some(text)
}

/// What a snapshot waits for whose machine is on its way to another node.
const MIGRATING: &str = "Source is migrating";

fn is_migrating(vmi: Option<&VirtualMachineInstance>) -> bool {
    let state = vmi.and_then(|vmi| vmi.status.migration_state.as_ref());
    state.is_some_and(MigrationState::is_going_on)
}

/// Why the virtual machine cannot be locked yet.
fn obstacle(observed: &Observed<'_>, vm: &VirtualMachine) -> Option<String> {
    let name = observed.snapshot.metadata.name.as_deref();
    if vm.status.printable_status.is_empty() {
        return Some("Source has no status yet".to_owned());
    }
    if let Some(other) = locked_by(vm).filter(|other| Some(*other) != name) {
        return Some(format!(
            "Source is locked by the VirtualMachineSnapshot {other}"
        ));
    }
    if let Some(restore) = restored_by(vm) {
        return Some(format!(
            "Source is locked by the VirtualMachineRestore {restore}"
        ));
    }
    let is_going = |vmi: &VirtualMachineInstance| vmi.metadata.deletion_timestamp.is_some();
    match observed.vmi {
        Some(vmi) if is_going(vmi) => Some("Source is stopping".to_owned()),
        Some(vmi) if vmi.status.phase == Phase::Running => {
            is_migrating(Some(vmi)).then(|| MIGRATING.to_owned())
        }
        Some(vmi) if !vmi.status.phase.is_final() => Some("Source is starting".to_owned()),
        _ => observed
            .user
            .map(|pod| format!("Source is offline, and the pod {pod} uses a claim of it")),
    }
}

/// Takes the next step of a snapshot that is being taken.
fn go_on(observed: &Observed<'_>, decision: &mut Decision) {
    decision.status.phase = SnapshotPhase::InProgress;
    decision.again = left(observed).map(|left| {
        let left = Duration::try_from(left).unwrap_or_default();
        left + Duration::from_secs(1)
    });
    let Some(vm) = observed.vm else {
        progress(observed, decision, false, "Source does not exist");
        return;
    };
    let is_locked = locked_by(vm) == observed.snapshot.metadata.name.as_deref();
    if !is_locked {
        match obstacle(observed, vm) {
            Some(why) => {
                progress(observed, decision, false, &why);
                wait(decision, PATIENCE);
            }
            None => {
                progress(observed, decision, false, "Source not locked");
                decision.actions.push(Action::Lock);
            }
        }
        return;
    }
    decision.status.source_uid = vm.metadata.uid.clone();
    progress(
        observed,
        decision,
        true,
        "Source locked and operation in progress",
    );
    let Some(content) = observed.content else {
        decision.actions.push(Action::CreateContent);
        return;
    };
    decision.status.virtual_machine_snapshot_content_name = content.metadata.name.clone();
    // One may have begun while the machine was being locked. What was begun here goes on: the
    // guest's node freezes it, whichever that is.
    let has_begun = frozen_until(content).is_some() || !observed.volumes.is_empty();
    if is_migrating(observed.vmi) && !has_begun {
        progress(observed, decision, false, MIGRATING);
        return wait(decision, PATIENCE);
    }
    indications::add(&mut decision.status, observed.vmi);
    take(observed, content, decision);
    wait(decision, PATIENCE);
}

fn wait(decision: &mut Decision, wait: Duration) {
    decision.again = Some(decision.again.map_or(wait, |again| again.min(wait)));
}

/// Has the snapshots of volumes taken.
fn take(observed: &Observed<'_>, content: &VirtualMachineSnapshotContent, decision: &mut Decision) {
    let names: Vec<&str> = volume_names(content).collect();
    let missing: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| !observed.volumes.contains_key(*name))
        .collect();
    let mut status = seen(observed, content);
    if status.creation_time.is_none() && !missing.is_empty() {
        if missing.len() == names.len() && can_freeze(observed.vmi) {
            let left = left(observed).and_then(|left| Duration::try_from(left).ok());
            let limit = left.map_or(LONGEST_FREEZE, |left| left.min(LONGEST_FREEZE));
            let limit = limit.max(Duration::from_secs(1));
            decision.actions.push(Action::Freeze(limit));
        }
        let missing = missing.into_iter().map(str::to_owned);
        decision.actions.extend(missing.map(Action::CreateVolume));
    } else if status.creation_time.is_none()
        && status
            .volume_snapshot_status
            .iter()
            .all(|volume| volume.creation_time.is_some())
    {
        if let Some(until) = frozen_until(content) {
            if is_running(observed.vmi) {
                let must_succeed = observed.now.0 < until.0;
                decision.actions.push(Action::Thaw { must_succeed });
            }
            let taken = status.volume_snapshot_status.iter();
            let mut taken = taken.filter_map(|volume| volume.creation_time.as_ref());
            if taken.any(|taken| taken.0 > until.0) {
                indications::insert(&mut decision.status, indications::QUIESCE_TIMEOUT);
            }
        }
        status.creation_time = Some(observed.now.clone());
    }
    copy(observed, content, status, decision);
}

/// Keeps up with what becomes of a snapshot that was taken.
fn follow(observed: &Observed<'_>, decision: &mut Decision) {
    unlock(observed, decision);
    match observed.content {
        Some(content) => {
            let status = seen(observed, content);
            if status.ready_to_use != Some(true) {
                wait(decision, PATIENCE);
            }
            copy(observed, content, status, decision);
        }
        None => {
            decision.status.ready_to_use = Some(false);
            let name = decision
                .status
                .virtual_machine_snapshot_content_name
                .as_deref();
            let message = format!(
                "the VirtualMachineSnapshotContent {} is gone",
                name.unwrap_or_default()
            );
            let known = decision.status.error.as_ref();
            if known.and_then(|error| error.message.as_ref()) != Some(&message) {
                decision.status.error = Some(SnapshotError {
                    time: Some(observed.now.clone()),
                    message: Some(message),
                });
            }
        }
    }
}

/// Carries the state of the contents into the snapshot's.
fn copy(
    observed: &Observed<'_>,
    content: &VirtualMachineSnapshotContent,
    status: ContentStatus,
    decision: &mut Decision,
) {
    let of = &mut decision.status;
    of.creation_time = status.creation_time.clone();
    of.ready_to_use = status.ready_to_use;
    of.error = status.error.clone();
    if of.creation_time.is_some() && of.phase == SnapshotPhase::InProgress {
        of.phase = SnapshotPhase::Succeeded;
        indications::list_volumes(of, content);
        progress(observed, decision, false, "Operation complete");
        unlock(observed, decision);
    } else if of.error.is_some() {
        progress(observed, decision, false, "In error state");
    }
    decision.content = Some(status);
}

/// Says whether the snapshot can be used.
fn finish(observed: &Observed<'_>, decision: &mut Decision) {
    let is_ready = *decision.status.ready_to_use.get_or_insert(false);
    let why = if is_ready { "Ready" } else { "Not ready" };
    condition(observed, decision, "Ready", is_ready, why);
    if is_ready && decision.status.phase == SnapshotPhase::Succeeded {
        progress(observed, decision, false, "Operation complete");
    }
}

/// The names of the snapshots of a snapshot's volumes.
pub(super) fn volume_names(content: &VirtualMachineSnapshotContent) -> impl Iterator<Item = &str> {
    let backups = content.spec.volume_backups.iter();
    backups.filter_map(|backup| backup.volume_snapshot_name.as_deref())
}

/// What the snapshots of volumes say.
fn seen(observed: &Observed<'_>, content: &VirtualMachineSnapshotContent) -> ContentStatus {
    let was = &content.status;
    let is_taken = was.creation_time.is_some();
    let (mut volumes, mut message, mut is_ready) = (Vec::new(), None, true);
    for name in volume_names(content) {
        let Some(volume) = observed.volumes.get(name) else {
            is_ready = false;
            if is_taken {
                message.get_or_insert_with(|| format!("the VolumeSnapshot {name} is missing"));
            }
            continue;
        };
        let status = &volume.status;
        is_ready &= status.ready_to_use == Some(true);
        if let Some(error) = &status.error {
            let text = error.message.as_deref().unwrap_or("it failed");
            message.get_or_insert_with(|| format!("VolumeSnapshot {name} error: {text}"));
        }
        volumes.push(VolumeSnapshotState {
            volume_snapshot_name: name.to_owned(),
            creation_time: status.creation_time.clone(),
            ready_to_use: status.ready_to_use,
            error: status.error.clone(),
        });
    }
    let error = message.filter(|_| !is_ready).map(|message| {
        let known = was.error.as_ref();
        let time = known.filter(|known| known.message.as_ref() == Some(&message));
        SnapshotError {
            time: time.map_or(Some(observed.now.clone()), |known| known.time.clone()),
            message: Some(message),
        }
    });
    ContentStatus {
        creation_time: was.creation_time.clone(),
        ready_to_use: Some(is_ready),
        error,
        volume_snapshot_status: volumes,
    }
}

fn is_running(vmi: Option<&VirtualMachineInstance>) -> bool {
    vmi.is_some_and(|vmi| vmi.status.phase == Phase::Running)
}

/// Whether the guest can be frozen.
fn can_freeze(vmi: Option<&VirtualMachineInstance>) -> bool {
    is_running(vmi)
        && vmi.is_some_and(|vmi| {
            let conditions = &vmi.status.conditions;
            is_true(conditions, "AgentConnected") && !is_true(conditions, "Paused")
        })
}

/// Until when the guest stays frozen, if it was frozen.
#[must_use]
pub(super) fn frozen_until(content: &VirtualMachineSnapshotContent) -> Option<Time> {
    let annotations = content.metadata.annotations.as_ref()?;
    annotations.get(FROZEN_UNTIL)?.parse().ok().map(Time)
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
