//! DataVolumes that are made of what a DataSource names, or of a snapshot.

use kube::Api;
use kube::api::PostParams;
use podvisor_cluster::objects::{DataSource, DataVolumePhase as Phase, VolumeSnapshot, condition};
use serde_json::{Value, json};

use super::csi::{Storage, reached, ready, reason};
use super::datavolumes::Disks;
use super::scene::{Controller, Scene};

async fn name_it(scene: &Scene, name: &str, source: Value) -> Api<DataSource> {
    let sources: Api<DataSource> = Api::namespaced(scene.client.clone(), &scene.namespace);
    let source: DataSource = serde_json::from_value(json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource",
        "metadata": {"name": name}, "spec": {"source": source},
    }))
    .unwrap();
    sources
        .create(&PostParams::default(), &source)
        .await
        .unwrap();
    sources
}

#[tokio::test]
async fn a_data_volume_is_a_copy_of_what_its_data_source_names() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let disks = Disks::of(&scene);
    let _controller = Controller::start(&scene.namespace, "namer");
    let reference = json!({"kind": "DataSource", "name": "debian"});
    disks
        .create("copy", json!({"sourceRef": reference, "storage": {}}))
        .await;
    disks
        .volume("copy", |volume| {
            reason(&volume.status.conditions, "Running") == "CloneWithoutSource"
        })
        .await;
    let sources = name_it(&scene, "debian", json!({"pvc": {"name": "golden"}})).await;
    let is = |status: &'static str| {
        move |source: Option<&DataSource>| {
            let conditions = source.map(|source| source.status.conditions.as_slice());
            let ready = condition(conditions.unwrap_or_default(), "Ready");
            ready.is_some_and(|ready| ready.status == status)
        }
    };
    reached(&sources, "debian", is("False")).await;
    storage.claim("golden").await;
    reached(&sources, "debian", is("True")).await;
    disks.bind("copy").await;
    let volume = disks.in_phase("copy", Phase::CloneScheduled).await;
    let pod = disks.importer(&volume).await;
    let args = pod.spec.unwrap().containers[0].args.clone().unwrap();
    assert!(
        args.contains(&"--file=/source/disk.img".to_owned()),
        "{args:?}"
    );
    disks.succeed(&volume).await;
    disks.in_phase("copy", Phase::Succeeded).await;
}

#[tokio::test]
async fn a_data_volume_of_a_snapshot_is_filled_by_its_driver() {
    let scene = Scene::new().await;
    let storage = Storage::of(&scene).await;
    let disks = Disks::of(&scene);
    let _controller = Controller::start(&scene.namespace, "snapper");
    let source = json!({"snapshot": {"name": "golden"}});
    disks
        .create("disk", json!({"source": source, "storage": {}}))
        .await;
    disks
        .volume("disk", |volume| {
            reason(&volume.status.conditions, "Running") == "CloneWithoutSource"
        })
        .await;
    let taken: VolumeSnapshot = serde_json::from_value(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": "golden"}, "spec": {"source": {}},
    }))
    .unwrap();
    let params = PostParams::default();
    storage.taken.create(&params, &taken).await.unwrap();
    storage.report("golden", ready("3Gi")).await;
    disks
        .in_phase("disk", Phase::CloneFromSnapshotSourceInProgress)
        .await;
    let claim = disks.bind("disk").await;
    assert_eq!(claim.spec.unwrap().data_source.unwrap().name, "golden");
    disks.in_phase("disk", Phase::Succeeded).await;
}
