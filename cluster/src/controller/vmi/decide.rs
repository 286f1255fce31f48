//! What an instance's state is, and what has to be done: a pure function of what was observed.
//!
//! Phases are never skipped in the record, but one observation may pass several of them, so that
//! an instance costs few requests.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::vmi::VmiSpec;
use serde_json::json;

use super::decision::{Action, Decision, Observed, set_phase};
use super::filled;
use super::links;
use super::migratable::migratable;
use super::pod;
use super::pod_error::PodError;
use crate::controller::machines::revision_of;
use crate::objects::{
    Condition, Interface, MigrationState, NODE_NAME_LABEL, Phase, UNPAUSED_GATE, VMI_FINALIZER,
    VirtualMachineInstance, VmiStatus, clear_condition, is_true, set_condition,
};

/// Reasons of a waiting container that the user can do something about.
const WAITING: &[&str] = &[
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];

/// The condition of an instance whose node says that it is paused.
const PAUSED: &str = "Paused";

/// The reason with which a node reports that a VM has left it.
pub(super) const MOVED: &str = "Moved";

/// How long the other pods have, in seconds: no guest runs in them.
const GRACE_OF_OTHERS: i64 = 1;

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let Observed { vmi, pod, .. } = observed;
    let deleting = vmi.metadata.deletion_timestamp.is_some();
    let has_finalizer = vmi
        .metadata
        .finalizers
        .as_ref()
        .is_some_and(|finalizers| finalizers.iter().any(|name| name == VMI_FINALIZER));
    let mut decision = Decision {
        status: vmi.status.clone(),
        actions: Vec::new(),
    };
    if deleting && pod.is_none() {
        if has_finalizer && observed.others.is_empty() {
            decision.actions.push(Action::RemoveFinalizer);
        }
        decision.actions.extend(deletions_of_others(observed));
        return decision;
    }
    let spec = pod::specification(vmi);
    end_orphaned_migration(&mut decision.status, observed);
    set_phases(&mut decision.status, *pod, &observed.now);
    set_facts(&mut decision.status, observed, spec.as_ref().ok());
    set_conditions(&mut decision.status, *pod, &observed.now);
    set_migratable(&mut decision.status, observed, spec.as_ref().ok());
    let phase = decision.status.phase;
    if !has_finalizer && !deleting {
        decision.actions.push(Action::AddFinalizer);
    }
    match pod {
        None if phase == Phase::Pending && !filled::are_all(observed, &mut decision) => {}
        None if phase == Phase::Pending => match pod::pod(vmi, &|name| observed.mode(name)) {
            Ok(pod) => decision.actions.push(Action::CreatePod(Box::new(pod))),
            Err(error) => set_failure(&mut decision.status, &error, &observed.now),
        },
        None => {}
        Some(pod) => {
            clear_failure_of_creation(&mut decision.status, pod, &observed.now);
            if let Some(node) = node_label(vmi, pod) {
                decision.actions.push(Action::SetNodeLabel(node));
            }
            decision.actions.extend(gate(&decision.status, pod));
            if deleting {
                let grace = spec.as_ref().map_or(0, pod::grace);
                decision.actions.extend(deletion(pod, grace));
            }
        }
    }
    decision.actions.extend(deletions_of_others(observed));
    decision
}

/// Ends the pods that nothing needs any more.
fn deletions_of_others(observed: &Observed<'_>) -> Vec<Action> {
    let deleting = observed.vmi.metadata.deletion_timestamp.is_some();
    let unwanted = observed
        .others
        .iter()
        .filter(|other| deleting || !other.is_wanted);
    unwanted
        .filter_map(|other| deletion(&other.pod, GRACE_OF_OTHERS))
        .collect()
}

/// A migration that somebody removed by force ends as the source's pod says.
fn end_orphaned_migration(status: &mut VmiStatus, observed: &Observed<'_>) {
    let Some(state) = status.migration_state.as_mut() else {
        return;
    };
    if state.is_open() && !observed.is_migration_known {
        let moved = observed.pod.is_some_and(has_moved);
        let failure = (!moved).then_some("the migration was removed before it ended");
        state.end(failure, &observed.now);
    }
}

/// Whether a pod's VM runs elsewhere.
fn has_moved(pod: &Pod) -> bool {
    terminated(pod).is_some_and(|end| end.exit_code == 0 && end.reason.as_deref() == Some(MOVED))
}

