//! What a snapshot contains, and the snapshots of its volumes.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use podvisor_cluster_types::snapshot::{GROUP, VERSIONS};
use serde_json::{Value, json};

use crate::objects::{
    ClaimBackup, ContentSpec, SourceMachine, SourceSpec, VirtualMachine, VirtualMachineSnapshot,
    VirtualMachineSnapshotContent, VmSpec, VolumeBackup, VolumeSnapshot,
};

/// Labels of a snapshot of a volume: the virtual machine that it is of.
const SOURCE_NAME: &str = "snapshot.kubevirt.io/source-vm-name";
const SOURCE_NAMESPACE: &str = "snapshot.kubevirt.io/source-vm-namespace";

/// Returns the name of what a snapshot contains.
pub(in crate::controller) fn name(snapshot: &VirtualMachineSnapshot) -> String {
    let known = &snapshot.status.virtual_machine_snapshot_content_name;
    let uid = snapshot.metadata.uid.as_deref().unwrap_or_default();
    known
        .clone()
        .unwrap_or_else(|| format!("vmsnapshot-content-{uid}"))
}

/// Returns the claim of a volume of a virtual machine.
pub(in crate::controller) fn claim_of(volume: &Value) -> Option<&str> {
    let data = volume.pointer("/dataVolume/name");
    let claim = volume.pointer("/persistentVolumeClaim/claimName");
    data.or(claim)?.as_str()
}

/// Returns the volumes of a specification.
pub(super) fn volumes_of(spec: &VmSpec) -> impl Iterator<Item = &Value> {
    let template = spec.template.as_ref();
    let volumes = template.and_then(|template| template.spec.get("volumes"));
    volumes.and_then(Value::as_array).into_iter().flatten()
}

/// Returns the volumes of a specification that are claims, by name.
pub(in crate::controller) fn claims(spec: &VmSpec) -> impl Iterator<Item = (&str, &str)> {
    volumes_of(spec).filter_map(|volume| Some((volume.get("name")?.as_str()?, claim_of(volume)?)))
}

/// Returns the contents of a snapshot: the virtual machine with this specification, and those of
/// its volumes of which snapshots can be taken.
pub(super) fn content(
    snapshot: &VirtualMachineSnapshot,
    vm: &VirtualMachine,
    spec: VmSpec,
    volumes: Vec<(String, PersistentVolumeClaim)>,
) -> VirtualMachineSnapshotContent {
    let uid = snapshot.metadata.uid.as_deref().unwrap_or_default();
    let backups = volumes.into_iter().map(|(volume, claim)| VolumeBackup {
        volume_snapshot_name: Some(format!("vmsnapshot-{uid}-volume-{volume}")),
        volume_name: volume,
        persistent_volume_claim: ClaimBackup {
            metadata: simple(&claim.metadata),
            spec: claim.spec.unwrap_or_default(),
        },
    });
    let spec = ContentSpec {
        virtual_machine_snapshot_name: snapshot.metadata.name.clone(),
        source: SourceSpec {
            virtual_machine: Some(SourceMachine {
                metadata: ObjectMeta {
                    uid: vm.metadata.uid.clone(),
                    ..simple(&vm.metadata)
                },
                spec,
            }),
        },
        volume_backups: backups.collect(),
    };
    let metadata = ObjectMeta {
        name: Some(name(snapshot)),
        namespace: snapshot.metadata.namespace.clone(),
        ..ObjectMeta::default()
    };
    VirtualMachineSnapshotContent::new(metadata, spec)
}

/// What of an object's metadata another one may have.
fn simple(metadata: &ObjectMeta) -> ObjectMeta {
    let mut annotations = metadata.annotations.clone();
    if let Some(annotations) = &mut annotations {
        annotations.retain(|name, _| !name.starts_with("kubectl.kubernetes.io/"));
    }
    ObjectMeta {
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        labels: metadata.labels.clone(),
        annotations: annotations.filter(|annotations| !annotations.is_empty()),
        ..ObjectMeta::default()
    }
}

/// Returns the snapshot of a volume; `class` says how it is taken.
pub(super) fn volume_snapshot(
    content: &VirtualMachineSnapshotContent,
    name: &str,
    class: &str,
) -> Option<VolumeSnapshot> {
    let mut backups = content.spec.volume_backups.iter();
    let backup = backups.find(|backup| backup.volume_snapshot_name.as_deref() == Some(name))?;
    let source = content.spec.source.virtual_machine.as_ref()?;
    let label = |text: &Option<String>| {
        let text = text.as_deref().unwrap_or_default();
        let short: String = text.chars().take(63).collect();
        short.trim_end_matches(['-', '.', '_']).to_owned()
    };
    let labels = [
        (SOURCE_NAME, label(&source.metadata.name)),
        (SOURCE_NAMESPACE, label(&source.metadata.namespace)),
    ];
    let labels = labels.map(|(name, value)| (name.to_owned(), value));
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        namespace: content.metadata.namespace.clone(),
        labels: Some(labels.into_iter().collect()),
        owner_references: Some(vec![owner(content)]),
        ..ObjectMeta::default()
    };
    let spec = json!({
        "source": {"persistentVolumeClaimName": backup.persistent_volume_claim.metadata.name},
        "volumeSnapshotClassName": class,
    });
    Some(VolumeSnapshot::new(metadata, spec))
}

/// The snapshots of volumes go with what they are part of.
fn owner(content: &VirtualMachineSnapshotContent) -> OwnerReference {
    OwnerReference {
        api_version: format!("{GROUP}/{}", VERSIONS[0]),
        kind: "VirtualMachineSnapshotContent".to_owned(),
        name: content.metadata.name.clone().unwrap_or_default(),
        uid: content.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
