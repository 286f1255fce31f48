//! Restores into the machine that a snapshot was taken of, and into new ones.

use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use podvisor_cluster::objects::{
    ClonePhase, VirtualMachine, VirtualMachineClone, VirtualMachineInstance, VolumeState,
};
use serde_json::{Value, json};

use super::csi::{Storage, reached, ready, reason};
use super::scene::{Controller, Scene, machine};

fn of(snapshot: &str) -> Value {
    json!({"virtualMachineSnapshotName": snapshot})
}

fn is_locked(vm: &VirtualMachine) -> bool {
    vm.status.rest.contains_key("restoreInProgress")
}

/// The claim of the machine's volume `seed`.
fn claim(vm: &VirtualMachine) -> &str {
    let volumes = &vm.spec.template.as_ref().unwrap().spec["volumes"];
    let claim = &volumes[1]["persistentVolumeClaim"]["claimName"];
    claim.as_str().unwrap()
}

#[tokio::test]
async fn a_machine_is_restored_by_controllers_that_are_killed_at_each_step() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let start = |n: u8| Controller::named(&scene.namespace, "healer", &format!("healer-{n}"));
    let first = start(1);
    storage.machine("db").await;
    scene.becomes("db", "Stopped").await;
    storage.take("s", "db").await;
    let more = json!({"spec": {"template": {"spec": {"hostname": "changed"}}}});
    scene.patch("db", more).await;
    let uid = storage.restore("r", "db", of("s")).await;
    let name = format!("restore-{uid}-seed");
    reached(&storage.claims, &name, |found| found.is_some()).await;
    drop(first);
    let second = start(2);
    let made = storage.bind(&name).await;
    let spec = made.spec.unwrap();
    let source = spec.data_source.unwrap();
    assert_eq!(source.kind, "VolumeSnapshot");
    assert_eq!(
        spec.resources.unwrap().requests.unwrap()["storage"].0,
        "2Gi"
    );
    assert_eq!(spec.volume_name, None);
    let annotations = made.metadata.annotations.unwrap();
    assert_eq!(annotations["note"], "kept");
    assert!(!annotations.contains_key("pv.kubernetes.io/bind-completed"));
    drop(second);
    let _third = start(3);
    let restore = storage
        .restore_is("r", |restore| restore.status.complete == Some(true))
        .await;
    assert!(restore.status.restore_time.is_some());
    assert_eq!(
        reason(&restore.status.conditions, "Ready"),
        "Operation complete"
    );
    let vm = scene.vms.get("db").await.unwrap();
    assert_eq!(claim(&vm), name);
    assert!(!is_locked(&vm));
    assert_eq!(vm.spec.run_strategy.as_deref(), Some("Halted"));
    let spec = &vm.spec.template.as_ref().unwrap().spec;
    assert_eq!(spec.get("hostname"), None, "it is as it was");
    let owners = storage
        .claims
        .get(&name)
        .await
        .unwrap()
        .metadata
        .owner_references;
    assert_eq!(owners.unwrap()[0].name, "db");
}