/// Records that the pod cannot be made.
pub(super) fn set_failure(status: &mut VmiStatus, error: &PodError, now: &Time) {
    let failure = Condition::no("Synchronized", error.reason(), error.to_string());
    set_condition(&mut status.conditions, failure, now);
}

fn set_phases(status: &mut VmiStatus, pod: Option<&Pod>, now: &Time) {
    let open = status
        .migration_state
        .as_ref()
        .is_some_and(MigrationState::is_open);
    // Where the VM is then says the migration's end.
    if open && status.phase == Phase::Running && pod.is_none_or(has_moved) {
        return;
    }
    // The pod that it is in is another one by now: the next look is at that.
    let state = status.migration_state.as_ref();
    if state.is_some_and(|state| !state.pod().is_empty())
        && pod.is_some_and(|pod| pod.metadata.name.as_deref() != state.map(MigrationState::pod))
    {
        return;
    }
    loop {
        let next = next_phase(status.phase, pod);
        if next == status.phase {
            return;
        }
        set_phase(status, next, now);
        if next == Phase::Failed {
            status.reason = match pod {
                Some(pod) => reason_of_failure(pod),
                None => "PodDeleted".to_owned(),
            };
        }
    }
}

/// Returns the phase that follows at once, or the same.
fn next_phase(phase: Phase, pod: Option<&Pod>) -> Phase {
    let Some(pod) = pod else {
        return match phase {
            Phase::Unset => Phase::Pending,
            Phase::Scheduling | Phase::Scheduled | Phase::Running => Phase::Failed,
            other => other,
        };
    };
    let vm = vm_state(pod);
    match phase {
        Phase::Unset => Phase::Pending,
        Phase::Pending => Phase::Scheduling,
        Phase::Scheduling => match vm {
            // A pod may end before its VM has begun.
            VmState::Failed => Phase::Failed,
            VmState::Waiting { sandbox: false } => Phase::Scheduling,
            _ => Phase::Scheduled,
        },
        Phase::Scheduled => match vm {
            VmState::Failed => Phase::Failed,
            VmState::Waiting { .. } => Phase::Scheduled,
            VmState::Running | VmState::Succeeded => Phase::Running,
        },
        Phase::Running => match vm {
            VmState::Failed => Phase::Failed,
            VmState::Succeeded => Phase::Succeeded,
            _ => Phase::Running,
        },
        other => other,
    }
}

/// What the pod's container says of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VmState {
    /// It has not begun; `sandbox`: its process exists on a node.
    Waiting {
        sandbox: bool,
    },
    Running,
    Succeeded,
    Failed,
}

pub(in crate::controller) fn container(pod: &Pod) -> Option<&ContainerState> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses
        .iter()
        .find(|status| status.name == pod::CONTAINER)?
        .state
        .as_ref()
}

pub(in crate::controller) fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    container(pod)?.terminated.as_ref()
}

fn pod_condition<'a>(
    pod: &'a Pod,
    kind: &str,
) -> Option<&'a k8s_openapi::api::core::v1::PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

fn vm_state(pod: &Pod) -> VmState {
    if let Some(terminated) = terminated(pod) {
        // It left, and nobody knows where to.
        return if terminated.exit_code == 0 && !has_moved(pod) {
            VmState::Succeeded
        } else {
            VmState::Failed
        };
    }
    let status = pod.status.as_ref();
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Succeeded") => return VmState::Succeeded,
        Some("Failed") => return VmState::Failed,
        _ => {}
    }
    if container(pod).is_some_and(|state| state.running.is_some()) {
        return VmState::Running;
    }
    let sandbox = pod_condition(pod, "PodReadyToStartContainers")
        .is_some_and(|condition| condition.status == "True");
    VmState::Waiting { sandbox }
}

fn reason_of_failure(pod: &Pod) -> String {
    let of_container = terminated(pod).and_then(|terminated| terminated.reason.clone());
    let of_pod = pod.status.as_ref().and_then(|status| status.reason.clone());
    of_container
        .or(of_pod)
        .unwrap_or_else(|| "PodFailed".to_owned())
}

pub(in crate::controller) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn node_label(vmi: &VirtualMachineInstance, pod: &Pod) -> Option<String> {
    let node = node(pod)?;
    let labels = vmi.metadata.labels.as_ref();
    let written = labels.and_then(|labels| labels.get(NODE_NAME_LABEL));
    (written.map(String::as_str) != Some(node)).then(|| node.to_owned())
}

