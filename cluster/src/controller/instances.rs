//! What instances say of themselves and of their pods.

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use crate::objects::{
    COMPONENT_LABEL, Condition, HOTPLUG, Phase, VirtualMachineInstance, VmiStatus, condition,
};

/// The runtime class whose handler runs a pod's container as an operating system.
pub(super) const RUNTIME_CLASS: &str = "podvisor-vm";

/// What an instance says of a volume that is plugged in.
pub(super) const PLUGGED: &str = "Ready";

/// Returns whether a pod is an instance's, and not one of the same name. Anybody may name an owner,
/// but nobody else makes pods of the runtime class.
pub(super) fn is_of(pod: &Pod, vmi: &VirtualMachineInstance) -> bool {
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.as_deref());
    let owners = pod.metadata.owner_references.as_ref();
    class == Some(RUNTIME_CLASS)
        && owners.is_some_and(|owners| {
            owners.iter().any(|owner| {
                owner.controller == Some(true) && Some(&owner.uid) == vmi.metadata.uid.as_ref()
            })
        })
}

/// Whether a pod keeps a claim, and is no VM.
pub(super) fn is_keeper(pod: &Pod) -> bool {
    let labels = pod.metadata.labels.as_ref();
    let component = labels.and_then(|labels| labels.get(COMPONENT_LABEL));
    component.is_some_and(|component| component == HOTPLUG)
}

/// Whether a volume of this claim or DataVolume is to be plugged into an instance, and is not.
pub(super) fn awaits(vmi: &VirtualMachineInstance, claim: &str) -> bool {
    let awaited = |entry: &Value| {
        let of = entry.pointer("/persistentVolumeClaimInfo/claimName");
        entry.get("hotplugVolume").is_some()
            && entry["phase"] != PLUGGED
            && of.and_then(Value::as_str) == Some(claim)
    };
    entries(vmi).iter().any(awaited)
}

/// Returns what an instance says of its volumes.
pub(super) fn entries(vmi: &VirtualMachineInstance) -> Vec<Value> {
    let entries = vmi.status.rest.get("volumeStatus");
    entries
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default()
}

/// Returns whether the status says that the instance was ever running.
pub(super) fn was_running(status: &VmiStatus) -> bool {
    status.phase == Phase::Running
        || status
            .phase_transition_timestamps
            .iter()
            .any(|passed| passed.phase == Phase::Running)
}

/// Returns the reason why the instance cannot be brought into its state, if there is one.
pub(super) fn failure(status: &VmiStatus) -> Option<&Condition> {
    condition(&status.conditions, "Synchronized").filter(|found| found.status == "False")
}
