//! Which objects have to be looked at when another one changes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::runtime::reflector::{ObjectRef, Store};

use crate::controller::instances::{awaits, failure};
use crate::controller::machines::uses;
use crate::objects::{
    ClonePhase, DataSource, DataVolume, MIGRATION_NAME_ANNOTATION, MigrationPhase, Phase,
    VirtualMachine, VirtualMachineClone, VirtualMachineExport, VirtualMachineInstance,
    VirtualMachineInstanceMigration, VirtualMachineRestore, VirtualMachineSnapshot,
    VirtualMachineSnapshotContent, VolumeSnapshot, VolumeState,
};

/// The taint of a node that VMs have to leave.
const DRAIN_TAINT: &str = "kubevirt.io/drain";

/// Returns the object of a kind that something is of.
pub(super) fn owner<K: Resource<DynamicType = ()>>(
    meta: &ObjectMeta,
    kind: &str,
) -> Option<ObjectRef<K>> {
    let owner = meta
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true) && owner.kind == kind)?;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    Some(ObjectRef::new(&owner.name).within(namespace))
}

pub(super) fn is_drained(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == DRAIN_TAINT))
}

/// Returns the instances on a node.
pub(super) fn on_node(
    vmis: &Store<VirtualMachineInstance>,
    node: &Node,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let those = vmis.state_filter(|vmi| vmi.status.node_name == name);
    those
        .iter()
        .map(|vmi| ObjectRef::from_obj(&**vmi))
        .collect()
}

/// Returns the migration that a pod is the target of.
pub(super) fn migration_of(pod: &Pod) -> Option<ObjectRef<VirtualMachineInstanceMigration>> {
    let name = pod.metadata.annotations.as_ref()?;
    let name = name.get(MIGRATION_NAME_ANNOTATION)?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    Some(ObjectRef::new(name).within(namespace))
}

/// Returns the migrations that have not begun.
pub(super) fn waiting_migrations(
    store: &Store<VirtualMachineInstanceMigration>,
) -> Vec<ObjectRef<VirtualMachineInstanceMigration>> {
    let waiting = store.state_filter(|migration| migration.status.phase <= MigrationPhase::Pending);
    waiting
        .iter()
        .map(|migration| ObjectRef::from_obj(&**migration))
        .collect()
}

/// Returns the instances that a claim may be what they wait for.
pub(super) fn waiting(
    vmis: &Store<VirtualMachineInstance>,
    claim: &PersistentVolumeClaim,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    vmis.state_filter(|vmi| {
        let failure = failure(&vmi.status);
        vmi.metadata.namespace == claim.metadata.namespace
            && (failure.is_some_and(|failure| failure.reason == "FailedPvcNotFound")
                || awaits(vmi, name))
    })
    .iter()
    .map(|vmi| ObjectRef::from_obj(&**vmi))
    .collect()
}

/// Returns the machines that use a DataVolume, or a claim.
pub(super) fn users(
    store: &Store<VirtualMachine>,
    of: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachine>> {
    let name = of.name.as_deref().unwrap_or_default();
    references(&store.state_filter(|vm| vm.metadata.namespace == of.namespace && uses(vm, name)))
}

/// Returns the instances that may wait for a DataVolume: without a pod, or for a volume to be
/// plugged in.
pub(super) fn begun(
    vmis: &Store<VirtualMachineInstance>,
    volume: &DataVolume,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    vmis.state_filter(|vmi| {
        vmi.metadata.namespace == volume.metadata.namespace
            && (matches!(vmi.status.phase, Phase::Unset | Phase::Pending) || awaits(vmi, name))
    })
    .iter()
    .map(|vmi| ObjectRef::from_obj(&**vmi))
    .collect()
}

/// Returns the references to some objects.
fn references<K>(objects: &[Arc<K>]) -> Vec<ObjectRef<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let objects = objects.iter();
    objects
        .map(|object| ObjectRef::from_obj(&**object))
        .collect()
}