#[tokio::test]
async fn a_new_machine_is_made_with_patches_and_names_of_its_own() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "maker");
    storage.machine("db").await;
    scene.becomes("db", "Stopped").await;
    storage.take("s", "db").await;
    let mut spec = of("s");
    spec["volumeRestorePolicy"] = json!("PrefixTargetName");
    spec["volumeRestoreOverrides"] = json!([{"volumeName": "seed", "labels": {"a": "b"}}]);
    spec["patches"] = json!([
        r#"{"op": "add", "path": "/spec/template/spec/hostname", "value": "copy"}"#,
        r#"{"op": "add", "path": "/metadata/labels/copy", "value": "yes"}"#,
    ]);
    storage.restore("r", "copy", spec).await;
    let made = storage.bind("copy-seed").await;
    let labels = made.metadata.labels.unwrap();
    assert_eq!((&*labels["a"], &*labels["of"]), ("b", "us"));
    storage
        .restore_is("r", |restore| restore.status.complete == Some(true))
        .await;
    let vm = scene.vms.get("copy").await.unwrap();
    assert_eq!(claim(&vm), "copy-seed");
    assert_eq!(vm.spec.template.as_ref().unwrap().spec["hostname"], "copy");
    assert_eq!(vm.metadata.labels.unwrap()["copy"], "yes");
    assert_eq!(vm.spec.run_strategy.as_deref(), Some("Halted"));
    let owned = |found: Option<&k8s_openapi::api::core::v1::PersistentVolumeClaim>| {
        let owners = found.and_then(|claim| claim.metadata.owner_references.as_ref());
        owners.is_some_and(|owners| owners[0].name == "copy")
    };
    reached(&storage.claims, "copy-seed", owned).await;

    // Another machine that exists is not overwritten, and a patch that does not fit fails.
    storage.restore("over", "copy", of("s")).await;
    storage
        .restore_is("over", |restore| {
            reason(&restore.status.conditions, "Progressing").contains("already exists")
        })
        .await;
    let mut spec = of("s");
    spec["patches"] = json!([r#"{"op": "remove", "path": "/spec/nothing"}"#]);
    let uid = storage.restore("misfit", "other", spec).await;
    storage.bind(&format!("restore-{uid}-seed")).await;
    storage
        .restore_is("misfit", |restore| {
            reason(&restore.status.conditions, "Failure").contains("spec.patches[0]")
        })
        .await;
    assert!(scene.vms.get_opt("other").await.unwrap().is_none());
}

#[tokio::test]
async fn a_running_target_is_waited_for_stopped_or_refused() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "patient");
    let _kubelet = scene.play_kubelet();
    storage.machine("db").await;
    scene.becomes("db", "Stopped").await;
    storage.take("s", "db").await;
    let run = json!({"spec": {"runStrategy": "Always"}});
    scene.patch("db", run.clone()).await;
    scene.becomes("db", "Running").await;
    let mut spec = of("s");
    spec["targetReadinessPolicy"] = json!("FailImmediate");
    storage.restore("at-once", "db", spec).await;
    storage
        .restore_is("at-once", |restore| {
            reason(&restore.status.conditions, "Failure") == "Restore target not ready"
        })
        .await;
    storage.restore("patient", "db", of("s")).await;
    storage
        .restore_is("patient", |restore| {
            reason(&restore.status.conditions, "Progressing") == "Waiting for target to be ready"
        })
        .await;
    storage
        .restores
        .delete("patient", &DeleteParams::default())
        .await
        .unwrap();
    reached(&storage.restores, "patient", |found| found.is_none()).await;
    let mut spec = of("s");
    spec["targetReadinessPolicy"] = json!("StopTarget");
    let uid = storage.restore("stops", "db", spec).await;
    let gone = |vmi: Option<&VirtualMachineInstance>| vmi.is_none();
    scene.instance("db", gone).await;
    let name = format!("restore-{uid}-seed");
    reached(&storage.claims, &name, |found| found.is_some()).await;
    // It does not start with half of its disks.
    scene.patch("db", run).await;
    storage.bind(&name).await;
    storage
        .restore_is("stops", |restore| restore.status.complete == Some(true))
        .await;
    let vm = scene.becomes("db", "Running").await;
    assert_eq!(claim(&vm), name);
    let pods = scene.pods.list(&ListParams::default()).await.unwrap();
    let spec = pods.items[0].spec.as_ref().unwrap();
    let volumes = spec.volumes.iter().flatten();
    let mut claims = volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref());
    assert!(claims.any(|claim| claim.claim_name == name));
}

#[tokio::test]
async fn disks_of_templates_are_restored_in_their_place() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "in-place");
    storage.claim("root").await;
    let mut vm = machine("db", "Halted");
    let source = json!({"http": {"url": "https://h/x.qcow2"}});
    let request = json!({"requests": {"storage": "1Gi"}});
    let template = json!([{
        "metadata": {
            "name": "root",
            "annotations": {"cdi.kubevirt.io/allowClaimAdoption": "true"},
        },
        "spec": {"source": source, "storage": {"resources": request}},
    }]);
    vm.spec.rest.insert("dataVolumeTemplates".into(), template);
    let volumes = &mut vm.spec.template.as_mut().unwrap().spec["volumes"];
    volumes[1] = json!({"name": "seed", "dataVolume": {"name": "root"}});
    scene.vms.create(&PostParams::default(), &vm).await.unwrap();
    scene.becomes("db", "Stopped").await;
    storage.take("s", "db").await;
    let before = storage.claims.get("root").await.unwrap().metadata.uid;
    let mut spec = of("s");
    spec["volumeRestorePolicy"] = json!("InPlace");
    storage.restore("r", "db", spec).await;
    let other = |found: Option<&k8s_openapi::api::core::v1::PersistentVolumeClaim>| {
        found.is_some_and(|claim| claim.metadata.uid != before)
    };
    // Nobody protects claims here, nor lets them go.
    finish_claims(&storage, "root").await;
    reached(&storage.claims, "root", other).await;
    let made = storage.bind("root").await;
    let annotations = made.metadata.annotations.unwrap();
    assert_eq!(annotations["cdi.kubevirt.io/storage.populatedFor"], "root");
    let restore = storage
        .restore_is("r", |restore| restore.status.complete == Some(true))
        .await;
    assert_eq!(
        restore.status.restores[0].data_volume_name.as_deref(),
        Some("root")
    );
    let disks = super::datavolumes::Disks::of(&scene);
    disks
        .volume("root", |volume| volume.state() == VolumeState::Ready)
        .await;
    let claim = storage.claims.get("root").await.unwrap();
    assert_eq!(
        claim.metadata.uid, made.metadata.uid,
        "nothing else was imported"
    );
}

