//! What a DataVolume's state is, and what has to be done: a pure function of what was observed.
//!
//! That a claim is filled is written on the claim first: from then on it is never written to
//! again, whatever becomes of the DataVolume's status.

mod foreign;

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::Quantity;

use super::claim::{self, Content, content, is_of_claim};
use super::pod::{self, Devices};
use crate::objects::{
    Condition, DataVolume, DataVolumePhase as Phase, DataVolumeStatus, IMPORTER, VolumeState,
    set_condition,
};
pub use foreign::Foreign;

/// How often a running importer is asked for its progress.
const ASK: Duration = Duration::from_secs(3);

/// The first wait until a pod that failed as a whole is replaced; it doubles.
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// The longest of those waits.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// How often a source is looked at that cannot be copied yet.
const LOOK: Duration = Duration::from_secs(10);

/// The longest message of a condition, in characters: an importer says what a server said.
const MESSAGE: usize = 1024;

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The DataVolume.
    pub volume: &'a DataVolume,
    /// The claim of its name, whoever made it.
    pub claim: Option<&'a PersistentVolumeClaim>,
    /// Its importer.
    pub pod: Option<&'a Pod>,
    /// What it is a copy of, if it is one.
    pub source: Option<Source<'a>>,
    /// The other side, if that is in another namespace.
    pub foreign: Option<Foreign<'a>>,
    /// Why what it names cannot be used now.
    pub unresolved: Option<&'a str>,
    /// Whether the claim's class waits until a pod with the claim has a node.
    pub waits_for_consumer: bool,
    /// The cluster's class for disks of VMs.
    pub default_class: Option<&'a str>,
    /// What the importer says of its progress, in per cent.
    pub progress: Option<f64>,
    /// The importer's image.
    pub image: &'a str,
    /// The time.
    pub now: Time,
}

/// What a DataVolume is a copy of.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The claim that is copied.
    pub claim: Option<&'a PersistentVolumeClaim>,
    /// What the DataVolume of that claim's name means, if there is one.
    pub state: Option<VolumeState>,
    /// A pod that may write to it.
    pub user: Option<&'a str>,
}

impl Source<'_> {
    /// Returns why it cannot be copied now: in a word, and for people.
    fn obstacle(&self, name: &str) -> Option<(&'static str, String)> {
        let Some(claim) = self.claim else {
            let message = format!("PersistentVolumeClaim {name} does not exist");
            return Some(("CloneWithoutSource", message));
        };
        if !is_bound(claim) || self.state.is_some_and(|state| state != VolumeState::Ready) {
            let message = format!("PersistentVolumeClaim {name} is not bound and filled yet");
            return Some(("CloneSourceNotReady", message));
        }
        let user = self.user?;
        let message = format!("pod {user} uses PersistentVolumeClaim {name}; stop it");
        Some(("CloneSourceInUse", message))
    }

    /// Returns the size of the claim.
    fn size(&self) -> Option<Quantity> {
        let requests = self.claim?.spec.as_ref()?.resources.as_ref()?;
        let size = requests.requests.as_ref()?.get("storage")?;
        Some(Quantity::new(size.0.as_str()))
    }
}

/// Something to do at the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Make the claim.
    CreateClaim(Box<PersistentVolumeClaim>),
    /// Write on the claim that it is filled.
    MarkClaim,
    /// Write these annotations on the claim: where its upload is taken.
    MarkUpload(serde_json::Value),
    /// Make the certificate of the pod that takes the claim's upload.
    CreateCredentials,
    /// Make the claim one of the DataVolume's own owners.
    ReleaseClaim,
    /// Delete the DataVolume.
    Delete,
    /// Make the importer.
    CreatePod(Box<Pod>),
    /// Add this finalizer to the DataVolume.
    HoldForCopy(&'static str),
    /// Make the pod that sends the data of a source of another namespace, and its certificate.
    CreateSource(Box<Pod>),
    /// Make that certificate, if there is none.
    CreateSourceCredentials,
    /// Delete that pod, with this unique id.
    EndSource {
        /// The unique id.
        uid: String,
    },
    /// Delete that pod, and take the finalizer off when it is gone.
    EndCopy,
    /// Delete the importer with this unique id.
    DeletePod {
        /// The unique id.
        uid: String,
    },
}

