//! Whether a virtual machine starts or stops: a pure function of what was observed.
//!
//! Every decision is made of the objects alone, so that a controller that was killed anywhere
//! continues. What must not be forgotten in between (a failed instance that is deleted, to be
//! started again) is written into the status first.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::volumes::Volumes;
use super::{live, printable};
use crate::controller::instances::{failure, was_running};
use crate::controller::machines::generation_of;
use crate::controller::snapshot::restored_by;
use crate::objects::{
    Condition, DataVolume, Phase, StartFailure, StateChangeRequest, VM_FINALIZER, VirtualMachine,
    VirtualMachineInstance, VmStatus, clear_condition, condition, set_condition,
};

/// The first wait after a failed start, in seconds; it grows with the square of their number.
const FIRST_WAIT: u32 = 10;

/// The longest wait, in seconds.
const LONGEST_WAIT: u32 = 300;

/// When a virtual machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStrategy {
    /// There is an instance, always.
    Always,
    /// An instance that failed is replaced.
    RerunOnFailure,
    /// Users start and stop it.
    Manual,
    /// There is no instance.
    Halted,
    /// There is one instance, once.
    Once,
}

impl RunStrategy {
    /// Returns the strategy of a virtual machine; `None` if it is not one of these.
    #[must_use]
    pub fn of(vm: &VirtualMachine) -> Option<Self> {
        match (vm.spec.run_strategy.as_deref(), vm.spec.running) {
            (Some("Always"), _) | (None, Some(true)) => Some(Self::Always),
            (Some("RerunOnFailure"), _) => Some(Self::RerunOnFailure),
            (Some("Manual"), _) => Some(Self::Manual),
            (Some("Halted"), _) | (None, Some(false)) => Some(Self::Halted),
            (Some("Once"), _) => Some(Self::Once),
            _ => None,
        }
    }

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::RerunOnFailure => "RerunOnFailure",
            Self::Manual => "Manual",
            Self::Halted => "Halted",
            Self::Once => "Once",
        }
    }

    /// Whether failed starts are counted, and later ones delayed.
    fn backs_off(self) -> bool {
        matches!(self, Self::Always | Self::RerunOnFailure | Self::Once)
    }
}

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The virtual machine.
    pub vm: &'a VirtualMachine,
    /// The instance of its name, whoever made it.
    pub vmi: Option<&'a VirtualMachineInstance>,
    /// The template's specification that the instance was started with, if the template was
    /// changed since.
    pub started_with: Option<&'a Value>,
    /// What may change while an instance runs does (`vmRolloutStrategy`).
    pub is_live: bool,
    /// Its DataVolumes.
    pub volumes: &'a Volumes,
    /// The time.
    pub now: Time,
    /// What a wait is longer at random, from 0 to 0.5 of it.
    pub jitter: f64,
}

/// Something to do at the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Make a DataVolume of its templates.
    CreateVolume(Box<DataVolume>),
    /// Keep the virtual machine until its instance is gone.
    AddFinalizer,
    /// Let the virtual machine go.
    RemoveFinalizer,
    /// Make an instance.
    Start {
        /// It begins paused.
        paused: bool,
    },
    /// Delete the instance with this unique id.
    Stop {
        /// The unique id.
        uid: String,
    },
    /// Make the instance nobody's.
    Orphan,
    /// A halted machine was started: from now on it runs always.
    SwitchToAlways,
    /// Change the instance's specification, by this merge patch.
    Change(Value),
}

/// What is to be written and done, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: VmStatus,
    /// What follows.
    pub actions: Vec<Action>,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let vm = observed.vm;
    let mut decision = Decision {
        status: vm.status.clone(),
        ..Decision::default()
    };
    if vm.metadata.deletion_timestamp.is_some() {
        delete(observed, &mut decision);
        return decision;
    }
    if !has_finalizer(vm, VM_FINALIZER) {
        decision.actions.push(Action::AddFinalizer);
    }
    let strategy = RunStrategy::of(vm);
    match (strategy, observed.vmi) {
        (Some(_), Some(vmi)) if !is_owned(vm, vmi) => {
            let name = vm.metadata.name.as_deref().unwrap_or_default();
            let message = format!(
                "a VirtualMachineInstance {name} exists that is not of this VirtualMachine; \
                 delete it or rename one of them"
            );
            set_failure(&mut decision, "FailedCreate", message, &observed.now);
            set_state(observed, None, &mut decision);
            return decision;
        }
        (Some(strategy), vmi) => {
            count_failures(observed, strategy, &mut decision.status);
            drop_requests(vmi, &mut decision.status.state_change_requests);
            make_volumes(observed, &mut decision);
            run(observed, strategy, &mut decision);
            match vmi.and_then(|vmi| failure(&vmi.status)) {
                Some(found) => {
                    let (reason, message) = (found.reason.clone(), found.message.clone());
                    set_failure(&mut decision, &reason, message, &observed.now);
                }
                // That an instance cannot be made is known by trying again.
                None if vmi.is_none() && wants_to_start(&decision) => {}
                None => clear_condition(&mut decision.status.conditions, "Failure"),
            }
        }
        (None, _) => {
            let message = "spec.runStrategy is none of Always, RerunOnFailure, Manual, Halted \
                           and Once";
            set_failure(
                &mut decision,
                "InvalidRunStrategy",
                message.to_owned(),
                &observed.now,
            );
        }
    }
    set_state(observed, observed.vmi, &mut decision);
    decision
}