/// Writes what the pod says of the instance.
fn set_facts(status: &mut VmiStatus, observed: &Observed<'_>, spec: Option<&VmiSpec>) {
    let Observed { vmi, pod, .. } = observed;
    if let Some(revision) = revision_of(vmi) {
        status.virtual_machine_revision_name = revision;
    }
    if let Some(spec) = spec {
        set_machine(status, spec);
    }
    let wanted = observed.others.iter().filter(|other| other.is_wanted);
    let pods = pod.iter().copied().chain(wanted.map(|other| &*other.pod));
    status.active_pods = pods
        .filter_map(|pod| Some((pod.metadata.uid.clone()?, node(pod)?.to_owned())))
        .collect();
    let Some((pod, node)) = pod.and_then(|pod| Some((pod, node(pod)?))) else {
        return;
    };
    node.clone_into(&mut status.node_name);
    if status.evacuation_node_name != node {
        // It has left, or never was there.
        status.evacuation_node_name.clear();
    }
    let Some(of_pod) = &pod.status else {
        return;
    };
    if let Some(class) = &of_pod.qos_class {
        status.qos_class.clone_from(class);
    }
    let addresses: Vec<String> = of_pod
        .pod_ips
        .iter()
        .flatten()
        .map(|address| address.ip.clone())
        .collect();
    if !addresses.is_empty() {
        let name = interface_name(spec);
        let cards = spec.map(|spec| &spec.domain.devices.interfaces);
        let card = cards.and_then(|cards| cards.iter().find(|card| card.name == name));
        let is_masqueraded = card.is_some_and(|card| card.masquerade.is_some());
        set_addresses(status, name, addresses, is_masqueraded);
    }
}

/// Writes what the machine has, once: what was plugged in later is the node's to tell.
fn set_machine(status: &mut VmiStatus, spec: &VmiSpec) {
    let domain = &spec.domain;
    let cpu = domain.cpu.as_ref();
    let count = |of: Option<i64>| of.unwrap_or(1);
    let topology = json!({
        "cores": count(cpu.and_then(|cpu| cpu.cores)),
        "sockets": count(cpu.and_then(|cpu| cpu.sockets)),
        "threads": count(cpu.and_then(|cpu| cpu.threads)),
    });
    let fixed = spec
        .volumes
        .iter()
        .filter(|volume| !volume.is_hotpluggable());
    let volumes = fixed.map(|volume| {
        let claim = volume
            .persistent_volume_claim
            .as_ref()
            .map(|claim| &claim.claim_name)
            .or(volume.data_volume.as_ref().map(|data| &data.name));
        match claim {
            Some(claim) => json!({
                "name": volume.name,
                "target": "",
                "persistentVolumeClaimInfo": {"claimName": claim},
            }),
            None => json!({"name": volume.name, "target": ""}),
        }
    });
    let mut facts = vec![
        ("currentCPUTopology", topology),
        ("volumeStatus", volumes.collect()),
    ];
    if let Some(guest) = pod::guest_memory(spec) {
        let memory = json!({
            "guestAtBoot": guest.as_str(),
            "guestCurrent": guest.as_str(),
            "guestRequested": guest.as_str(),
        });
        facts.push(("memory", memory));
    }
    for (name, value) in facts {
        status.rest.entry(name).or_insert(value);
    }
    links::set_at_boot(status, spec);
}

/// Returns the card on the pod's network.
fn interface_name(spec: Option<&VmiSpec>) -> String {
    let network = spec.and_then(|spec| {
        spec.networks
            .iter()
            .find(|network| network.pod.is_some())
            .or(spec.networks.first())
    });
    network.map_or_else(|| "default".to_owned(), |network| network.name.clone())
}

fn set_addresses(
    status: &mut VmiStatus,
    name: String,
    addresses: Vec<String>,
    is_masqueraded: bool,
) {
    let interface = match status
        .interfaces
        .iter_mut()
        .position(|interface| interface.name == name)
    {
        Some(index) => &mut status.interfaces[index],
        None => {
            status.interfaces.push(Interface {
                name,
                ..Interface::default()
            });
            let last = status.interfaces.len() - 1;
            &mut status.interfaces[last]
        }
    };
    // What the guest's agent says is closer to the truth than the pod: its node reports it, but
    // for a card whose addresses nobody reaches.
    let source = interface.rest.get("infoSource");
    let source = source
        .and_then(serde_json::Value::as_str)
        .unwrap_or_default();
    let is_reported = source.contains("guest-agent") && !interface.ip_addresses.is_empty();
    if is_reported && !is_masqueraded {
        return;
    }
    interface.ip_address = addresses.first().cloned().unwrap_or_default();
    interface.ip_addresses = addresses;
}