/// What is to be written and done, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: DataVolumeStatus,
    /// What follows.
    pub actions: Vec<Action>,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    // A copy that says nothing of its size is as large as its source.
    let mut sized = observed.volume.clone();
    if let Some(size) = observed.source.and_then(|source| source.size()) {
        sized.spec.default_size(&size);
    }
    let observed = &Observed {
        volume: &sized,
        ..observed.clone()
    };
    let volume = observed.volume;
    let mut decision = Decision {
        status: volume.status.clone(),
        ..Decision::default()
    };
    // What was made for it goes with it, and in another namespace before it.
    if volume.metadata.deletion_timestamp.is_some() {
        foreign::end(observed, &mut decision);
        return decision;
    }
    decision.status.claim_name = volume.metadata.name.clone().unwrap_or_default();
    match observed.claim {
        // It goes with its claim.
        None if is_of_claim(volume) => return decision,
        None => without_claim(observed, &mut decision),
        Some(claim) => match content(volume, claim) {
            Content::Foreign => {
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                let message = format!(
                    "a PersistentVolumeClaim {name} exists that is not of this DataVolume; delete \
                     it, rename one of them, or take it by the annotation \
                     cdi.kubevirt.io/allowClaimAdoption"
                );
                decision.status.phase = Phase::Pending;
                bound(&mut decision, observed, "ErrResourceExists", message);
                running(&mut decision, observed, "", "");
            }
            Content::Filled => filled(observed, claim, &mut decision),
            Content::Empty if is_lost(claim) => {
                decision.status.phase = Phase::Failed;
                let message = "the claim lost its volume; delete the DataVolume".to_owned();
                bound(&mut decision, observed, "ClaimLost", message);
                running(
                    &mut decision,
                    observed,
                    "Error",
                    "the claim lost its volume",
                );
                end_pod(observed, &mut decision);
            }
            Content::Empty => fill(observed, claim, &mut decision),
        },
    }
    if matches!(decision.status.phase, Phase::Succeeded | Phase::Failed) {
        foreign::end(observed, &mut decision);
    }
    ready(&mut decision, observed);
    decision
}

fn without_claim(observed: &Observed<'_>, decision: &mut Decision) {
    decision.status.phase = Phase::Pending;
    decision.status.progress = "N/A".to_owned();
    let volume = observed.volume;
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    if observed.foreign.is_some_and(|foreign| !foreign.is_granted) {
        let message = format!("no PersistentVolumeClaim {name} is made");
        bound(decision, observed, "NotFound", message);
        return foreign::refuse(observed, decision);
    }
    if (volume.spec.disk_size().is_none() || observed.unresolved.is_some())
        && let Some((reason, message)) = obstacle(observed)
    {
        let message = format!("the size of the claim is not known: {message}");
        bound(decision, observed, "NotFound", message.clone());
        running(decision, observed, reason, &message);
        decision.again = Some(LOOK);
        return;
    }
    // What admission would refuse today asks for a claim that nobody would fill.
    let is_known = volume.spec.restored_snapshot().is_some()
        || pod::pod(volume, Devices::default(), "", observed.image, 0).is_some();
    let made = claim::claim(volume, observed.default_class);
    let message = match made {
        Ok(claim) if is_known => {
            decision.actions.push(Action::CreateClaim(Box::new(claim)));
            format!("no PersistentVolumeClaim {name} exists yet")
        }
        Ok(_) => "spec.source is not supported; delete the DataVolume".to_owned(),
        Err(error) => format!("spec.storage or spec.pvc cannot be read: {error}"),
    };
    bound(decision, observed, "NotFound", message);
    running(decision, observed, "", "");
}

