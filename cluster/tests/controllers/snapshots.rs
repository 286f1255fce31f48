//! Snapshots of machines that do not run; the tests play the driver of their volumes.

use kube::api::{DeleteParams, PostParams};
use podvisor_cluster::controller::snapshot::SOURCE_FINALIZER;
use podvisor_cluster::objects::{SnapshotPhase, VirtualMachine};
use serde_json::json;

use super::csi::{Storage, reached, ready, reason};
use super::scene::{Controller, Scene, machine};

fn holder(vm: &VirtualMachine) -> Option<&str> {
    vm.status.rest.get("snapshotInProgress")?.as_str()
}

#[tokio::test]
async fn a_snapshot_is_taken_by_controllers_that_are_killed_at_each_step() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let start = |n: u8| Controller::named(&scene.namespace, "taker", &format!("taker-{n}"));
    let first = start(1);
    storage.machine("db").await;
    let vm = scene.becomes("db", "Stopped").await;
    let volumes = &vm.status.rest["volumeSnapshotStatuses"];
    assert_eq!(volumes[0]["enabled"], false, "{volumes}");
    assert_eq!(volumes[1], json!({"name": "seed", "enabled": true}));
    let uid = storage.snapshot("s", "db", json!({})).await;
    let content = format!("vmsnapshot-content-{uid}");
    reached(&storage.contents, &content, |found| found.is_some()).await;
    drop(first);
    let second = start(2);
    let volume = format!("vmsnapshot-{uid}-volume-seed");
    let taken = reached(&storage.taken, &volume, |found| found.is_some()).await;
    let taken = taken.unwrap();
    assert_eq!(taken.spec["source"]["persistentVolumeClaimName"], "db-data");
    assert_eq!(taken.spec["volumeSnapshotClassName"], "fast");
    let owner = &taken.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(owner.name, content);
    let vm = scene.vms.get("db").await.unwrap();
    assert_eq!(holder(&vm), Some("s"));
    let finalizers = vm.metadata.finalizers.unwrap();
    assert!(finalizers.contains(&SOURCE_FINALIZER.to_owned()));
    drop(second);

    storage
        .report(
            &volume,
            json!({"creationTime": "2026-01-01T00:00:00Z", "readyToUse": false}),
        )
        .await;
    let third = start(3);
    let snapshot = storage
        .snapshot_is("s", |snapshot| {
            snapshot.status.phase == SnapshotPhase::Succeeded
        })
        .await;
    assert_eq!(snapshot.status.ready_to_use, Some(false));
    assert_eq!(snapshot.status.source_uid, vm.metadata.uid);
    assert!(snapshot.status.indications.is_empty());
    let volumes = snapshot.status.snapshot_volumes.unwrap();
    assert_eq!(volumes.included_volumes, ["seed"]);
    assert_eq!(volumes.excluded_volumes, ["root"]);
    let unlocked = |vm: Option<&VirtualMachine>| {
        vm.is_some_and(|vm| {
            let finalizers = vm.metadata.finalizers.iter().flatten();
            holder(vm).is_none() && !finalizers.into_iter().any(|name| name == SOURCE_FINALIZER)
        })
    };
    reached(&scene.vms, "db", unlocked).await;
    drop(third);
    storage.report(&volume, ready("1Gi")).await;
    let _fourth = start(4);
    let snapshot = storage
        .snapshot_is("s", |snapshot| snapshot.status.ready_to_use == Some(true))
        .await;
    assert_eq!(reason(&snapshot.status.conditions, "Ready"), "Ready");
    let content = storage.contents.get(&content).await.unwrap();
    let source = content.spec.source.virtual_machine.unwrap();
    assert_eq!(source.spec, vm.spec);
    assert_eq!(content.status.ready_to_use, Some(true));
}

#[tokio::test]
async fn a_snapshot_that_takes_too_long_fails_and_unlocks_its_machine() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "late");
    storage.machine("db").await;
    scene.becomes("db", "Stopped").await;
    let spec = json!({"failureDeadline": "3s"});
    let uid = storage.snapshot("s", "db", spec).await;
    let failed = |phase| phase == SnapshotPhase::Failed;
    let snapshot = storage
        .snapshot_is("s", |snapshot| failed(snapshot.status.phase))
        .await;
    let message = snapshot.status.error.unwrap().message.unwrap();
    assert!(message.contains("deadline exceeded"), "{message}");
    assert_eq!(
        reason(&snapshot.status.conditions, "Failure"),
        "snapshot deadline exceeded"
    );
    let content = format!("vmsnapshot-content-{uid}");
    reached(&storage.contents, &content, |found| found.is_none()).await;
    let free = |vm: Option<&VirtualMachine>| vm.is_some_and(|vm| holder(vm).is_none());
    reached(&scene.vms, "db", free).await;
}

#[tokio::test]
async fn what_a_snapshot_contains_goes_or_stays_as_it_says() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "keeper");
    storage.machine("db").await;
    scene.becomes("db", "Stopped").await;
    for (name, policy, stays) in [("gone", "Delete", false), ("kept", "Retain", true)] {
        let spec = json!({"deletionPolicy": policy});
        let uid = storage.snapshot(name, "db", spec).await;
        let volume = format!("vmsnapshot-{uid}-volume-seed");
        storage.report(&volume, ready("1Gi")).await;
        storage
            .snapshot_is(name, |snapshot| snapshot.status.ready_to_use == Some(true))
            .await;
        let params = DeleteParams::default();
        storage.snapshots.delete(name, &params).await.unwrap();
        reached(&storage.snapshots, name, |found| found.is_none()).await;
        let content = format!("vmsnapshot-content-{uid}");
        let content = storage.contents.get_opt(&content).await.unwrap();
        assert_eq!(content.is_some(), stays, "{policy}");
    }
}

#[tokio::test]
async fn a_snapshot_waits_for_its_machine_and_takes_what_can_be_taken() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let _controller = Controller::start(&scene.namespace, "waiter");
    storage.snapshot("s", "later", json!({})).await;
    storage
        .snapshot_is("s", |snapshot| {
            reason(&snapshot.status.conditions, "Progressing") == "Source does not exist"
        })
        .await;
    // Its claim has no class: no snapshot of it can be taken.
    let claim = serde_json::from_value(json!({
        "metadata": {"name": "plain"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }))
    .unwrap();
    let params = PostParams::default();
    storage.claims.create(&params, &claim).await.unwrap();
    let mut vm = machine("later", "Halted");
    let volumes = &mut vm.spec.template.as_mut().unwrap().spec["volumes"];
    volumes[1] = json!({"name": "seed", "persistentVolumeClaim": {"claimName": "plain"}});
    scene.vms.create(&params, &vm).await.unwrap();
    let snapshot = storage
        .snapshot_is("s", |snapshot| snapshot.status.ready_to_use == Some(true))
        .await;
    assert_eq!(snapshot.status.indications, ["PartialSnapshot"]);
    let volumes = snapshot.status.snapshot_volumes.unwrap();
    assert_eq!(volumes.excluded_volumes, ["root", "seed"]);
}
