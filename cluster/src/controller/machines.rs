//! What virtual machines and their instances say of each other, and of claims.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::Value;

use crate::objects::{VirtualMachine, VirtualMachineInstance};

/// Annotation of an instance: the generation of the virtual machine that it was made of.
pub(super) const GENERATION_ANNOTATION: &str = "kubevirt.io/vm-generation";

/// Returns the generation of the virtual machine that an instance was made of.
pub(super) fn generation_of(vmi: &VirtualMachineInstance) -> Option<i64> {
    let annotations = vmi.metadata.annotations.as_ref()?;
    annotations.get(GENERATION_ANNOTATION)?.parse().ok()
}

/// Returns the name of the ControllerRevision with the specification that an instance was made
/// of; `None` if no virtual machine made it.
pub(super) fn revision_of(vmi: &VirtualMachineInstance) -> Option<String> {
    let owners = vmi.metadata.owner_references.as_ref()?;
    let owner = owners
        .iter()
        .find(|owner| owner.controller == Some(true) && owner.kind == "VirtualMachine")?;
    Some(revision_name(&owner.uid, generation_of(vmi)?))
}

/// Returns the name of the ControllerRevision of a generation.
pub(super) fn revision_name(uid: &str, generation: i64) -> String {
    format!("revision-start-vm-{uid}-{generation}")
}

/// Returns a reference to the virtual machine that something is made for.
pub(super) fn owner_reference(vm: &VirtualMachine) -> OwnerReference {
    OwnerReference {
        api_version: vm.api_version.clone(),
        kind: vm.kind.clone(),
        name: vm.metadata.name.clone().unwrap_or_default(),
        uid: vm.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Returns whether a machine uses the DataVolume of a name.
pub(super) fn uses(vm: &VirtualMachine, name: &str) -> bool {
    used(vm).any(|used| used == name)
}

/// The names of claims and DataVolumes in a machine's template.
pub(super) fn used(vm: &VirtualMachine) -> impl Iterator<Item = &str> {
    let template = vm.spec.template.as_ref();
    let volumes = template.and_then(|template| template.spec.get("volumes"));
    let volumes = volumes.and_then(Value::as_array).into_iter().flatten();
    volumes.filter_map(|volume| {
        let data = volume.pointer("/dataVolume/name");
        let claim = volume.pointer("/persistentVolumeClaim/claimName");
        data.or(claim)?.as_str()
    })
}
