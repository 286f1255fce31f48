//! The pod that keeps a claim on a VM's node, from which the node plugs it into the guest.
//!
//! It has no machine and runs nothing: the node's runtime knows it by its annotation
//! (docs/adr/0055-hotplug.md). One for each volume, so that a volume comes and goes without the
//! others.

use k8s_openapi::api::core::v1::Pod;
use podvisor_cluster_types::vmi::{Disk, VmiSpec, Volume};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::super::pod::{CONTAINER, NO_IMAGE, restricted};
use super::super::pod_error::PodError;
use super::super::{DEVICES, MOUNTS};
use crate::controller::claims::VolumeMode;
use crate::controller::instances::RUNTIME_CLASS;
use crate::controller::names;
use crate::objects::{
    ATTACHMENT_ANNOTATION, COMPONENT_LABEL, HOTPLUG, NAME_LABEL, VirtualMachineInstance, name_label,
};

/// The beginning of the pods' names.
const PREFIX: &str = "hp-volume";

/// Longest serial number of a disk, in bytes (virtio 1.3 §5.2.6.1).
const MAX_SERIAL: usize = 20;

/// What such a pod takes, at most.
const MEMORY: &str = "40Mi";
const CPU: &str = "10m";

/// What a pod keeps: its annotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kept {
    /// Unique id of the instance.
    pub(super) instance: String,
    /// The name of the volume.
    pub(super) volume: String,
    /// The claim.
    pub(super) claim: String,
    /// The serial number of the disk.
    pub(super) serial: String,
    /// The guest cannot write it.
    #[serde(default)]
    pub(super) read_only: bool,
    /// It is for dumps of the guest's memory, and no disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) memory_dump: bool,
}

impl Kept {
    /// Returns what is kept of a volume; `None` if it has no claim.
    pub(super) fn of(vmi: &VirtualMachineInstance, volume: &Volume, disk: &Disk) -> Option<Self> {
        let source = volume.persistent_volume_claim.as_ref();
        let data = volume.data_volume.as_ref();
        let claim = source
            .map(|source| &source.claim_name)
            .or(data.map(|data| &data.name))?;
        let serial = disk.serial.as_deref().filter(|serial| is_serial(serial));
        Some(Self {
            instance: vmi.metadata.uid.clone().unwrap_or_default(),
            volume: volume.name.clone(),
            claim: claim.clone(),
            serial: cut(serial.unwrap_or(&volume.name)),
            read_only: disk.is_read_only()
                || source.is_some_and(|source| source.read_only == Some(true)),
            memory_dump: false,
        })
    }

    /// Returns what is kept of a volume for memory dumps; `None` if it is another one.
    pub(super) fn of_dumps(vmi: &VirtualMachineInstance, volume: &Volume) -> Option<Self> {
        let source = volume.memory_dump.as_ref()?;
        Some(Self {
            instance: vmi.metadata.uid.clone().unwrap_or_default(),
            volume: volume.name.clone(),
            claim: source.claim_name.clone(),
            serial: cut(&volume.name),
            read_only: false,
            memory_dump: true,
        })
    }
}

fn is_serial(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Returns as much of a name as a serial number has room for.
pub(super) fn cut(name: &str) -> String {
    name.chars().take(MAX_SERIAL).collect()
}

/// Returns what a pod keeps, if it is such a pod.
pub(super) fn kept_by(pod: &Pod) -> Option<Kept> {
    let annotations = pod.metadata.annotations.as_ref()?;
    serde_json::from_str(annotations.get(ATTACHMENT_ANNOTATION)?).ok()
}

/// Returns the node that such a pod is for.
pub(super) fn node_of(pod: &Pod) -> Option<&str> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?;
    let required = affinity
        .node_affinity
        .as_ref()?
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    let term = required.node_selector_terms.first()?;
    let field = term.match_fields.as_ref()?.first()?;
    field.values.as_ref()?.first().map(String::as_str)
}

/// Returns the name of the pod that keeps a volume for an instance on a node.
pub(super) fn name(vmi: &VirtualMachineInstance, volume: &str, node: &str) -> String {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    let room = 63 - PREFIX.len() - 2 - names::HASH;
    let short: String = name.chars().take(room).collect();
    let short = short.trim_end_matches(['-', '.']);
    let hash = names::hash(&format!("{uid}/{volume}/{node}"));
    format!("{PREFIX}-{short}-{hash}")
}

/// Returns the pod that keeps a volume on a node.
pub(super) fn keeper(
    vmi: &VirtualMachineInstance,
    spec: &VmiSpec,
    volume: &Volume,
    kept: &Kept,
    mode: VolumeMode,
    node: &str,
) -> Result<Pod, PodError> {
    let malformed = |error: serde_json::Error| PodError::Malformed {
        field: format!("volumes[{}]", volume.name),
        problem: error.to_string(),
    };
    let annotation = serde_json::to_string(kept).map_err(malformed)?;
    let is_claim_read_only = volume
        .persistent_volume_claim
        .as_ref()
        .is_some_and(|claim| claim.read_only == Some(true));
    let mut container = json!({
        "name": CONTAINER,
        "image": NO_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "resources": {
            "requests": {"cpu": CPU, "memory": MEMORY},
            "limits": {"memory": MEMORY},
        },
        "securityContext": restricted(),
    });
    match mode {
        VolumeMode::Block => {
            container["volumeDevices"] = json!([{
                "name": volume.name, "devicePath": format!("{DEVICES}/{}", volume.name),
            }]);
        }
        VolumeMode::Filesystem => {
            container["volumeMounts"] = json!([{
                "name": volume.name,
                "mountPath": format!("{MOUNTS}/{}", volume.name),
                "readOnly": is_claim_read_only,
            }]);
        }
    }
    let on_node = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchFields": [{
            "key": "metadata.name", "operator": "In", "values": [node],
        }]}],
    }}});
    let meta = &vmi.metadata;
    let vmi_name = meta.name.clone().unwrap_or_default();
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name(vmi, &volume.name, node),
            "namespace": meta.namespace,
            "labels": {
                COMPONENT_LABEL: HOTPLUG,
                NAME_LABEL: name_label(&vmi_name),
            },
            "annotations": {ATTACHMENT_ANNOTATION: annotation},
            "ownerReferences": [{
                "apiVersion": vmi.api_version,
                "kind": vmi.kind,
                "name": vmi_name,
                "uid": meta.uid,
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "runtimeClassName": RUNTIME_CLASS,
            "containers": [container],
            "volumes": [{
                "name": volume.name,
                "persistentVolumeClaim": {
                    "claimName": kept.claim, "readOnly": is_claim_read_only,
                },
            }],
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 1,
            "tolerations": spec.tolerations,
            "affinity": on_node,
        },
    });
    serde_json::from_value(pod).map_err(malformed)
}
