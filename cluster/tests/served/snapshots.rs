//! Snapshots of a machine that runs: its guest is frozen by its node, with the rights that install
//! gives the controller.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams,
};
use kube::{Api, Client};
use podvisor_node_api::messages::VmName;
use serde_json::{Value, json};

use super::{api_of, code, migrations, nodes, nodes::eventually, object, served, support};
use support::kubelet::Kubelet;
use support::{csi, machines};

pub(super) fn of_kind(
    client: &Client,
    namespace: &str,
    group: &str,
    kind: &str,
) -> Api<DynamicObject> {
    let version = if group == "snapshot.kubevirt.io" {
        "v1beta1"
    } else {
        "v1"
    };
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    Api::namespaced_with(client.clone(), namespace, &resource)
}

pub(super) fn of(kind: &str, name: &str, spec: Value) -> DynamicObject {
    let gvk = GroupVersionKind::gvk("snapshot.kubevirt.io", "v1beta1", kind);
    DynamicObject::new(name, &ApiResource::from_gvk(&gvk)).data(json!({ "spec": spec }))
}

pub(super) fn reference(name: &str) -> Value {
    json!({ "apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name })
}

pub(super) async fn claim(client: &Client, namespace: &str, name: &str) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let claim = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": csi::CLASS,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    }))
    .unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    let params = PatchParams::default();
    claims.patch_status(name, &params, &bound).await.unwrap();
}

#[tokio::test]
async fn a_guest_is_frozen_while_its_disks_are_taken_and_its_vm_is_locked() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    csi::install(&admin).await;
    let machines = nodes::serve("frozen").await;
    let _kubelet = Kubelet::play_on(admin.clone(), &namespace, &["frozen"]);
    let _controller = migrations::start_controller(&namespace);
    claim(&admin, &namespace, "data").await;
    let template = json!({ "spec": {
        "domain": { "memory": { "guest": "128Mi" } },
        "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
    } });
    let spec = json!({ "runStrategy": "Manual", "template": template });
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let params = PostParams::default();
    let vm = object("VirtualMachine", "a", spec);
    vms.create(&params, &vm).await.unwrap();
    let start =
        async || (super::put(&admin, &namespace, "a", "start", "").await == 202).then_some(());
    eventually("the VM is started", start).await;
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let phase = async || {
        let vmi = vmis.get_opt("a").await.unwrap()?;
        (vmi.data["status"]["phase"] == "Running").then_some(vmi)
    };
    let vmi = eventually("the VM runs", phase).await;
    let key = VmName::new(&namespace, "a", vmi.metadata.uid.unwrap());
    machines.start(&key, Some(machines::guest()));
    eventually("the agent is seen", async || {
        let vmi = vmis.get("a").await.unwrap();
        let conditions = vmi.data["status"]["conditions"].as_array()?.clone();
        let agent = |found: &&Value| found["type"] == "AgentConnected";
        conditions.iter().find(agent).map(drop)
    })
    .await;

    let group = "snapshot.kubevirt.io";
    let snapshots = of_kind(&admin, &namespace, group, "VirtualMachineSnapshot");
    let snapshot = of(
        "VirtualMachineSnapshot",
        "s",
        json!({ "source": reference("a") }),
    );
    let uid = snapshots.create(&params, &snapshot).await.unwrap();
    let uid = uid.metadata.uid.unwrap();
    let taken = of_kind(
        &admin,
        &namespace,
        "snapshot.storage.k8s.io",
        "VolumeSnapshot",
    );
    let name = format!("vmsnapshot-{uid}-volume-data");
    eventually("the disk is to be taken", async || {
        taken.get_opt(&name).await.unwrap()
    })
    .await;
    let done = machines.machine(&key).done;
    assert!(done.last().unwrap().starts_with("freeze "), "{done:?}");
    let more = json!([{ "name": "more", "emptyDisk": { "capacity": "1Gi" } }]);
    let more = json!({ "spec": { "template": { "spec": { "volumes": more } } } });
    let user = served().client("somebody", &["system:masters"]);
    let locked = api_of(&user, &namespace, "VirtualMachine");
    let change = locked
        .patch("a", &PatchParams::default(), &Patch::Merge(more))
        .await;
    assert_eq!(code(change), 422, "its disks are taken");
    assert!(!machines.machine(&key).done.contains(&"thaw".to_owned()));

    let status = json!({ "creationTime": "2026-01-01T00:00:00Z", "readyToUse": true });
    let status = Patch::Merge(json!({ "status": status }));
    taken
        .patch_status(&name, &PatchParams::default(), &status)
        .await
        .unwrap();
    let found = eventually("the snapshot is ready", async || {
        let found = snapshots.get("s").await.unwrap();
        (found.data["status"]["readyToUse"] == true).then_some(found)
    })
    .await;
    assert_eq!(found.data["status"]["phase"], "Succeeded");
    assert_eq!(
        found.data["status"]["indications"],
        json!(["Online", "GuestAgent"])
    );
    assert_eq!(machines.machine(&key).done.last().unwrap(), "thaw");
    eventually("the VM is unlocked", async || {
        let status = vms.get("a").await.unwrap().data["status"].clone();
        status["snapshotInProgress"].is_null().then_some(())
    })
    .await;
    snapshots
        .delete("s", &DeleteParams::default())
        .await
        .unwrap();
    eventually("the snapshot goes", async || {
        let found = snapshots.get_opt("s").await.unwrap();
        found.is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn snapshots_and_restores_are_judged_in_both_versions() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let params = PostParams::default();
    let group = "snapshot.kubevirt.io";
    let snapshots = of_kind(&admin, &namespace, group, "VirtualMachineSnapshot");
    let wrong = json!({ "source": { "kind": "VirtualMachine", "name": "a" } });
    let wrong = of("VirtualMachineSnapshot", "s", wrong);
    let Err(kube::Error::Api(status)) = snapshots.create(&params, &wrong).await else {
        panic!("it is taken")
    };
    assert_eq!(status.code, 422);
    let causes = status.details.unwrap().causes;
    assert_eq!(causes[0].field, "spec.source.apiGroup");
    assert_eq!(causes[0].reason, "FieldValueNotFound");
    let mut right = of(
        "VirtualMachineSnapshot",
        "s",
        json!({ "source": reference("a") }),
    );
    snapshots.create(&params, &right).await.unwrap();
    let change = json!({ "spec": { "failureDeadline": "1m" } });
    let change = Patch::Merge(change);
    let changed = snapshots.patch("s", &PatchParams::default(), &change).await;
    assert_eq!(code(changed), 422, "it does not change");
    let gvk = GroupVersionKind::gvk(group, "v1alpha1", "VirtualMachineSnapshot");
    let old = ApiResource::from_gvk(&gvk);
    let old: Api<DynamicObject> = Api::namespaced_with(admin.clone(), &namespace, &old);
    right.types.as_mut().unwrap().api_version = format!("{group}/v1alpha1");
    right.data["spec"]["source"]["kind"] = json!("Pod");
    right.metadata.name = Some("t".to_owned());
    assert_eq!(code(old.create(&params, &right).await), 422);

    let restores = of_kind(&admin, &namespace, group, "VirtualMachineRestore");
    let spec = json!({ "target": reference("a"), "virtualMachineSnapshotName": "s" });
    let restore = |name: &str| of("VirtualMachineRestore", name, spec.clone());
    restores.create(&params, &restore("first")).await.unwrap();
    assert_eq!(
        code(restores.create(&params, &restore("second")).await),
        422
    );
    // What a snapshot contains is written by the system, and may be read and removed by users.
    let bind = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": { "name": "edits", "namespace": namespace },
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
            "name": "podvisor-vm-edit",
        },
        "subjects": [{
            "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "snapshot-editor",
        }],
    });
    super::apply(&admin, &bind, false).await;
    let editor = served().client("snapshot-editor", &[]);
    let contents = of_kind(&editor, &namespace, group, "VirtualMachineSnapshotContent");
    eventually("the right is known", async || {
        contents.list(&Default::default()).await.ok()
    })
    .await;
    let content = of("VirtualMachineSnapshotContent", "c", json!({}));
    assert_eq!(code(contents.create(&params, &content).await), 403);
}