fn filled(observed: &Observed<'_>, claim: &PersistentVolumeClaim, decision: &mut Decision) {
    if observed.volume.spec.restored_snapshot().is_some() && !is_bound(claim) {
        decision.status.phase = match observed.waits_for_consumer && !is_claimed(claim) {
            true => Phase::WaitForFirstConsumer,
            false => Phase::CloneFromSnapshotSourceInProgress,
        };
        decision.status.progress = "N/A".to_owned();
        binding(observed, claim, decision);
        return running(decision, observed, "", "");
    }
    decision.status.phase = Phase::Succeeded;
    decision.status.progress = "100.0%".to_owned();
    binding(observed, claim, decision);
    running(decision, observed, "Completed", complete(observed));
    if !pod::is_retained(observed.volume) {
        end_pod(observed, decision);
    }
    let is_done = observed.volume.status.phase == Phase::Succeeded && observed.pod.is_none();
    if is_done && observed.volume.annotation("storage.deleteAfterCompletion") == Some("true") {
        decision
            .actions
            .push(match claim::owns(observed.volume, &claim.metadata) {
                true => Action::ReleaseClaim,
                false => Action::Delete,
            });
    }
}

fn end_pod(observed: &Observed<'_>, decision: &mut Decision) {
    let pod = observed.pod.map(|pod| &pod.metadata);
    let pod = pod.filter(|meta| meta.deletion_timestamp.is_none());
    if let Some(uid) = pod.and_then(|meta| meta.uid.clone()) {
        decision.actions.push(Action::DeletePod { uid });
    }
}

/// Has an empty claim filled.
fn fill(observed: &Observed<'_>, claim: &PersistentVolumeClaim, decision: &mut Decision) {
    binding(observed, claim, decision);
    if observed.foreign.is_some_and(|foreign| !foreign.is_granted) {
        return foreign::refuse(observed, decision);
    }
    let is_bound = is_bound(claim);
    let status = &mut decision.status;
    if status.progress.is_empty() || status.phase == Phase::Succeeded {
        status.progress = "N/A".to_owned();
    }
    let Some(pod) = observed.pod else {
        // A claim that goes is replaced when it is gone.
        if claim.metadata.deletion_timestamp.is_some() {
            status.phase = Phase::Pending;
            return running(decision, observed, "", "");
        }
        let binds = observed
            .volume
            .annotation("storage.bind.immediate.requested");
        let is_awaited = observed.waits_for_consumer && binds.is_none() && !is_claimed(claim);
        if !is_bound && is_awaited {
            status.phase = Phase::WaitForFirstConsumer;
            return running(decision, observed, "", "");
        }
        status.phase = scheduled(observed, is_bound);
        let restarts = status.restart_count.unwrap_or(0);
        if let Some((reason, message)) = obstacle(observed) {
            decision.again = Some(LOOK);
            return running(decision, observed, reason, &message);
        }
        let source = observed.source.and_then(|source| source.claim);
        let of = Devices {
            target: is_block(claim),
            source: source.is_some_and(is_block),
        };
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let made = pod::pod(observed.volume, of, uid, observed.image, restarts);
        let message = match made {
            Some(Ok(pod)) => {
                if pod::is_connected_to(observed.volume) {
                    decision.actions.push(Action::CreateCredentials);
                }
                decision.actions.push(Action::CreatePod(Box::new(pod)));
                String::new()
            }
            Some(Err(error)) => format!("the importer cannot be described: {error}"),
            None => "spec.source is not supported; delete the DataVolume".to_owned(),
        };
        return running(decision, observed, "", &message);
    };
    import(observed, pod, is_bound, decision);
    if observed.volume.spec.is_upload() && !decision.actions.contains(&Action::MarkClaim) {
        take_upload(observed, claim, pod, decision);
    }
    if let Some(foreign) = observed.foreign {
        foreign::send(observed, foreign, claim, pod, decision);
    }
}

/// Returns the address of a pod that takes an upload or a copy, if it is ready.
fn ready_address(pod: &Pod) -> Option<&str> {
    let is_ready = container(pod, IMPORTER).is_some_and(|container| {
        let state = container.state.as_ref();
        container.ready && state.is_some_and(|state| state.running.is_some())
    });
    let address = pod.status.as_ref()?.pod_ip.as_deref();
    address.filter(|_| is_ready && pod.metadata.deletion_timestamp.is_none())
}