/// Returns the snapshots that are taken of a virtual machine.
pub(super) fn snapshots_of(
    store: &Store<VirtualMachineSnapshot>,
    vm: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineSnapshot>> {
    references(&store.state_filter(|snapshot| {
        let source = snapshot.spec.source.as_ref();
        snapshot.metadata.namespace == vm.namespace
            && source.map(|source| &source.name) == vm.name.as_ref()
            && !snapshot.status.phase.is_final()
    }))
}

/// Returns the snapshot that contents are of.
pub(super) fn snapshot_of(
    content: &VirtualMachineSnapshotContent,
) -> Option<ObjectRef<VirtualMachineSnapshot>> {
    let name = content.spec.virtual_machine_snapshot_name.as_ref()?;
    let namespace = content.metadata.namespace.as_deref().unwrap_or_default();
    Some(ObjectRef::new(name).within(namespace))
}

/// Returns the snapshot that the snapshot of a volume is part of.
pub(super) fn snapshot_with(
    contents: &Store<VirtualMachineSnapshotContent>,
    volume: &VolumeSnapshot,
) -> Option<ObjectRef<VirtualMachineSnapshot>> {
    let content = owner(&volume.metadata, "VirtualMachineSnapshotContent")?;
    snapshot_of(&*contents.get(&content)?)
}

/// Returns the restores under way to a virtual machine.
pub(super) fn restores_to(
    store: &Store<VirtualMachineRestore>,
    vm: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineRestore>> {
    references(&store.state_filter(|restore| {
        let target = restore.spec.target.as_ref();
        restore.metadata.namespace == vm.namespace
            && target.map(|target| &target.name) == vm.name.as_ref()
            && restore.status.complete != Some(true)
    }))
}

/// Returns the restores under way of a snapshot.
pub(super) fn restores_of(
    store: &Store<VirtualMachineRestore>,
    snapshot: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineRestore>> {
    references(&store.state_filter(|restore| {
        restore.metadata.namespace == snapshot.namespace
            && Some(&restore.spec.virtual_machine_snapshot_name) == snapshot.name.as_ref()
            && restore.status.complete != Some(true)
    }))
}

/// Returns the restores under way that make a claim.
pub(super) fn restores_with(
    store: &Store<VirtualMachineRestore>,
    claim: &PersistentVolumeClaim,
) -> Vec<ObjectRef<VirtualMachineRestore>> {
    references(&store.state_filter(|restore| {
        let mut volumes = restore.status.restores.iter();
        restore.metadata.namespace == claim.metadata.namespace
            && restore.status.complete != Some(true)
            && volumes.any(|volume| Some(&volume.claim) == claim.metadata.name.as_ref())
    }))
}

/// Returns the copies that wait for a virtual machine or a snapshot: their source, or what was
/// made for them.
pub(super) fn copies_of(
    store: &Store<VirtualMachineClone>,
    of: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineClone>> {
    let owners: Vec<&str> = of
        .owner_references
        .iter()
        .flatten()
        .map(|owner| owner.uid.as_str())
        .collect();
    references(&store.state_filter(|clone| {
        let source = clone.spec.source.as_ref().map(|source| &source.name);
        let target = clone.spec.target.as_ref().map(|target| &target.name);
        let uid = clone.metadata.uid.as_deref();
        clone.metadata.namespace == of.namespace
            && !matches!(
                clone.status.phase,
                ClonePhase::Succeeded | ClonePhase::Failed
            )
            && (source == of.name.as_ref()
                || target == of.name.as_ref()
                || uid.is_some_and(|uid| owners.contains(&uid)))
    }))
}

/// Returns the DataSources that name a claim.
pub(super) fn sources_of(
    store: &Store<DataSource>,
    claim: &PersistentVolumeClaim,
) -> Vec<ObjectRef<DataSource>> {
    references(&store.state_filter(|source| {
        let named = source.spec.source.as_ref();
        let named = named.and_then(|named| named.pvc.as_ref());
        source.metadata.namespace == claim.metadata.namespace
            && named.map(|named| &named.name) == claim.metadata.name.as_ref()
    }))
}

/// Returns the DataVolumes that are not filled and name a DataSource.
pub(super) fn volumes_of(
    store: &Store<DataVolume>,
    source: &DataSource,
) -> Vec<ObjectRef<DataVolume>> {
    references(&store.state_filter(|volume| {
        let named = volume.spec.source_ref.as_ref();
        volume.metadata.namespace == source.metadata.namespace
            && volume.state() != VolumeState::Ready
            && named.map(|named| &named.name) == source.metadata.name.as_ref()
    }))
}

/// Returns the exports of an object of a kind.
pub(super) fn exports_of(
    store: &Store<VirtualMachineExport>,
    kind: &str,
    of: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineExport>> {
    references(&store.state_filter(|export| {
        let source = export.spec.source.as_ref();
        let source = source.filter(|source| source.kind == kind);
        export.metadata.namespace == of.namespace
            && source.map(|source| &source.name) == of.name.as_ref()
    }))
}

/// Returns the exports that a claim, or the DataVolume of its name, is part of.
pub(super) fn exports_with(
    store: &Store<VirtualMachineExport>,
    vms: &Store<VirtualMachine>,
    claim: &ObjectMeta,
) -> Vec<ObjectRef<VirtualMachineExport>> {
    let mut exports = exports_of(store, "PersistentVolumeClaim", claim);
    exports.extend(owner(claim, "VirtualMachineExport"));
    if store.len() > exports.len() {
        let machines = users(vms, claim).into_iter().map(|vm| ObjectMeta {
            name: Some(vm.name),
            namespace: vm.namespace,
            ..ObjectMeta::default()
        });
        exports.extend(machines.flat_map(|vm| exports_of(store, "VirtualMachine", &vm)));
    }
    exports
}

/// Returns the export that a pod serves, and those of claims that it uses.
pub(super) fn exports_beside(
    store: &Store<VirtualMachineExport>,
    pod: &Pod,
) -> Vec<ObjectRef<VirtualMachineExport>> {
    let mut exports: Vec<_> = owner(&pod.metadata, "VirtualMachineExport")
        .into_iter()
        .collect();
    if store.is_empty() {
        return exports;
    }
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    for volume in volumes.into_iter().flatten() {
        let claim = volume
            .persistent_volume_claim
            .as_ref()
            .map(|claim| ObjectMeta {
                name: Some(claim.claim_name.clone()),
                namespace: pod.metadata.namespace.clone(),
                ..ObjectMeta::default()
            });
        exports.extend(
            claim
                .iter()
                .flat_map(|claim| exports_of(store, "PersistentVolumeClaim", claim)),
        );
    }
    exports
}
