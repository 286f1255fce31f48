//! What has to be done so that a VM has the CPUs and the memory of its instance's specification: a
//! pure function of what was observed.
//!
//! The pod comes first, so that the scheduler counts what the VM gets: the API server takes larger
//! requests into the pod, and the kubelet allocates them or says why it does not. Then the node
//! plugs in what the machine was made for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as PodQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::vmi::{CpuTopology, VmiSpec};
use serde_json::{Value, json};

use crate::contact::size::ResizeRequest;
use crate::controller::vmi::pod::{self, CONTAINER};
use crate::controller::vmi::pod_error::PodError;
use crate::objects::{
    Condition, VMI_ANNOTATION, VmiStatus, clear_condition, condition, set_condition,
};

/// The condition of an instance whose VM is to have more CPUs.
pub(super) const CPUS: &str = "HotVCPUChange";

/// The condition of an instance whose VM is to have more memory.
pub(super) const MEMORY: &str = "HotMemoryChange";

/// What a VM is to have more than it has.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Change {
    /// The topology, if there are to be more CPUs.
    pub(super) topology: Option<CpuTopology>,
    /// The memory, if there is to be more.
    pub(super) guest: Option<Quantity>,
}

impl Change {
    /// Returns what the specification has more than the status; `None` if there is nothing. What it
    /// has less stays: nothing is taken from a guest.
    pub(super) fn of(spec: &VmiSpec, status: &VmiStatus) -> Option<Self> {
        let cpu = spec.domain.cpu.clone().unwrap_or_default();
        let known = status.rest.get("currentCPUTopology").cloned();
        let has: Option<CpuTopology> = known.and_then(|known| serde_json::from_value(known).ok());
        let topology = has
            .is_some_and(|has| vcpus(&cpu.topology()) > vcpus(&has))
            .then(|| cpu.topology());
        let has = status.rest.get("memory").and_then(|memory| {
            let text = memory.get("guestCurrent")?.as_str()?;
            Quantity::new(text).bytes()
        });
        let wanted = pod::guest_memory(spec).cloned();
        let guest = wanted.filter(|wanted| wanted.bytes() > has && has.is_some());
        (topology.is_some() || guest.is_some()).then_some(Self { topology, guest })
    }

    /// What is asked of the node.
    pub(super) fn request(&self) -> ResizeRequest {
        ResizeRequest {
            vcpus: self.topology.as_ref().map_or(0, |topology| {
                u32::try_from(vcpus(topology)).unwrap_or(u32::MAX)
            }),
            memory: self.guest.as_ref().and_then(Quantity::bytes).unwrap_or(0),
        }
    }

    /// Writes that it is under way, or why not.
    pub(super) fn report(&self, status: &mut VmiStatus, state: &State, now: &Time) {
        let kinds = [
            (CPUS, self.topology.is_some()),
            (MEMORY, self.guest.is_some()),
        ];
        for (kind, _) in kinds.into_iter().filter(|(_, is_changed)| *is_changed) {
            let mut condition = match state {
                State::Waits { .. } => Condition::yes(kind),
                State::Failed { .. } => Condition::no(kind, "", ""),
            };
            let (State::Waits { reason, message } | State::Failed { reason, message }) = state;
            (*reason).clone_into(&mut condition.reason);
            condition.message.clone_from(message);
            set_condition(&mut status.conditions, condition, now);
        }
        if let (Some(guest), Some(memory)) = (&self.guest, status.rest.get_mut("memory")) {
            memory["guestRequested"] = json!(guest.as_str());
        }
    }

    /// Writes what the VM has, of which the guest uses so many bytes; returns whether that is all
    /// of it.
    pub(super) fn done(&self, status: &mut VmiStatus, memory: u64, now: &Time) -> bool {
        if let Some(topology) = &self.topology {
            let CpuTopology {
                cores,
                sockets,
                threads,
            } = topology;
            let topology = json!({"cores": cores, "sockets": sockets, "threads": threads});
            status
                .rest
                .insert("currentCPUTopology".to_owned(), topology);
            clear_condition(&mut status.conditions, CPUS);
        }
        let Some(guest) = &self.guest else {
            return true;
        };
        let is_all = guest.bytes().is_none_or(|wanted| memory >= wanted);
        let current = match is_all {
            true => guest.as_str().to_owned(),
            false => memory.to_string(),
        };
        if let Some(known) = status.rest.get_mut("memory") {
            known["guestRequested"] = json!(guest.as_str());
            known["guestCurrent"] = json!(current);
        }
        if is_all {
            clear_condition(&mut status.conditions, MEMORY);
        } else {
            let mut waits = Condition::yes(MEMORY);
            waits.reason = "GuestNotUsingMemory".to_owned();
            waits.message = format!(
                "the guest uses {memory} bytes so far: it needs the driver virtio_mem, and brings \
                 memory online"
            );
            set_condition(&mut status.conditions, waits, now);
        }
        is_all
    }
}

