//! The virtual machine that a restore makes, or changes back.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::claims::template_of;
use super::{LAST_RESTORE, RestoreError, patches};
use crate::objects::{SourceMachine, VirtualMachine, VirtualMachineRestore, VmSpec, VolumeRestore};

/// Whether a restore has made, or changed back, a virtual machine.
pub(super) fn is_restored(vm: &VirtualMachine, restore: &VirtualMachineRestore) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(LAST_RESTORE)) == restore.metadata.uid.as_ref()
}

/// Returns the specification of a snapshot with the claims of a restore.
pub(super) fn spec(source: &SourceMachine, restores: &[VolumeRestore]) -> VmSpec {
    let mut spec = source.spec.clone();
    let templates = spec.rest.get_mut("dataVolumeTemplates");
    for template in templates
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let name = template.pointer("/metadata/name").and_then(Value::as_str);
        let restore = restores
            .iter()
            .find(|of| name.is_some() && template_of(source, &of.volume_name) == name);
        if let Some(name) = restore.and_then(|of| of.data_volume_name.as_ref()) {
            template["metadata"]["name"] = json!(name);
        }
    }
    let template = spec.template.as_mut();
    let volumes = template.and_then(|template| template.spec.get_mut("volumes"));
    for volume in volumes.and_then(Value::as_array_mut).into_iter().flatten() {
        let name = volume.get("name").and_then(Value::as_str);
        let Some(of) = restores.iter().find(|of| Some(&*of.volume_name) == name) else {
            continue;
        };
        if let Some(claim) = volume.pointer_mut("/persistentVolumeClaim/claimName") {
            *claim = json!(of.claim);
        } else if let Some(name) = &of.data_volume_name {
            volume["dataVolume"]["name"] = json!(name);
        } else {
            // Its DataVolume is nobody's: the claim is all that is restored.
            *volume = json!({
                "name": of.volume_name,
                "persistentVolumeClaim": {"claimName": of.claim},
            });
        }
    }
    spec
}

/// Returns the specification of a machine that exists. When it runs stays as it is.
pub(super) fn spec_of(
    vm: &VirtualMachine,
    source: &SourceMachine,
    restores: &[VolumeRestore],
) -> VmSpec {
    let mut spec = spec(source, restores);
    spec.running = vm.spec.running;
    spec.run_strategy.clone_from(&vm.spec.run_strategy);
    spec
}

/// Returns a machine that is made: it does not run.
///
/// # Errors
///
/// A patch does not fit, or makes too much.
pub(super) fn machine(
    restore: &VirtualMachineRestore,
    source: &SourceMachine,
) -> Result<VirtualMachine, RestoreError> {
    let mut spec = spec(source, &restore.status.restores);
    if spec.running.is_some() {
        spec.running = Some(false);
    } else {
        spec.run_strategy = Some("Halted".to_owned());
    }
    let target = restore.spec.target.clone().unwrap_or_default();
    let metadata = ObjectMeta {
        name: Some(target.name),
        namespace: restore.metadata.namespace.clone(),
        labels: Some(source.metadata.labels.clone().unwrap_or_default()),
        annotations: Some(source.metadata.annotations.clone().unwrap_or_default()),
        ..ObjectMeta::default()
    };
    let given = VirtualMachine::new(metadata.clone(), spec);
    let mut value = serde_json::to_value(&given).map_err(RestoreError::Serialize)?;
    patches::apply(&mut value, &restore.spec.patches)?;
    let mut made: VirtualMachine =
        serde_json::from_value(value).map_err(RestoreError::Serialize)?;
    // Whatever was patched, it is this object.
    made.metadata.name = metadata.name;
    made.metadata.namespace = metadata.namespace;
    let annotations = made.metadata.annotations.get_or_insert_default();
    let uid = restore.metadata.uid.clone().unwrap_or_default();
    annotations.insert(LAST_RESTORE.to_owned(), uid);
    Ok(made)
}