/// Whether the machine is being restored: its disks are not its own meanwhile.
fn is_restored(vm: &VirtualMachine) -> bool {
    restored_by(vm).is_some()
}

/// DataVolumes are made whether or not the machine runs.
fn make_volumes(observed: &Observed<'_>, decision: &mut Decision) {
    if is_restored(observed.vm) {
        return;
    }
    let missing = observed.volumes.missing.iter().cloned();
    let actions = missing.map(|volume| Action::CreateVolume(Box::new(volume)));
    decision.actions.extend(actions);
}

fn wants_to_start(decision: &Decision) -> bool {
    decision
        .actions
        .iter()
        .any(|action| matches!(action, Action::Start { .. }))
}

fn has_finalizer(vm: &VirtualMachine, finalizer: &str) -> bool {
    let finalizers = vm.metadata.finalizers.as_ref();
    finalizers.is_some_and(|finalizers| finalizers.iter().any(|name| name == finalizer))
}

/// Returns whether the virtual machine made this instance.
fn is_owned(vm: &VirtualMachine, vmi: &VirtualMachineInstance) -> bool {
    let owners = vmi.metadata.owner_references.as_ref();
    owners.is_some_and(|owners| {
        owners.iter().any(|owner| {
            owner.controller == Some(true) && Some(&owner.uid) == vm.metadata.uid.as_ref()
        })
    })
}

fn delete(observed: &Observed<'_>, decision: &mut Decision) {
    let vm = observed.vm;
    let vmi = observed.vmi.filter(|vmi| is_owned(vm, vmi));
    if has_finalizer(vm, VM_FINALIZER) {
        match vmi {
            Some(_) if has_finalizer(vm, "orphan") => decision.actions.push(Action::Orphan),
            Some(vmi) => decision.actions.extend(stop(vmi)),
            None => decision.actions.push(Action::RemoveFinalizer),
        }
    }
    // Without an instance, the object is about to go: nobody would read its status.
    if vmi.is_some() {
        set_state(observed, vmi, decision);
    }
}

fn set_failure(decision: &mut Decision, reason: &str, message: String, now: &Time) {
    let failure = Condition {
        reason: reason.to_owned(),
        message,
        ..Condition::yes("Failure")
    };
    set_condition(&mut decision.status.conditions, failure, now);
}

/// Counts an instance that failed before it ran, once.
fn count_failures(observed: &Observed<'_>, strategy: RunStrategy, status: &mut VmStatus) {
    if !strategy.backs_off() {
        status.start_failure = None;
        return;
    }
    let Some(vmi) = observed.vmi else {
        return;
    };
    if vmi.status.phase == Phase::Running {
        status.start_failure = None;
    } else if vmi.status.phase == Phase::Failed && !was_running(&vmi.status) {
        let failures = status.start_failure.get_or_insert_default();
        if failures.last_failed_vmi_uid != vmi.metadata.uid {
            let count = failures.consecutive_fail_count.saturating_add(1);
            *failures = StartFailure {
                consecutive_fail_count: count,
                last_failed_vmi_uid: vmi.metadata.uid.clone(),
                retry_after_timestamp: later(&observed.now, wait(count, observed.jitter)),
            };
        }
    }
}

/// Returns the wait after so many failed starts.
fn wait(count: u32, jitter: f64) -> Duration {
    let seconds = FIRST_WAIT.saturating_mul(count.saturating_mul(count));
    let longest = f64::from(LONGEST_WAIT);
    let jitter = jitter.clamp(0.0, 0.5);
    Duration::from_secs_f64((f64::from(seconds) * (1.0 + jitter)).min(longest))
}

fn later(now: &Time, wait: Duration) -> Option<Time> {
    let wait = SignedDuration::try_from(wait).ok()?;
    now.0.checked_add(wait).ok().map(Time)
}

/// Drops requests that are done: a stop of an instance that is gone, a start while one lives.
fn drop_requests(vmi: Option<&VirtualMachineInstance>, requests: &mut Vec<StateChangeRequest>) {
    let uid = vmi.and_then(|vmi| vmi.metadata.uid.as_ref());
    requests.retain(|request| match request.action.as_str() {
        "Stop" => request.uid.is_some() && request.uid.as_ref() == uid,
        "Start" => true,
        _ => false,
    });
    let lives = vmi.is_some_and(|vmi| {
        vmi.metadata.deletion_timestamp.is_none() && !vmi.status.phase.is_final()
    });
    let stops = requests.iter().any(|request| request.action == "Stop");
    if lives && !stops {
        requests.clear();
    }
}

