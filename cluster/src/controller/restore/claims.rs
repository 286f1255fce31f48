//! The claims of a restore.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, TypedLocalObjectReference,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use podvisor_cluster_types::Quantity as Bytes;
use podvisor_cluster_types::snapshot::Naming;
use serde_json::Value;

use super::LAST_RESTORE;
use crate::controller::machines::owner_reference;
use crate::objects::{
    SourceMachine, VirtualMachine, VirtualMachineRestore, VolumeBackup, VolumeRestore,
    VolumeSnapshot,
};

/// Annotation of a claim: the restore that made it.
const RESTORE_NAME: &str = "restore.kubevirt.io/name";

/// Labels of a claim: the virtual machine that it was part of.
const SOURCE_NAME: &str = "restore.kubevirt.io/source-vm-name";
const SOURCE_NAMESPACE: &str = "restore.kubevirt.io/source-vm-namespace";

/// Annotation of a claim: the DataVolume that it is filled for.
const POPULATED_FOR: &str = "cdi.kubevirt.io/storage.populatedFor";

/// What the annotations begin with that belong to the claim's volume, and not to its contents.
const OF_VOLUMES: [&str; 6] = [
    "pv.kubernetes.io",
    "volume.beta.kubernetes.io",
    "cdi.kubevirt.io",
    "volume.kubernetes.io",
    "k8s.io/CloneRequest",
    "k8s.io/CloneOf",
];

/// Returns how each volume of a snapshot is restored.
pub(super) fn restores<'a>(
    restore: &VirtualMachineRestore,
    source: &SourceMachine,
    backups: impl Iterator<Item = &'a VolumeBackup>,
) -> Vec<VolumeRestore> {
    let of_backup = |backup: &VolumeBackup| {
        let snapshot = backup.volume_snapshot_name.clone()?;
        let claim = name(restore, backup);
        let data_volume = template_of(source, &backup.volume_name).map(|_| claim.clone());
        Some(VolumeRestore {
            volume_name: backup.volume_name.clone(),
            claim,
            volume_snapshot_name: snapshot,
            data_volume_name: data_volume,
        })
    };
    backups.filter_map(of_backup).collect()
}

/// The name of the claim of a volume, and of its DataVolume.
fn name(restore: &VirtualMachineRestore, backup: &VolumeBackup) -> String {
    let volume = &backup.volume_name;
    let given = restore.spec.of_volume(volume).map(|of| &of.restore_name);
    if let Some(given) = given.filter(|given| !given.is_empty()) {
        return given.clone();
    }
    let was = &backup.persistent_volume_claim.metadata.name;
    match restore.spec.naming() {
        Naming::InPlace => was.clone().unwrap_or_default(),
        Naming::Target => {
            let target = restore.spec.target.as_ref();
            format!("{}-{volume}", target.map_or("", |target| &target.name))
        }
        _ => {
            let uid = restore.metadata.uid.as_deref().unwrap_or_default();
            format!("restore-{uid}-{volume}")
        }
    }
}

/// Returns the name of the DataVolume of a volume, if it is one of the machine's templates.
pub(super) fn template_of<'a>(source: &'a SourceMachine, volume: &str) -> Option<&'a str> {
    let template = source.spec.template.as_ref()?;
    let volumes = template.spec.get("volumes")?.as_array()?;
    let named = |value: &&Value| value.get("name").and_then(Value::as_str) == Some(volume);
    let name = volumes.iter().find(named)?.pointer("/dataVolume/name")?;
    let templates = source.spec.rest.get("dataVolumeTemplates")?.as_array()?;
    let is_template = |template: &Value| template.pointer("/metadata/name") == Some(name);
    name.as_str().filter(|_| templates.iter().any(is_template))
}

/// Whether a restore made a claim.
pub(super) fn is_of(claim: &PersistentVolumeClaim, restore: &VirtualMachineRestore) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(LAST_RESTORE)) == restore.metadata.uid.as_ref()
}

/// Returns the specification of a claim that is made of the snapshot of a volume.
pub(in crate::controller) fn claim_spec(
    backup: &VolumeBackup,
    taken: &VolumeSnapshot,
) -> PersistentVolumeClaimSpec {
    let mut spec = backup.persistent_volume_claim.spec.clone();
    spec.volume_name = None;
    spec.data_source_ref = None;
    spec.data_source = Some(TypedLocalObjectReference {
        api_group: Some("snapshot.storage.k8s.io".to_owned()),
        kind: "VolumeSnapshot".to_owned(),
        name: backup.volume_snapshot_name.clone().unwrap_or_default(),
    });
    let requests = spec.resources.get_or_insert_default();
    let requests = requests.requests.get_or_insert_default();
    let asked = requests
        .get("storage")
        .map(|size| Bytes::new(size.0.as_str()));
    let asked = asked.and_then(|size| size.bytes()).unwrap_or_default();
    // A snapshot may need more than its volume asked for.
    if let Some(needed) = taken.status.restore_size.as_ref()
        && needed.bytes().is_some_and(|bytes| bytes > asked)
    {
        requests.insert("storage".to_owned(), Quantity(needed.as_str().to_owned()));
    }
    spec
}

/// Returns the claim of a volume.
pub(super) fn claim(
    restore: &VirtualMachineRestore,
    target: Option<&VirtualMachine>,
    source: &SourceMachine,
    backup: &VolumeBackup,
    of: &VolumeRestore,
    taken: &VolumeSnapshot,
) -> PersistentVolumeClaim {
    let was = &backup.persistent_volume_claim;
    let mut annotations = was.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|name, _| !OF_VOLUMES.iter().any(|prefix| name.starts_with(prefix)));
    let mut labels = was.metadata.labels.clone().unwrap_or_default();
    labels.insert(SOURCE_NAME.to_owned(), label(&source.metadata.name));
    labels.insert(
        SOURCE_NAMESPACE.to_owned(),
        label(&source.metadata.namespace),
    );
    if let Some(given) = restore.spec.of_volume(&of.volume_name) {
        labels.extend(given.labels.clone());
        annotations.extend(given.annotations.clone());
    }
    annotations.extend(marks(restore, of));
    let owner = target.filter(|_| restore.spec.owns_claims());
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(of.claim.clone()),
            namespace: restore.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: owner.map(|vm| vec![owner_reference(vm)]),
            ..ObjectMeta::default()
        },
        spec: Some(claim_spec(backup, taken)),
        ..PersistentVolumeClaim::default()
    }
}

fn label(text: &Option<String>) -> String {
    let text = text.as_deref().unwrap_or_default();
    let short: String = text.chars().take(63).collect();
    short.trim_end_matches(['-', '.', '_']).to_owned()
}

/// Annotations by which a claim is known.
fn marks(restore: &VirtualMachineRestore, of: &VolumeRestore) -> BTreeMap<String, String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut marks = BTreeMap::from([
        (RESTORE_NAME.to_owned(), text(&restore.metadata.name)),
        (LAST_RESTORE.to_owned(), text(&restore.metadata.uid)),
    ]);
    if let Some(name) = &of.data_volume_name {
        marks.insert(POPULATED_FOR.to_owned(), name.clone());
    }
    marks
}