fn set_conditions(status: &mut VmiStatus, pod: Option<&Pod>, now: &Time) {
    let ready = ready(status, pod);
    set_condition(&mut status.conditions, ready, now);
    let unschedulable = pod
        .and_then(|pod| pod_condition(pod, "PodScheduled"))
        .filter(|condition| condition.reason.as_deref() == Some("Unschedulable"));
    match unschedulable {
        Some(found) => {
            let message = found.message.clone().unwrap_or_default();
            let copy = Condition::no("PodScheduled", "Unschedulable", message);
            set_condition(&mut status.conditions, copy, now);
        }
        None => clear_condition(&mut status.conditions, "PodScheduled"),
    }
}

fn set_migratable(status: &mut VmiStatus, observed: &Observed<'_>, spec: Option<&VmiSpec>) {
    let Some(spec) = spec else {
        return;
    };
    let annotations = observed.vmi.metadata.annotations.as_ref();
    let has = |name: &str| annotations.is_some_and(|all| all.contains_key(name));
    let condition = match migratable(spec, &has, observed.claim) {
        Ok(method) => {
            method.word().clone_into(&mut status.migration_method);
            Condition::yes("LiveMigratable")
        }
        Err(obstacle) => {
            status.migration_method.clear();
            Condition::no("LiveMigratable", obstacle.reason, obstacle.message)
        }
    };
    set_condition(&mut status.conditions, condition, &observed.now);
}

/// Returns how the pod's readiness gate has to change.
fn gate(status: &VmiStatus, pod: &Pod) -> Option<Action> {
    let is_final = matches!(status.phase, Phase::Succeeded | Phase::Failed);
    if is_final || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let is_paused = is_true(&status.conditions, PAUSED);
    let wanted = if is_paused { "False" } else { "True" };
    let written = pod_condition(pod, UNPAUSED_GATE).map(|found| found.status.as_str());
    (written != Some(wanted)).then(|| Action::SetGate {
        pod: pod.metadata.name.clone().unwrap_or_default(),
        is_paused,
    })
}

fn ready(status: &VmiStatus, pod: Option<&Pod>) -> Condition {
    let no = |reason: &str, message: &str| Condition::no("Ready", reason, message);
    let Some(pod) = pod else {
        return no("PodNotExists", "the VM has no pod");
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return no("PodTerminating", "the VM's pod is being deleted");
    }
    if status.phase != Phase::Running {
        return no("GuestNotRunning", "the guest does not run");
    }
    // The pod says so as well, a little later.
    if is_true(&status.conditions, PAUSED) {
        return no("GuestNotRunning", "the guest is paused");
    }
    match pod_condition(pod, "Ready") {
        Some(ready) if ready.status == "True" => Condition::yes("Ready"),
        Some(ready) => no(
            ready.reason.as_deref().unwrap_or("PodNotReady"),
            ready.message.as_deref().unwrap_or_default(),
        ),
        None => no(
            "PodConditionMissing",
            "the VM's pod does not say whether it is ready",
        ),
    }
}

/// The pod exists: what remains to be told is why its container waits.
fn clear_failure_of_creation(status: &mut VmiStatus, pod: &Pod, now: &Time) {
    let waiting = container(pod)
        .and_then(|state| state.waiting.as_ref())
        .filter(|waiting| {
            let reason = waiting.reason.as_deref().unwrap_or_default();
            WAITING.contains(&reason)
        });
    match waiting {
        Some(waiting) => {
            let reason = waiting.reason.as_deref().unwrap_or_default();
            let message = waiting.message.clone().unwrap_or_default();
            let failure = Condition::no("Synchronized", reason, message);
            set_condition(&mut status.conditions, failure, now);
        }
        None => clear_condition(&mut status.conditions, "Synchronized"),
    }
}

/// Returns how to end a pod, unless that is done.
fn deletion(pod: &Pod, grace: i64) -> Option<Action> {
    let meta = &pod.metadata;
    let given = meta.deletion_grace_period_seconds.unwrap_or(i64::MAX);
    // A user may lose patience, and shorten the time.
    if meta.deletion_timestamp.is_some() && given <= grace {
        return None;
    }
    Some(Action::DeletePod {
        name: meta.name.clone()?,
        uid: meta.uid.clone()?,
        grace,
    })
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