/// Writes whether an upload may come: on the claim first, where the proxy looks for it.
fn take_upload(
    observed: &Observed<'_>,
    claim: &PersistentVolumeClaim,
    pod: &Pod,
    decision: &mut Decision,
) {
    let status = pod.status.as_ref();
    let address = ready_address(pod);
    let phase = status.and_then(|status| status.phase.as_deref());
    let marks = pod::upload_marks(observed.volume, phase.unwrap_or("Pending"), address);
    let annotations = claim.metadata.annotations.as_ref();
    let is_marked = marks.as_object().is_some_and(|marks| {
        marks.iter().all(|(name, value)| {
            let given = annotations.and_then(|annotations| annotations.get(name));
            given.map(String::as_str) == value.as_str()
        })
    });
    decision.status.phase = match address {
        Some(_) if is_marked => Phase::UploadReady,
        _ => scheduled(observed, is_bound(claim)),
    };
    if !is_marked {
        decision.actions.push(Action::MarkUpload(marks));
    }
}

/// Writes how far an importer is.
fn import(observed: &Observed<'_>, pod: &Pod, is_bound: bool, decision: &mut Decision) {
    let restarts = pod::restarts(pod);
    let status = &mut decision.status;
    status.restart_count = Some(restarts.max(status.restart_count.unwrap_or(0)));
    let container = container(pod, IMPORTER);
    let state = container.and_then(|container| container.state.as_ref());
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if phase == Some("Succeeded") {
        status.phase = in_progress(observed);
        decision.actions.push(Action::MarkClaim);
        return running(decision, observed, "Completed", complete(observed));
    }
    if phase == Some("Failed") {
        status.phase = in_progress(observed);
        let message = failure(pod, container);
        running(decision, observed, "Error", &message);
        let wait = remaining(pod, IMPORTER, restarts, &observed.now);
        if wait.is_zero() {
            end_pod(observed, decision);
        } else {
            decision.again = Some(wait);
        }
        return;
    }
    let has_begun = container.is_some_and(|container| container.restart_count > 0)
        || state.is_some_and(|state| state.running.is_some() || state.terminated.is_some());
    status.phase = match has_begun {
        true => in_progress(observed),
        false => scheduled(observed, is_bound),
    };
    if state.is_some_and(|state| state.running.is_some()) {
        if let Some(progress) = observed.progress.filter(|progress| progress.is_finite()) {
            status.progress = format!("{:.2}%", progress.clamp(0.0, 100.0));
        }
        decision.again = Some(ASK);
        let begins = Condition {
            reason: "Pod is running".to_owned(),
            ..Condition::yes("Running")
        };
        return set_condition(&mut decision.status.conditions, begins, &observed.now);
    }
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
    let message = waiting.and_then(|waiting| waiting.message.as_deref());
    if has_begun {
        let message = failure(pod, container);
        return running(decision, observed, "Error", &message);
    }
    match reason {
        Some("ErrImagePull" | "ImagePullBackOff") => {
            running(
                decision,
                observed,
                "ImagePullFailed",
                message.unwrap_or_default(),
            );
        }
        Some(reason) => running(decision, observed, reason, message.unwrap_or_default()),
        None => {
            let (reason, message) = unschedulable(pod).unwrap_or_default();
            running(decision, observed, &reason, &message);
        }
    }
}

fn scheduled(observed: &Observed<'_>, is_bound: bool) -> Phase {
    match (is_bound, observed.source) {
        (false, _) => Phase::Pending,
        _ if observed.volume.spec.is_upload() => Phase::UploadScheduled,
        (true, None) => Phase::ImportScheduled,
        (true, Some(_)) => Phase::CloneScheduled,
    }
}

fn in_progress(observed: &Observed<'_>) -> Phase {
    match observed.source {
        _ if observed.volume.spec.is_upload() => Phase::UploadReady,
        None => Phase::ImportInProgress,
        Some(_) => Phase::CloneInProgress,
    }
}

