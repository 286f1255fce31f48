//! A VM that is being sent, and one of which a node does not know where it runs.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::{Action, Look, POLL, Side};
use crate::controller::nodes::NodeState;
use crate::controller::vmi;
use crate::objects::{MigrationState, VirtualMachineInstance};

/// How long a target that says nothing is asked before it is taken to run the VM; and one that
/// answers, and will not know more.
const DOUBT: Duration = Duration::from_secs(600);
const DOUBT_KNOWN: Duration = Duration::from_secs(60);

/// How much longer than its time a migration may take before it is cancelled from here: the node
/// ends it by itself.
const MARGIN: Duration = Duration::from_secs(60);

/// Since when the target of a VM in doubt says nothing.
pub(super) const DOUBT_SINCE: &str = "inDoubtSince";

impl Look<'_> {
    pub(super) fn running(&mut self, vmi: &VirtualMachineInstance) {
        if let Some(state) = self.own_open_state(vmi) {
            self.moving(vmi, state);
        }
    }

    pub(super) fn moving(&mut self, vmi: &VirtualMachineInstance, mut state: MigrationState) {
        self.decision.wait = Some(POLL);
        let (source, target) = (&self.observed.at_source, &self.observed.at_target);
        if [source, target]
            .iter()
            .any(|seen| seen.state() == Some(NodeState::Done))
        {
            if source.state() == Some(NodeState::InDoubt) {
                self.decision.actions.push(Action::Resolve { run: false });
            }
            return self.end(None, Some(state));
        }
        match source.state() {
            Some(NodeState::Failed | NodeState::Cancelled) => {
                let why = self.ended_at_source();
                return self.end(Some(&why), Some(state));
            }
            Some(NodeState::InDoubt) => return self.in_doubt(state),
            None | Some(NodeState::Unknown) if self.is_source_lost(vmi) => {
                return self.without_source(state);
            }
            _ => {}
        }
        let late = state.start_timestamp.as_ref().is_some_and(|since| {
            let timeout = self
                .observed
                .settings
                .completion_timeout(vmi::guest_memory_of(vmi).as_ref());
            self.is_past(since, Duration::from_secs(timeout).saturating_add(MARGIN))
        });
        let ends = self.is_deleted() || vmi.metadata.deletion_timestamp.is_some();
        if ends && !state.abort_requested {
            state.abort_requested = true;
            state.abort_status = "Aborting".to_owned();
            self.decision.state = Some(state);
        }
        if ends || late {
            self.decision.actions.push(Action::Cancel(Side::Source));
        }
    }

    /// Whether nothing can be heard of the source any more.
    fn is_source_lost(&self, vmi: &VirtualMachineInstance) -> bool {
        let ended = vmi.status.phase.is_final();
        let gone = self
            .observed
            .source
            .is_none_or(|pod| vmi::terminated(pod).is_some());
        ended || gone || self.observed.at_source.has_none()
    }

    /// The source gave the VM away and heard no more: the target says what became of it.
    fn in_doubt(&mut self, state: MigrationState) {
        match self.observed.at_target.state() {
            Some(NodeState::Failed | NodeState::Cancelled) => {
                // The source says that it failed once it goes on.
                self.decision.actions.push(Action::Resolve { run: true });
            }
            Some(
                NodeState::Waiting
                | NodeState::Receiving
                | NodeState::HandingOver
                | NodeState::Sending
                | NodeState::InDoubt,
            ) => {
                // It may not have begun; if it has, it refuses.
                self.decision.actions.push(Action::Cancel(Side::Target));
            }
            Some(NodeState::Done | NodeState::Unknown) | None => {
                if self.is_doubt_over(&state) {
                    self.decision.actions.push(Action::Resolve { run: false });
                    self.end(None, Some(state));
                } else {
                    self.doubt(state);
                }
            }
        }
    }

    /// The source's pod is gone, or knows nothing of it.
    fn without_source(&mut self, state: MigrationState) {
        match self.observed.at_target.state() {
            Some(NodeState::Failed | NodeState::Cancelled) => {
                let why = self.ended_at_target().unwrap_or_default();
                self.end(Some(&why), Some(state));
            }
            Some(NodeState::Waiting | NodeState::Receiving | NodeState::HandingOver) => {
                self.decision.actions.push(Action::Cancel(Side::Target));
            }
            _ if self.observed.at_target.has_none() && self.observed.at_source.has_none() => {
                // Neither has it: whatever the VM does, it does at the source.
                self.end(Some("both nodes have forgotten it"), Some(state));
            }
            _ if self.is_doubt_over(&state) => self.end(None, Some(state)),
            _ => self.doubt(state),
        }
    }

    /// Remembers since when the target says nothing.
    fn doubt(&mut self, mut state: MigrationState) {
        let since = json!(self.observed.now);
        if !state.rest.contains_key(DOUBT_SINCE) {
            state.rest.insert(DOUBT_SINCE.to_owned(), since);
            self.decision.state = Some(state);
        }
    }

    fn is_doubt_over(&self, state: &MigrationState) -> bool {
        let since = state.rest.get(DOUBT_SINCE);
        let since = since.and_then(|since| serde_json::from_value::<Time>(since.clone()).ok());
        let target = &self.observed.at_target;
        let limit = if target.has_none() || target.state() == Some(NodeState::Unknown) {
            DOUBT_KNOWN
        } else {
            DOUBT
        };
        since.is_some_and(|since| self.is_past(&since, limit))
    }

    fn ended_at_source(&self) -> String {
        let report = self.observed.at_source.migration();
        let cancelled = report.is_some_and(|report| report.state == NodeState::Cancelled);
        match report.map(|report| report.reason.as_str()) {
            Some("") | None if cancelled => "canceled".to_owned(),
            Some("") | None => "the source's node gives no reason".to_owned(),
            Some(reason) => reason.to_owned(),
        }
    }

    pub(super) fn ended_at_target(&self) -> Option<String> {
        let report = self.observed.at_target.migration()?;
        let ended = matches!(report.state, NodeState::Failed | NodeState::Cancelled);
        ended.then(|| format!("the target does not wait any more: {}", report.reason))
    }
}
