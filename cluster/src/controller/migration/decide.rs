//! How far a migration is, and what has to be done: a pure function of what was observed.
//!
//! The two nodes see to it that at most one copy runs. What is decided here is what the cluster
//! says of it, and the one case that neither of them can know: a source that gave the VM away and
//! heard no more (`InDoubt`) goes on only if the target itself says that it does not run it. If
//! nobody can say, the target is taken to run it: a VM may be lost that way, and is never doubled.

mod moving;

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use crate::controller::nodes::{NodeState, Seen};
use crate::controller::settings::Settings;
use crate::controller::vmi;
use crate::objects::{
    Condition, MIGRATION_FINALIZER, MigrationPhase, MigrationState, MigrationStatus,
    MigrationTransition, VirtualMachineInstance, VirtualMachineInstanceMigration, condition,
};

/// How long a target may be unschedulable, and pending for whatever reason.
const UNSCHEDULABLE: Duration = Duration::from_secs(300);
const PENDING: Duration = Duration::from_secs(900);

/// How long both nodes have to be told of each other.
const PREPARE: Duration = Duration::from_secs(300);

/// How often the nodes are asked, and how often time is looked at besides.
const POLL: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_secs(30);

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The migration.
    pub migration: &'a VirtualMachineInstanceMigration,
    /// The instance.
    pub vmi: Option<&'a VirtualMachineInstance>,
    /// The pod that the instance is in.
    pub source: Option<&'a Pod>,
    /// The pod that waits for it.
    pub target: Option<&'a Pod>,
    /// What the source's node says.
    pub at_source: Seen,
    /// What the target's node says.
    pub at_target: Seen,
    /// The pods on the target's node whose volumes the guest has, or why they are not ready.
    pub plugs: Result<Vec<String>, String>,
    /// Why a node did not do what was asked of it last, where it never will.
    pub refused: Option<String>,
    /// There is a place for it among those that run in parallel.
    pub may_begin: bool,
    /// How it is carried out, and the policy that says so.
    pub settings: &'a Settings,
    /// See there.
    pub policy: Option<&'a str>,
    /// The time.
    pub now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Make the target's pod.
    CreateTarget,
    /// Tell the target's node who comes.
    Expect,
    /// Have the target's node plug in what the guest has, and the source's node send the VM.
    Send {
        /// Unique ids of the pods that keep the volumes on the target's node.
        plugs: Vec<String>,
    },
    /// Have a node end it.
    Cancel(Side),
    /// Tell the source's node where the VM runs.
    Resolve {
        /// At the source.
        run: bool,
    },
    /// Let the migration go.
    RemoveFinalizer,
}

/// One of the two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where the VM comes from.
    Source,
    /// Where it goes to.
    Target,
}

/// What is to be written and done: first the instance's status, then the migration's, then the
/// actions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// What the instance's status has to say of the migration, if it differs.
    pub state: Option<MigrationState>,
    /// The migration's status.
    pub status: MigrationStatus,
    /// What follows.
    pub actions: Vec<Action>,
    /// When to look again, if nothing happens.
    pub wait: Option<Duration>,
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let mut look = Look {
        observed,
        decision: Decision {
            status: observed.migration.status.clone(),
            ..Decision::default()
        },
    };
    let deleting = observed.migration.metadata.deletion_timestamp.is_some();
    if !observed.migration.status.phase.is_final() {
        look.step();
    }
    let mut decision = look.decision;
    let finalizers = observed.migration.metadata.finalizers.as_ref();
    let has_finalizer =
        finalizers.is_some_and(|all| all.iter().any(|name| name == MIGRATION_FINALIZER));
    if deleting && has_finalizer && decision.status.phase.is_final() {
        decision.actions.push(Action::RemoveFinalizer);
    }
    decision
}

struct Look<'a> {
    observed: &'a Observed<'a>,
    decision: Decision,
}

