//! Snapshots of volumes, whose driver the tests play.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use podvisor_cluster::objects::{
    Condition, VirtualMachine, VirtualMachineRestore, VirtualMachineSnapshot,
    VirtualMachineSnapshotContent, VolumeSnapshot, condition,
};
use serde_json::{Value, json};

use super::scene::{LIMIT, Scene, machine};
use super::support::csi::{CLASS, install};

/// A namespace whose claims have a driver that takes snapshots.
pub(super) struct Storage {
    pub(super) snapshots: Api<VirtualMachineSnapshot>,
    pub(super) contents: Api<VirtualMachineSnapshotContent>,
    pub(super) restores: Api<VirtualMachineRestore>,
    pub(super) taken: Api<VolumeSnapshot>,
    pub(super) claims: Api<PersistentVolumeClaim>,
    vms: Api<VirtualMachine>,
}

impl Storage {
    pub(super) async fn of(scene: &Scene) -> Self {
        install(&scene.client).await;
        let (client, namespace) = (scene.client.clone(), &scene.namespace);
        Self {
            snapshots: Api::namespaced(client.clone(), namespace),
            contents: Api::namespaced(client.clone(), namespace),
            restores: Api::namespaced(client.clone(), namespace),
            taken: Api::namespaced(client.clone(), namespace),
            claims: Api::namespaced(client, namespace),
            vms: scene.vms.clone(),
        }
    }

    /// Makes a machine that does not run, with a claim that has a volume.
    pub(super) async fn machine(&self, name: &str) {
        let claim = format!("{name}-data");
        self.claim(&claim).await;
        let mut vm = machine(name, "Halted");
        let volumes = &mut vm.spec.template.as_mut().unwrap().spec["volumes"];
        volumes[1] = json!({"name": "seed", "persistentVolumeClaim": {"claimName": claim}});
        self.vms.create(&PostParams::default(), &vm).await.unwrap();
    }

    /// Makes a claim that has a volume.
    pub(super) async fn claim(&self, name: &str) {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"of": "us"}, "annotations": {
                "pv.kubernetes.io/bind-completed": "yes", "note": "kept",
            }},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": CLASS,
                "volumeName": format!("pv-{name}"),
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }))
        .unwrap();
        let params = PostParams::default();
        self.claims.create(&params, &claim).await.unwrap();
        self.bind(name).await;
    }

    /// Waits for a claim, and gives it a volume.
    pub(super) async fn bind(&self, name: &str) -> PersistentVolumeClaim {
        let exists = |claim: Option<&PersistentVolumeClaim>| {
            claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_none())
        };
        reached(&self.claims, name, exists).await;
        let bound = Patch::Merge(json!({"status": {"phase": "Bound"}}));
        let params = PatchParams::default();
        let bound = self.claims.patch_status(name, &params, &bound).await;
        bound.unwrap()
    }

    /// Asks for a snapshot of a machine.
    pub(super) async fn snapshot(&self, name: &str, vm: &str, spec: Value) -> String {
        let mut object = json!({
            "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshot",
            "metadata": {"name": name}, "spec": spec,
        });
        object["spec"]["source"] = reference(vm);
        let snapshot: VirtualMachineSnapshot = serde_json::from_value(object).unwrap();
        let made = self
            .snapshots
            .create(&PostParams::default(), &snapshot)
            .await;
        made.unwrap().metadata.uid.unwrap()
    }

    /// Waits until a snapshot is as wanted.
    pub(super) async fn snapshot_is(
        &self,
        name: &str,
        wanted: impl Fn(&VirtualMachineSnapshot) -> bool,
    ) -> VirtualMachineSnapshot {
        let wanted = |found: Option<&VirtualMachineSnapshot>| found.is_some_and(&wanted);
        reached(&self.snapshots, name, wanted).await.unwrap()
    }

    /// Plays the driver: says how far the snapshot of a volume is.
    pub(super) async fn report(&self, name: &str, status: Value) {
        reached(&self.taken, name, |found| found.is_some()).await;
        let status = Patch::Merge(json!({"status": status}));
        let params = PatchParams::default();
        let written = self.taken.patch_status(name, &params, &status).await;
        written.unwrap();
    }

    /// Asks for a snapshot, and has it taken.
    pub(super) async fn take(&self, name: &str, vm: &str) -> VirtualMachineSnapshot {
        let uid = self.snapshot(name, vm, json!({})).await;
        let volume = format!("vmsnapshot-{uid}-volume-seed");
        self.report(&volume, ready("2Gi")).await;
        self.snapshot_is(name, |snapshot| snapshot.status.ready_to_use == Some(true))
            .await
    }

    /// Asks for a restore.
    pub(super) async fn restore(&self, name: &str, target: &str, spec: Value) -> String {
        let mut object = json!({
            "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineRestore",
            "metadata": {"name": name}, "spec": spec,
        });
        object["spec"]["target"] = reference(target);
        let restore: VirtualMachineRestore = serde_json::from_value(object).unwrap();
        let made = self.restores.create(&PostParams::default(), &restore).await;
        made.unwrap().metadata.uid.unwrap()
    }

    /// Waits until a restore is as wanted.
    pub(super) async fn restore_is(
        &self,
        name: &str,
        wanted: impl Fn(&VirtualMachineRestore) -> bool,
    ) -> VirtualMachineRestore {
        let wanted = |found: Option<&VirtualMachineRestore>| found.is_some_and(&wanted);
        reached(&self.restores, name, wanted).await.unwrap()
    }
}

fn reference(vm: &str) -> Value {
    json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": vm})
}

/// The status of a volume's snapshot that can be restored.
pub(super) fn ready(size: &str) -> Value {
    json!({
        "creationTime": "2026-01-01T00:00:00Z", "readyToUse": true, "restoreSize": size,
    })
}

/// The reason of a condition.
pub(super) fn reason<'a>(conditions: &'a [Condition], kind: &str) -> &'a str {
    condition(conditions, kind).map_or("", |condition| condition.reason.as_str())
}

/// Waits until an object is as wanted.
pub(super) async fn reached<K>(
    api: &Api<K>,
    name: &str,
    wanted: impl Fn(Option<&K>) -> bool,
) -> Option<K>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let wait = await_condition(api.clone(), name, wanted);
    match tokio::time::timeout(LIMIT, wait).await {
        Ok(found) => found.unwrap(),
        Err(_) => panic!("{name} does not get there: {:#?}", api.get_opt(name).await),
    }
}
