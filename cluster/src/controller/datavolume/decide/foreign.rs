//! A copy from another namespace: what becomes of the pod that sends the data.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::{
    ASK, Action, Decision, LOOK, Observed, container, end_pod, failure, in_progress, is_block,
    obstacle, ready_address, remaining, running, unschedulable,
};
use crate::controller::datavolume::foreign::{self, FINALIZER, SENDER, Sender, is_held};
use crate::controller::datavolume::pod;
use crate::objects::{DataVolumePhase as Phase, IMPORTER};

/// A pod that has sent everything to an importer that does not end within this sends it again: the
/// importer was killed between its answer and its end.
const SENT: Duration = Duration::from_secs(30);

/// The other side of a copy from another namespace.
#[derive(Debug, Clone, Copy)]
pub struct Foreign<'a> {
    /// The source's namespace.
    pub namespace: &'a str,
    /// Whether the DataVolume may copy it.
    pub is_granted: bool,
    /// The pod that sends the data.
    pub pod: Option<&'a Pod>,
}

/// Says that there is no copy without its token.
pub(super) fn refuse(observed: &Observed<'_>, decision: &mut Decision) {
    decision.status.phase = Phase::Pending;
    decision.status.progress = "N/A".to_owned();
    let message = "the DataVolume has no valid clone token, so nobody was asked whether its source \
                   may be copied; delete it, and create it again";
    running(decision, observed, "CloneUnauthorized", message);
    end_pod(observed, decision);
    end(observed, decision);
}

/// Ends what there is in the source's namespace.
pub(super) fn end(observed: &Observed<'_>, decision: &mut Decision) {
    if is_held(observed.volume) {
        decision.actions.push(Action::EndCopy);
        decision.again = Some(ASK);
    }
}

/// Has the data sent to an importer, which `import` has told of already.
pub(super) fn send(
    observed: &Observed<'_>,
    foreign: Foreign<'_>,
    claim: &PersistentVolumeClaim,
    importer: &Pod,
    decision: &mut Decision,
) {
    let phase = importer
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return;
    }
    decision.again = Some(ASK);
    let address = ready_address(importer);
    let Some(sender) = foreign.pod else {
        if let Some(address) = address {
            begin(observed, foreign, claim, address, decision);
        } else if decision.status.phase == in_progress(observed) && has_not_failed(importer) {
            scheduled(observed, decision);
        }
        return;
    };
    let restarts = pod::restarts(sender).saturating_add(pod::restarts(importer));
    let before = decision.status.restart_count.unwrap_or(0);
    decision.status.restart_count = Some(restarts.max(before));
    if sender.metadata.deletion_timestamp.is_some() {
        return scheduled(observed, decision);
    }
    let uid = sender.metadata.uid.clone().unwrap_or_default();
    // Another importer has another address.
    if address.is_some_and(|address| !foreign::sends_to(sender, address)) {
        decision.actions.push(Action::EndSource { uid });
        return scheduled(observed, decision);
    }
    let of_sender = container(sender, SENDER);
    let state = of_sender.and_then(|container| container.state.as_ref());
    let status = sender.status.as_ref();
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Succeeded") => {
            let ended = state.and_then(|state| state.terminated.as_ref());
            let ended = ended.and_then(|ended| ended.finished_at.as_ref());
            let since = ended.map(|ended| observed.now.0.duration_since(ended.0));
            if since.is_none_or(|since| since.as_secs() >= SENT.as_secs() as i64) {
                decision.actions.push(Action::EndSource { uid });
            }
        }
        Some("Failed") => {
            let message = failure(sender, of_sender);
            running(decision, observed, "Error", &message);
            if remaining(sender, SENDER, pod::restarts(sender), &observed.now).is_zero() {
                decision.actions.push(Action::EndSource { uid });
            }
        }
        _ if state.is_some_and(|state| state.running.is_some()) => {}
        _ if of_sender.is_some_and(|container| {
            container.restart_count > 0 || state.is_some_and(|state| state.terminated.is_some())
        }) =>
        {
            let message = failure(sender, of_sender);
            running(decision, observed, "Error", &message);
        }
        _ => {
            scheduled(observed, decision);
            let waiting = state.and_then(|state| state.waiting.as_ref());
            let reason = waiting.and_then(|waiting| waiting.reason.clone());
            let message = waiting.and_then(|waiting| waiting.message.clone());
            let (reason, message) = match reason.as_deref() {
                Some("ErrImagePull" | "ImagePullBackOff") => {
                    ("ImagePullFailed".to_owned(), message.unwrap_or_default())
                }
                Some(reason) => (reason.to_owned(), message.unwrap_or_default()),
                None => unschedulable(sender).unwrap_or_default(),
            };
            running(decision, observed, &reason, &message);
            // It may wait for its Secret: the controller may have been killed before.
            decision.actions.push(Action::CreateSourceCredentials);
        }
    }
}

fn has_not_failed(importer: &Pod) -> bool {
    let container = container(importer, IMPORTER);
    let state = container.and_then(|container| container.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
}

/// Nothing is sent yet.
fn scheduled(observed: &Observed<'_>, decision: &mut Decision) {
    decision.status.phase = Phase::CloneScheduled;
    running(decision, observed, "", "");
}

/// Makes the pod that sends to an importer that is ready.
fn begin(
    observed: &Observed<'_>,
    foreign: Foreign<'_>,
    claim: &PersistentVolumeClaim,
    address: &str,
    decision: &mut Decision,
) {
    scheduled(observed, decision);
    // Somebody may use it by now.
    if let Some((reason, message)) = obstacle(observed) {
        decision.again = Some(LOOK);
        return running(decision, observed, reason, &message);
    }
    if !is_held(observed.volume) {
        return decision.actions.push(Action::HoldForCopy(FINALIZER));
    }
    let Some((_, name)) = observed.volume.spec.cloned_claim() else {
        return;
    };
    let source = observed.source.and_then(|source| source.claim);
    let made = foreign::pod(
        observed.volume,
        Sender {
            namespace: foreign.namespace,
            claim: name,
            is_block: source.is_some_and(is_block),
            target: claim.metadata.uid.as_deref().unwrap_or_default(),
            address,
            image: observed.image,
            restarts: decision.status.restart_count.unwrap_or(0),
        },
    );
    match made {
        Ok(pod) => decision.actions.push(Action::CreateSource(Box::new(pod))),
        Err(error) => {
            let message = format!("the source pod cannot be described: {error}");
            running(decision, observed, "", &message);
        }
    }
}

#[cfg(test)]
#[path = "foreign_tests.rs"]
mod tests;