impl Look<'_> {
    fn step(&mut self) {
        let Some(vmi) = self.observed.vmi else {
            return self.fail("the VMI does not exist");
        };
        if let Some(state) = self.own_state(vmi).filter(|state| !state.is_open()) {
            // It was written before this controller was killed, most likely.
            let reason = state.failed.then(|| state.failure_reason.clone());
            return self.end(reason.as_deref(), Some(state));
        }
        match self.decision.status.phase {
            MigrationPhase::Unset => {
                self.enter(MigrationPhase::Pending);
                self.pending(vmi);
            }
            MigrationPhase::Pending => self.pending(vmi),
            MigrationPhase::Scheduling => self.scheduling(vmi),
            MigrationPhase::Scheduled => self.scheduled(vmi),
            MigrationPhase::PreparingTarget => self.preparing(vmi),
            MigrationPhase::TargetReady => self.ready(vmi),
            MigrationPhase::Running => self.running(vmi),
            MigrationPhase::Succeeded | MigrationPhase::Failed | MigrationPhase::Unknown => {}
        }
    }

    fn pending(&mut self, vmi: &VirtualMachineInstance) {
        if self.is_over(vmi) {
            return;
        }
        if self.observed.target.is_some() {
            self.enter(MigrationPhase::Scheduling);
            return self.scheduling(vmi);
        }
        if vmi.status.phase != crate::objects::Phase::Running {
            // It may still start, and waits without a place.
            self.decision.wait = Some(LOOK);
            return;
        }
        let migratable = condition(&vmi.status.conditions, "LiveMigratable");
        if let Some(refusal) = migratable.filter(|found| found.status == "False") {
            let reason = format!(
                "cannot migrate VMI, Reason: {}, Message: {}",
                refusal.reason, refusal.message
            );
            return self.fail(&reason);
        }
        let other = vmi.status.migration_state.as_ref();
        if let Some(other) = other.filter(|state| state.is_open()) {
            let reason = format!("migration {} of the VMI goes on", other.migration_uid);
            return self.fail(&reason);
        }
        if self.observed.may_begin && self.observed.source.is_some() {
            self.decision.actions.push(Action::CreateTarget);
        }
        self.decision.wait = Some(LOOK);
    }

    /// Whether it ends before anything was handed over: cancelled, or the VM has ended.
    fn is_over(&mut self, vmi: &VirtualMachineInstance) -> bool {
        if self.is_deleted() {
            self.fail("canceled");
        } else if vmi.status.phase.is_final() {
            self.fail("the VMI has ended");
        } else if vmi.metadata.deletion_timestamp.is_some() {
            self.fail("the VMI is being deleted");
        } else {
            return false;
        }
        true
    }

    fn is_deleted(&self) -> bool {
        self.observed
            .migration
            .metadata
            .deletion_timestamp
            .is_some()
    }

    /// Whether the target cannot take the VM any more.
    fn is_target_lost(&mut self) -> bool {
        let Some(target) = self.observed.target else {
            self.fail("the target's pod is gone");
            return true;
        };
        let phase = target
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        if let Some(end) = vmi::terminated(target) {
            let why = end.message.as_ref().or(end.reason.as_ref());
            let why = why.map_or("", String::as_str);
            self.fail(&format!("the target's pod has ended: {why}"));
        } else if matches!(phase, Some("Failed" | "Succeeded")) {
            self.fail("the target's pod has ended");
        } else if target.metadata.deletion_timestamp.is_some() {
            self.fail("the target's pod is being deleted");
        } else {
            return false;
        }
        true
    }

    fn scheduling(&mut self, vmi: &VirtualMachineInstance) {
        if self.is_over(vmi) || self.is_target_lost() {
            return;
        }
        let Some(target) = self.observed.target else {
            return;
        };
        let runs = vmi::container(target).is_some_and(|state| state.running.is_some());
        if runs && vmi::node(target).is_some() {
            self.enter(MigrationPhase::Scheduled);
            return self.scheduled(vmi);
        }
        let since = target.metadata.creation_timestamp.as_ref();
        let limit = if vmi::node(target).is_none() {
            UNSCHEDULABLE
        } else {
            PENDING
        };
        if since.is_some_and(|since| self.is_past(since, limit)) {
            let seconds = limit.as_secs();
            return self.fail(&format!("the target's pod does not run after {seconds} s"));
        }
        self.decision.wait = Some(LOOK);
    }

    /// Writes down which two pods are meant, before anything is handed over.
    fn scheduled(&mut self, vmi: &VirtualMachineInstance) {
        if self.is_over(vmi) || self.is_target_lost() {
            return;
        }
        let pods = self.observed.source.zip(self.observed.target);
        let Some((source, target)) = pods else {
            return self.fail("the VMI has no pod");
        };
        if vmi
            .status
            .migration_state
            .as_ref()
            .is_some_and(|state| state.is_open() && Some(&state.migration_uid) != self.uid())
        {
            return self.fail("another migration of the VMI goes on");
        }
        if self.own_state(vmi).is_none() {
            let name = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
            let node = |pod: &Pod| vmi::node(pod).unwrap_or_default().to_owned();
            if node(source) == node(target) {
                return self.fail("the target's pod is on the node of the source");
            }
            self.decision.state = Some(MigrationState {
                source_node: node(source),
                target_node: node(target),
                source_pod: name(source),
                target_pod: name(target),
                mode: "PreCopy".to_owned(),
                migration_uid: self.uid().cloned().unwrap_or_default(),
                migration_configuration: Some(json!(self.observed.settings)),
                migration_policy_name: self.observed.policy.unwrap_or_default().to_owned(),
                ..MigrationState::default()
            });
        }
        self.enter(MigrationPhase::PreparingTarget);
        self.decision.wait = Some(POLL);
    }

    fn preparing(&mut self, vmi: &VirtualMachineInstance) {
        if self.own_open_state(vmi).is_none() {
            return;
        }
        if self.is_over(vmi) || self.is_refused() || self.is_target_lost() {
            return;
        }
        match &self.observed.at_target {
            Seen::Vm(report) if report.is_expected => {
                self.enter(MigrationPhase::TargetReady);
            }
            Seen::Vm(report) if report.migration.is_some() => {
                if let Some(ended) = self.ended_at_target() {
                    return self.fail(&ended);
                }
                self.decision.actions.push(Action::Expect);
            }
            _ => {}
        }
        self.wait_to_prepare();
    }

    fn ready(&mut self, vmi: &VirtualMachineInstance) {
        let Some(state) = self.own_open_state(vmi) else {
            return;
        };
        let arrives = matches!(
            self.observed.at_target.state(),
            Some(NodeState::Receiving | NodeState::HandingOver | NodeState::Done)
        );
        if arrives || self.observed.at_source.migration().is_some() {
            let mut state = state;
            state.start_timestamp = Some(self.observed.now.clone());
            self.decision.state = Some(state.clone());
            self.enter(MigrationPhase::Running);
            return self.moving(vmi, state);
        }
        let has_not_begun = self.observed.at_source.has_none()
            || self.observed.at_target.state() == Some(NodeState::Waiting);
        if !has_not_begun {
            // The source may have been told by a controller that was killed.
            self.decision.wait = Some(POLL);
            if self.is_past_preparation() {
                self.enter(MigrationPhase::Running);
            }
            return;
        }
        if self.is_over(vmi) || self.is_refused() || self.is_target_lost() {
            return;
        }
        if self.observed.at_source.has_none() {
            match &self.observed.at_target {
                Seen::Vm(report) if report.is_expected => {
                    if let Ok(plugs) = self.observed.plugs.clone() {
                        self.decision.actions.push(Action::Send { plugs });
                    }
                }
                // Its node's part was started again.
                Seen::Vm(report) if report.migration.is_some() => {
                    self.decision.actions.push(Action::Expect);
                }
                _ => {}
            }
        }
        self.wait_to_prepare();
    }

    /// Whether a node refused what it was asked, for good.
    fn is_refused(&mut self) -> bool {
        let Some(why) = &self.observed.refused else {
            return false;
        };
        self.fail(why);
        true
    }

    fn is_past_preparation(&self) -> bool {
        let entered = self.entered(MigrationPhase::PreparingTarget);
        entered.is_some_and(|since| self.is_past(&since, PREPARE))
    }

    fn wait_to_prepare(&mut self) {
        if self.is_past_preparation() {
            let why = match (&self.observed.at_source, &self.observed.at_target) {
                (_, Seen::Unreachable(why)) => format!("the target's node: {why}"),
                (Seen::Unreachable(why), _) => format!("the source's node: {why}"),
                (_, Seen::Vm(report)) if report.is_expected => match &self.observed.plugs {
                    Err(why) => why.clone(),
                    Ok(_) => "the source does not send the VM".to_owned(),
                },
                _ => "the target does not wait for the VM".to_owned(),
            };
            let seconds = PREPARE.as_secs();
            return self.fail(&format!("not begun after {seconds} s: {why}"));
        }
        self.decision.wait = Some(POLL);
    }

    fn uid(&self) -> Option<&String> {
        self.observed.migration.metadata.uid.as_ref()
    }

    /// What the instance's status says of this migration.
    fn own_state(&self, vmi: &VirtualMachineInstance) -> Option<MigrationState> {
        let state = vmi.status.migration_state.as_ref()?;
        (Some(&state.migration_uid) == self.uid()).then(|| state.clone())
    }

    /// The same; without it, the migration has failed.
    fn own_open_state(&mut self, vmi: &VirtualMachineInstance) -> Option<MigrationState> {
        let state = self.own_state(vmi);
        if state.is_none() {
            self.fail("the VMI's status is about another migration");
        }
        state
    }

    fn enter(&mut self, phase: MigrationPhase) {
        let status = &mut self.decision.status;
        status.phase = phase;
        let passed = &mut status.phase_transition_timestamps;
        if !passed.iter().any(|transition| transition.phase == phase) {
            passed.push(MigrationTransition {
                phase,
                phase_transition_timestamp: Some(self.observed.now.clone()),
            });
        }
    }

    fn entered(&self, phase: MigrationPhase) -> Option<Time> {
        let passed = &self.decision.status.phase_transition_timestamps;
        let transition = passed.iter().find(|transition| transition.phase == phase)?;
        transition.phase_transition_timestamp.clone()
    }

    fn is_past(&self, since: &Time, limit: Duration) -> bool {
        let passed = self
            .observed
            .now
            .0
            .as_second()
            .saturating_sub(since.0.as_second());
        u64::try_from(passed).is_ok_and(|passed| passed >= limit.as_secs())
    }

    /// Ends it as failed, where the VM is at the source for certain.
    fn fail(&mut self, reason: &str) {
        let state = self.observed.vmi.and_then(|vmi| self.own_state(vmi));
        self.end(Some(reason), state);
    }

    fn end(&mut self, failure: Option<&str>, state: Option<MigrationState>) {
        let mut state = state;
        if let Some(state) = &mut state
            && state.is_open()
        {
            if failure.is_some() && self.is_deleted() {
                state.abort_requested = true;
            }
            state.rest.remove(moving::DOUBT_SINCE);
            state.end(failure, &self.observed.now);
            self.decision.state = Some(state.clone());
        }
        self.decision.wait = None;
        let status = &mut self.decision.status;
        status.migration_state.clone_from(&state);
        if let Some(reason) = failure {
            let failed = Condition {
                reason: "MigrationFailed".to_owned(),
                message: reason.chars().take(1000).collect(),
                ..Condition::yes("Failed")
            };
            crate::objects::set_condition(&mut status.conditions, failed, &self.observed.now);
        }
        self.enter(match failure {
            Some(_) => MigrationPhase::Failed,
            None => MigrationPhase::Succeeded,
        });
    }
}

/// Whether the nodes have to be asked before it is decided.
#[must_use]
pub(super) fn asks_nodes(phase: MigrationPhase) -> bool {
    matches!(
        phase,
        MigrationPhase::PreparingTarget | MigrationPhase::TargetReady | MigrationPhase::Running
    )
}

/// Whether its settings are written down with the next step.
#[must_use]
pub(super) fn is_to_be_written(phase: MigrationPhase) -> bool {
    matches!(
        phase,
        MigrationPhase::Pending | MigrationPhase::Scheduling | MigrationPhase::Scheduled
    )
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