/// Plays the controller that lets claims go which no pod uses.
async fn finish_claims(storage: &Storage, name: &str) {
    let going = |found: Option<&k8s_openapi::api::core::v1::PersistentVolumeClaim>| {
        found.is_none_or(|claim| {
            let metadata = &claim.metadata;
            metadata.deletion_timestamp.is_some()
                || metadata
                    .annotations
                    .as_ref()
                    .is_some_and(|all| all.contains_key("restore.kubevirt.io/lastRestoreUID"))
        })
    };
    reached(&storage.claims, name, going).await;
    let patch = kube::api::Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let params = kube::api::PatchParams::default();
    let _ = storage.claims.patch(name, &params, &patch).await;
}

#[tokio::test]
async fn a_copy_has_an_identity_of_its_own_and_leaves_no_snapshot() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let start = |n: u8| Controller::named(&scene.namespace, "copier", &format!("copier-{n}"));
    let first = start(1);
    storage.machine("db").await;
    let firmware = json!({"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"});
    let spec = json!({"template": {"spec": {"domain": {"firmware": firmware}}}});
    let patch = json!({"metadata": {"labels": {"keep": "1", "drop": "1"}}, "spec": spec});
    scene.patch("db", patch).await;
    scene.becomes("db", "Stopped").await;
    let clones: Api<VirtualMachineClone> = Api::namespaced(scene.client.clone(), &scene.namespace);
    let clone: VirtualMachineClone = serde_json::from_value(json!({
        "apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
        "metadata": {"name": "c"},
        "spec": {
            "source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "db"},
            "target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "copy"},
            "labelFilters": ["*", "!drop"],
        },
    }))
    .unwrap();
    let made = clones.create(&PostParams::default(), &clone).await.unwrap();
    let uid = made.metadata.uid.unwrap();
    let snapshot = format!("tmp-snapshot-{uid}");
    let taken = storage.snapshot_is(&snapshot, |_| true).await;
    drop(first);
    let second = start(2);
    let taken = taken.metadata.uid.unwrap();
    storage
        .report(&format!("vmsnapshot-{taken}-volume-seed"), ready("1Gi"))
        .await;
    let restore = format!("tmp-restore-{uid}");
    let restored = storage.restore_is(&restore, |_| true).await;
    drop(second);
    let _third = start(3);
    let restored = restored.metadata.uid.unwrap();
    storage.bind(&format!("restore-{restored}-seed")).await;
    let succeeded = |clone: Option<&VirtualMachineClone>| {
        clone.is_some_and(|clone| {
            let status = &clone.status;
            status.phase == ClonePhase::Succeeded && status.snapshot_name.is_none()
        })
    };
    let clone = reached(&clones, "c", succeeded).await.unwrap();
    assert_eq!(clone.status.target_name.as_deref(), Some("copy"));
    reached(&storage.snapshots, &snapshot, |found| found.is_none()).await;
    reached(&storage.restores, &restore, |found| found.is_none()).await;
    let vm = scene.vms.get("copy").await.unwrap();
    let labels = vm.metadata.labels.as_ref().unwrap();
    assert!(labels.contains_key("keep") && !labels.contains_key("drop"));
    let domain = &vm.spec.template.as_ref().unwrap().spec["domain"];
    assert_eq!(domain["firmware"].get("uuid"), None);
    assert_eq!(claim(&vm), format!("restore-{restored}-seed"));
}