/// How far a change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// It is under way.
    Waits {
        /// What for, in a word.
        reason: &'static str,
        /// In a sentence.
        message: String,
    },
    /// It is tried again, and the user may have to do something.
    Failed {
        /// Why, in a word.
        reason: &'static str,
        /// In a sentence.
        message: String,
    },
}

/// Forgets changes that are not wanted any more; returns whether there were any.
pub(super) fn forget(status: &mut VmiStatus) -> bool {
    let has = |kind| condition(&status.conditions, kind).is_some();
    let had = has(CPUS) || has(MEMORY);
    clear_condition(&mut status.conditions, CPUS);
    clear_condition(&mut status.conditions, MEMORY);
    had
}

/// What comes next for a change.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// The pod gets these resources.
    ResizePod(Value),
    /// The kubelet has to do something.
    Wait(State),
    /// The node plugs it in.
    Ask,
}

/// Decides.
///
/// # Errors
/// The specification cannot be read.
pub(super) fn decide(spec: &VmiSpec, pod: &Pod) -> Result<Step, PodError> {
    let wanted = pod::resources_of(spec)?;
    let of_pod = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut of_pod = of_pod.filter(|container| container.name == CONTAINER);
    let has = of_pod
        .next()
        .and_then(|container| container.resources.clone());
    if !has.is_some_and(|has| is_enough(&has, &wanted)) {
        return Ok(Step::ResizePod(wanted));
    }
    if made_with(pod).is_some_and(|made| is_enough(&made, &wanted)) {
        // Nothing of it is new to the kubelet.
        return Ok(Step::Ask);
    }
    let conditions = pod.status.iter().flat_map(|status| &status.conditions);
    let pending = conditions
        .flatten()
        .find(|one| one.type_ == "PodResizePending" && one.status == "True");
    if let Some(pending) = pending {
        return Ok(Step::Wait(refused(pending)));
    }
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| &status.container_statuses);
    let mut statuses = statuses.flatten().filter(|one| one.name == CONTAINER);
    match statuses
        .next()
        .is_some_and(|one| is_allocated(one, &wanted))
    {
        true => Ok(Step::Ask),
        false => Ok(Step::Wait(State::Waits {
            reason: "PodResizeInProgress",
            message: "the node allocates what the pod asks for".to_owned(),
        })),
    }
}

/// Returns the resources that a pod was made with.
fn made_with(pod: &Pod) -> Option<ResourceRequirements> {
    let text = pod.metadata.annotations.as_ref()?.get(VMI_ANNOTATION)?;
    let mut made: Value = serde_json::from_str(text).ok()?;
    let spec: VmiSpec = serde_json::from_value(made["spec"].take()).ok()?;
    serde_json::from_value(pod::resources_of(&spec).ok()?).ok()
}

fn is_enough(has: &ResourceRequirements, wanted: &Value) -> bool {
    covers(has.requests.as_ref(), &wanted["requests"])
        && covers(has.limits.as_ref(), &wanted["limits"])
}

/// Why a kubelet does not allocate more.
fn refused(pending: &PodCondition) -> State {
    let message = pending.message.clone().unwrap_or_default();
    match pending.reason.as_deref() {
        Some("Deferred") => State::Waits {
            reason: "PodResizeDeferred",
            message: format!("the node has no room at the moment: {message}"),
        },
        _ => State::Failed {
            reason: "PodResizeInfeasible",
            message: format!(
                "the node has no room for it, migrate the VM or restart it: {message}"
            ),
        },
    }
}

/// Whether a kubelet has given a container what it is to have.
fn is_allocated(status: &ContainerStatus, wanted: &Value) -> bool {
    // A limit of memory holds when the container's control group has it.
    let actual = status.resources.clone().unwrap_or_default();
    covers(status.allocated_resources.as_ref(), &wanted["requests"])
        && covers(actual.limits.as_ref(), &wanted["limits"])
}

/// Whether resources of a pod are at least these, as far as they can change while it runs.
fn covers(has: Option<&BTreeMap<String, PodQuantity>>, wanted: &Value) -> bool {
    ["cpu", "memory"].into_iter().all(|name| {
        let Some(wanted) = wanted[name].as_str() else {
            return true;
        };
        let has = has.and_then(|has| has.get(name));
        let has = has.and_then(|has| Quantity::new(&*has.0).amount().ok());
        match (has, Quantity::new(wanted).amount()) {
            (Some(has), Ok(wanted)) => has >= wanted,
            (None, _) => false,
            // What nobody can read is as it was.
            (Some(_), Err(_)) => true,
        }
    })
}

fn vcpus(topology: &CpuTopology) -> i64 {
    let CpuTopology {
        cores,
        sockets,
        threads,
    } = topology;
    [cores, sockets, threads]
        .into_iter()
        .map(|count| count.unwrap_or(1).max(1))
        .fold(1, i64::saturating_mul)
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
