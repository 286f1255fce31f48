//! The pod that waits for an instance on another node.
//!
//! It is the pod that the instance would get now, with what the VM was built of: the description
//! in the source's own annotation. It does not boot (`podvisor.io/migration`).

use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm, PodAntiAffinity, Probe};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::pod;
use super::pod_error::PodError;
use crate::controller::claims::VolumeMode;
use crate::objects::{
    CREATED_BY_LABEL, MIGRATION_ANNOTATION, MIGRATION_NAME_ANNOTATION, MIGRATION_UID_LABEL,
    VMI_ANNOTATION, VirtualMachineInstance, VirtualMachineInstanceMigration,
};

/// How long a VM may take to arrive, in seconds, before its guest is taken for dead.
const ARRIVAL: i32 = 900;

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
        for container in &mut spec.containers {
            // Whether the guest lives is asked from its first answer on.
            container.startup_probe = container.liveness_probe.as_ref().map(patient);
        }
        let selector = spec.node_selector.get_or_insert_default();
        for (label, value) in &migration.spec.added_node_selector {
            // What the VM asks for comes first.
            selector.entry(label.clone()).or_insert(value.clone());
        }
        avoid(spec.affinity.get_or_insert_default(), vmi);
    }
    Ok(pod)
}

/// The same probe, for as long as a VM may take to arrive.
fn patient(probe: &Probe) -> Probe {
    let period = probe.period_seconds.unwrap_or(10).max(1);
    Probe {
        failure_threshold: Some((ARRIVAL / period).max(1)),
        initial_delay_seconds: None,
        success_threshold: None,
        ..probe.clone()
    }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn made(spec: serde_json::Value) -> Pod {
        let vmi = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "vmi"},
            "spec": spec,
        }))
        .unwrap();
        let migration = serde_json::from_value(json!({
            "metadata": {"name": "m", "namespace": "n", "uid": "migration"},
            "spec": {"vmiName": "a", "addedNodeSelector": {"zone": "z", "disk": "fast"}},
        }))
        .unwrap();
        let source = serde_json::from_value(json!({
            "metadata": {"annotations": {VMI_ANNOTATION: "as it was built"}},
        }))
        .unwrap();
        target(&vmi, &migration, &source, &|_| None).unwrap()
    }

    #[test]
    fn a_target_is_built_as_the_source_was_and_waits_elsewhere() {
        let pod = made(json!({
            "domain": {"memory": {"guest": "1Gi"}},
            "nodeSelector": {"disk": "any"},
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "rack"},
            ]}},
        }));
        let annotations = pod.metadata.annotations.unwrap();
        assert_eq!(annotations[VMI_ANNOTATION], "as it was built");
        assert_eq!(annotations[MIGRATION_ANNOTATION], "migration");
        assert_eq!(annotations[MIGRATION_NAME_ANNOTATION], "m");
        assert_eq!(
            pod.metadata.labels.unwrap()[MIGRATION_UID_LABEL],
            "migration"
        );
        let spec = pod.spec.unwrap();
        let selector = spec.node_selector.unwrap();
        assert_eq!((&*selector["zone"], &*selector["disk"]), ("z", "any"));
        let anti = spec.affinity.unwrap().pod_anti_affinity.unwrap();
        let terms = anti
            .required_during_scheduling_ignored_during_execution
            .unwrap();
        let keys: Vec<_> = terms
            .iter()
            .map(|term| term.topology_key.as_str())
            .collect();
        assert_eq!(keys, ["rack", "kubernetes.io/hostname"]);
    }

    #[test]
    fn a_guest_that_is_not_there_yet_is_not_taken_for_dead() {
        let pod = made(json!({
            "domain": {"memory": {"guest": "1Gi"}},
            "livenessProbe": {"tcpSocket": {"port": 22}, "periodSeconds": 5},
        }));
        let container = &pod.spec.unwrap().containers[0];
        let startup = container.startup_probe.as_ref().unwrap();
        assert_eq!(startup.failure_threshold, Some(180));
        assert_eq!(
            startup.tcp_socket,
            container.liveness_probe.as_ref().unwrap().tcp_socket
        );
    }
}