/// Carries out the run strategy.
fn run(observed: &Observed<'_>, strategy: RunStrategy, decision: &mut Decision) {
    let requests = &decision.status.state_change_requests;
    let start = requests.iter().find(|request| request.action == "Start");
    let stops = requests.iter().any(|request| request.action == "Stop");
    let started = start.is_some();
    let paused = start.is_some_and(|request| {
        request
            .data
            .get("paused")
            .is_some_and(|paused| paused == "true")
    });
    let is_new = decision.status.run_strategy.as_deref() != Some(strategy.name());
    if let Some(vmi) = observed.vmi {
        let phase = vmi.status.phase;
        let ended = match strategy {
            RunStrategy::Always => phase.is_final(),
            RunStrategy::RerunOnFailure => phase.is_final(),
            RunStrategy::Manual => phase.is_final() && started,
            RunStrategy::Halted => true,
            RunStrategy::Once => false,
        };
        if strategy == RunStrategy::RerunOnFailure && phase == Phase::Failed && !started {
            // Once the instance is deleted, nothing else tells that it failed.
            let requests = &mut decision.status.state_change_requests;
            requests.push(StateChangeRequest::start());
        }
        if ended || stops {
            decision.actions.extend(stop(vmi));
        }
        if strategy == RunStrategy::Halted && started {
            decision.actions.push(Action::SwitchToAlways);
        }
        decision.status.run_strategy = Some(strategy.name().to_owned());
        return;
    }
    let starts = match strategy {
        RunStrategy::Always => true,
        RunStrategy::RerunOnFailure | RunStrategy::Once => is_new || started,
        RunStrategy::Manual => started,
        RunStrategy::Halted => {
            if started {
                decision.actions.push(Action::SwitchToAlways);
            }
            false
        }
    };
    if !starts {
        decision.status.run_strategy = Some(strategy.name().to_owned());
        return;
    }
    // The strategy is recorded when there is an instance: whoever continues must see that it is
    // still to be made.
    match remaining(decision.status.start_failure.as_ref(), observed.now.0) {
        // The change that ends the wait leads to the next look.
        None if observed.volumes.block_start() || is_restored(observed.vm) => {}
        Some(wait) => decision.again = Some(wait),
        None => decision.actions.push(Action::Start { paused }),
    }
}

/// Returns how long the next start has to wait.
fn remaining(failures: Option<&StartFailure>, now: Timestamp) -> Option<Duration> {
    let due = failures?.retry_after_timestamp.as_ref()?.0;
    let wait = Duration::try_from(due.duration_since(now)).ok()?;
    (!wait.is_zero()).then_some(wait)
}

fn stop(vmi: &VirtualMachineInstance) -> Option<Action> {
    let uid = vmi.metadata.uid.clone()?;
    let is_done = vmi.metadata.deletion_timestamp.is_some();
    (!is_done).then_some(Action::Stop { uid })
}

/// Writes what a user sees of the virtual machine's state.
fn set_state(
    observed: &Observed<'_>,
    vmi: Option<&VirtualMachineInstance>,
    decision: &mut Decision,
) {
    let generation = observed.vm.metadata.generation;
    let status = &mut decision.status;
    status.created = vmi.is_some();
    let ready = vmi.and_then(|vmi| condition(&vmi.status.conditions, "Ready"));
    status.ready = ready.is_some_and(|ready| ready.status == "True");
    status.desired_generation = generation;
    status.observed_generation = vmi.and_then(generation_of).or(generation);
    let mut ready = ready.cloned().unwrap_or_else(|| match vmi {
        Some(_) => Condition::no("Ready", "GuestNotRunning", "the guest does not run"),
        None => Condition::no(
            "Ready",
            "VMINotExists",
            "the VirtualMachine has no instance",
        ),
    });
    ready.last_probe_time = None;
    set_condition(&mut status.conditions, ready, &observed.now);
    match vmi.and_then(|vmi| condition(&vmi.status.conditions, "Paused")) {
        Some(paused) => set_condition(&mut status.conditions, paused.clone(), &observed.now),
        None => clear_condition(&mut status.conditions, "Paused"),
    }
    let template = observed.vm.spec.template.as_ref();
    let template = template.map(|template| &template.spec);
    let live = vmi
        .zip(observed.started_with)
        .map(|(vmi, started)| live::compare(template, started, vmi, observed.is_live));
    let live = live.unwrap_or_default();
    let stops = |action: &Action| matches!(action, Action::Stop { .. });
    let is_to_end =
        observed.vm.metadata.deletion_timestamp.is_some() || decision.actions.iter().any(stops);
    if let Some(change) = live.patch.filter(|_| !is_to_end) {
        decision.actions.push(Action::Change(change));
    }
    let status = &mut decision.status;
    if live.needs_restart {
        let restart = Condition {
            reason: "RestartRequired".to_owned(),
            message: "the template was changed after the instance was started, in what it does \
                      not take while it runs"
                .to_owned(),
            ..Condition::yes("RestartRequired")
        };
        set_condition(&mut status.conditions, restart, &observed.now);
    } else {
        clear_condition(&mut status.conditions, "RestartRequired");
    }
    let starts = decision.again.is_some() || wants_to_start(decision);
    decision.status.printable_status = printable::status(
        observed.vm,
        vmi,
        &decision.status,
        starts,
        observed.volumes.state,
    )
    .to_owned();
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