fn complete(observed: &Observed<'_>) -> &'static str {
    match observed.volume.spec.is_upload() {
        true => "Upload Complete",
        false => "Import Complete",
    }
}

/// Returns why the source cannot be copied now.
fn obstacle(observed: &Observed<'_>) -> Option<(&'static str, String)> {
    if let Some(why) = observed.unresolved {
        return Some(("CloneWithoutSource", why.to_owned()));
    }
    let (_, name) = observed.volume.spec.cloned_claim()?;
    observed.source?.obstacle(name)
}

fn container<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    containers.iter().find(|container| container.name == name)
}

/// Returns why the last run of an importer failed.
fn failure(pod: &Pod, container: Option<&ContainerStatus>) -> String {
    let of = |state: Option<&ContainerState>| {
        let ended = state?.terminated.as_ref()?;
        let message = ended.message.clone().filter(|message| !message.is_empty());
        message.or_else(|| Some(format!("the importer ended with code {}", ended.exit_code)))
    };
    let of_container = container.and_then(|container| {
        of(container.state.as_ref()).or_else(|| of(container.last_state.as_ref()))
    });
    let of_pod = || {
        let status = pod.status.as_ref()?;
        status.message.clone().or_else(|| status.reason.clone())
    };
    of_container
        .or_else(of_pod)
        .unwrap_or_else(|| "the importer failed".to_owned())
}

fn unschedulable(pod: &Pod) -> Option<(String, String)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions
        .iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Some((text(&found.reason), text(&found.message)))
}

/// Returns how long a pod that failed as a whole is left alone.
fn remaining(pod: &Pod, name: &str, restarts: i32, now: &Time) -> Duration {
    let doublings = u32::try_from(restarts.saturating_sub(1))
        .unwrap_or(0)
        .min(8);
    let wait = FIRST_WAIT.saturating_mul(1 << doublings).min(LONGEST_WAIT);
    let ended = container(pod, name)
        .and_then(|container| container.state.as_ref()?.terminated.as_ref())
        .and_then(|ended| ended.finished_at.as_ref());
    let since = ended.or(pod.metadata.creation_timestamp.as_ref());
    let passed = since.and_then(|since| Duration::try_from(now.0.duration_since(since.0)).ok());
    wait.saturating_sub(passed.unwrap_or(wait))
}

fn phase_of(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.status.as_ref()?.phase.as_deref()
}

fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase_of(claim) == Some("Bound")
}

fn is_lost(claim: &PersistentVolumeClaim) -> bool {
    phase_of(claim) == Some("Lost")
}

fn is_block(claim: &PersistentVolumeClaim) -> bool {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block")
}

/// Whether the scheduler has chosen a node for somebody who uses the claim.
fn is_claimed(claim: &PersistentVolumeClaim) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    annotations.is_some_and(|all| all.contains_key("volume.kubernetes.io/selected-node"))
}

/// Writes whether the claim is bound.
fn binding(observed: &Observed<'_>, claim: &PersistentVolumeClaim, decision: &mut Decision) {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    if is_bound(claim) {
        let bound = Condition {
            reason: "Bound".to_owned(),
            message: format!("PVC {name} Bound"),
            ..Condition::yes("Bound")
        };
        set_condition(&mut decision.status.conditions, bound, &observed.now);
    } else {
        bound(decision, observed, "Pending", format!("PVC {name} Pending"));
    }
}

fn bound(decision: &mut Decision, observed: &Observed<'_>, reason: &str, message: String) {
    let condition = Condition::no("Bound", reason, message);
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

fn running(decision: &mut Decision, observed: &Observed<'_>, reason: &str, message: &str) {
    let message: String = message.trim().chars().take(MESSAGE).collect();
    let condition = Condition::no("Running", reason, message);
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

fn ready(decision: &mut Decision, observed: &Observed<'_>) {
    let condition = match decision.status.phase {
        Phase::Succeeded => Condition::yes("Ready"),
        _ => Condition::no("Ready", "", ""),
    };
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
