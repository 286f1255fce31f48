//! The pod that waits for an instance on another node.
//!
//! It is the pod that the instance would get now, with what the VM was built of: the description
//! in the source's own annotation. It does not boot (`podvisor.io/migration`).

use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm, PodAntiAffinity};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::pod::{self, PodError, VolumeMode};
use crate::controller::objects::{
    CREATED_BY_LABEL, MIGRATION_ANNOTATION, MIGRATION_NAME_ANNOTATION, MIGRATION_UID_LABEL,
    VMI_ANNOTATION, VirtualMachineInstance, VirtualMachineInstanceMigration,
};

/// Returns the name of a migration's target: one per unique id, so that it cannot be made twice.
#[must_use]
pub fn name(vmi: &VirtualMachineInstance, migration: &VirtualMachineInstanceMigration) -> String {
    pod::name_for(vmi, migration.metadata.uid.as_deref().unwrap_or_default())
}

/// Returns the pod that waits for an instance which runs in `source`.
///
/// # Errors
///
/// See [`PodError`].
pub fn target(
    vmi: &VirtualMachineInstance,
    migration: &VirtualMachineInstanceMigration,
    source: &Pod,
    claim: &dyn Fn(&str) -> Option<VolumeMode>,
) -> Result<Pod, PodError> {
    let mut pod = pod::pod(vmi, claim)?;
    let uid = migration.metadata.uid.clone().unwrap_or_default();
    let of_source = source.metadata.annotations.as_ref();
    let described = of_source.and_then(|annotations| annotations.get(VMI_ANNOTATION));
    pod.metadata.name = Some(name(vmi, migration));
    let annotations = pod.metadata.annotations.get_or_insert_default();
    if let Some(described) = described {
        annotations.insert(VMI_ANNOTATION.to_owned(), described.clone());
    }
    annotations.insert(MIGRATION_ANNOTATION.to_owned(), uid.clone());
    let of_migration = migration.metadata.name.clone().unwrap_or_default();
    annotations.insert(MIGRATION_NAME_ANNOTATION.to_owned(), of_migration);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(MIGRATION_UID_LABEL.to_owned(), uid);
    if let Some(spec) = &mut pod.spec {
        let selector = spec.node_selector.get_or_insert_default();
        for (label, value) in &migration.spec.added_node_selector {
            // What the VM asks for comes first.
            selector.entry(label.clone()).or_insert(value.clone());
        }
        avoid(spec.affinity.get_or_insert_default(), vmi);
    }
    Ok(pod)
}

/// Not on a node that has a pod of the instance.
fn avoid(affinity: &mut Affinity, vmi: &VirtualMachineInstance) {
    let uid = vmi.metadata.uid.clone().unwrap_or_default();
    let term = PodAffinityTerm {
        label_selector: Some(LabelSelector {
            match_labels: Some([(CREATED_BY_LABEL.to_owned(), uid)].into()),
            ..LabelSelector::default()
        }),
        topology_key: "kubernetes.io/hostname".to_owned(),
        ..PodAffinityTerm::default()
    };
    let anti: &mut PodAntiAffinity = affinity.pod_anti_affinity.get_or_insert_default();
    anti.required_during_scheduling_ignored_during_execution
        .get_or_insert_default()
        .push(term);
}
