//! DataVolumes: the tests play the provisioner and the importer.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Resource as _};
use podvisor_cluster::objects::{self, DataVolume, DataVolumePhase, VirtualMachine, VolumeState};
use serde_json::{Value, json};

use super::scene::{Controller, LIMIT, Scene, machine};
use super::support::kubelet;

/// The objects of DataVolumes in a namespace.
pub(super) struct Disks {
    volumes: Api<DataVolume>,
    claims: Api<PersistentVolumeClaim>,
    pods: Api<Pod>,
}

impl Disks {
    pub(super) fn of(scene: &Scene) -> Self {
        Self {
            volumes: Api::namespaced(scene.client.clone(), &scene.namespace),
            claims: Api::namespaced(scene.client.clone(), &scene.namespace),
            pods: scene.pods.clone(),
        }
    }

    pub(super) async fn create(&self, name: &str, spec: Value) {
        let volume: DataVolume = serde_json::from_value(json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "metadata": {"name": name}, "spec": spec,
        }))
        .unwrap();
        let made = self.volumes.create(&PostParams::default(), &volume).await;
        made.unwrap();
    }

    /// Waits until a DataVolume is as wanted.
    pub(super) async fn volume(
        &self,
        name: &str,
        wanted: impl Fn(&DataVolume) -> bool,
    ) -> DataVolume {
        let reached = |volume: Option<&DataVolume>| volume.is_some_and(&wanted);
        let wait = await_condition(self.volumes.clone(), name, reached);
        match tokio::time::timeout(LIMIT, wait).await {
            Ok(volume) => volume.unwrap().unwrap(),
            Err(_) => panic!("{:#?}", self.volumes.get_opt(name).await),
        }
    }

    pub(super) async fn in_phase(&self, name: &str, phase: DataVolumePhase) -> DataVolume {
        self.volume(name, |volume| volume.status.phase == phase)
            .await
    }

    /// Waits for a claim, and binds it.
    pub(super) async fn bind(&self, name: &str) -> PersistentVolumeClaim {
        let exists = |claim: Option<&PersistentVolumeClaim>| claim.is_some();
        let wait = await_condition(self.claims.clone(), name, exists);
        let found = tokio::time::timeout(LIMIT, wait).await;
        found.expect("there is no claim").unwrap();
        let bound = Patch::Merge(json!({"status": {"phase": "Bound"}}));
        let params = PatchParams::default();
        self.claims
            .patch_status(name, &params, &bound)
            .await
            .unwrap()
    }

    /// Waits for the importer of a DataVolume.
    pub(super) async fn importer(&self, volume: &DataVolume) -> Pod {
        let uid = volume.meta().uid.clone().unwrap();
        let list = ListParams::default().labels("cdi.kubevirt.io=importer");
        self.pod(&list, |pod| {
            let owners = pod.metadata.owner_references.iter().flatten();
            pod.metadata.deletion_timestamp.is_none()
                && owners.into_iter().any(|owner| owner.uid == uid)
        })
        .await
    }

    /// Waits for a pod.
    async fn pod(&self, list: &ListParams, wanted: impl Fn(&Pod) -> bool) -> Pod {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let pods = self.pods.list(list).await.unwrap();
            if let Some(pod) = pods.items.into_iter().find(&wanted) {
                return pod;
            }
            assert!(tokio::time::Instant::now() < deadline, "no such pod");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// Reports of an importer's container.
    async fn report(&self, pod: &Pod, phase: &str, restarts: i32, state: Value, last: Value) {
        let name = pod.metadata.name.as_deref().unwrap();
        let container = json!({
            "name": "importer", "image": "i", "imageID": "i", "ready": false,
            "restartCount": restarts, "state": state, "lastState": last,
        });
        let status = json!({"phase": phase, "containerStatuses": [container]});
        kubelet::set_status(&self.pods, name, status).await;
    }

    pub(super) async fn succeed(&self, volume: &DataVolume) {
        let pod = self.importer(volume).await;
        let done = json!({"terminated": {"exitCode": 0}});
        self.report(&pod, "Succeeded", 0, done, json!({})).await;
    }
}

fn spec(source: Value) -> Value {
    let request = json!({"requests": {"storage": "1Gi"}});
    json!({"source": source, "storage": {"resources": request}})
}

fn with_template(name: &str) -> VirtualMachine {
    let mut vm = machine(name, "Always");
    let disk = format!("{name}-disk");
    let template = json!([{
        "metadata": {"name": disk}, "spec": spec(json!({"http": {"url": "https://h/x.qcow2"}})),
    }]);
    vm.spec.rest.insert("dataVolumeTemplates".into(), template);
    let volumes = &mut vm.spec.template.as_mut().unwrap().spec["volumes"];
    volumes[0] = json!({"name": "root", "dataVolume": {"name": disk}});
    vm
}

#[tokio::test]
async fn a_machine_waits_for_the_disk_of_its_template() {
    let scene = Scene::new().await;
    let disks = Disks::of(&scene);
    let _controller = Controller::start(&scene.namespace, "disks");
    let (params, vm) = (PostParams::default(), with_template("vm"));
    scene.vms.create(&params, &vm).await.unwrap();
    scene.becomes("vm", "Provisioning").await;
    let claim = disks.bind("vm-disk").await;
    let size = &claim.spec.unwrap().resources.unwrap().requests.unwrap()["storage"];
    assert_eq!(size.0, "1084Mi");
    let volume = disks
        .in_phase("vm-disk", DataVolumePhase::ImportScheduled)
        .await;
    assert!(scene.vmis.get_opt("vm").await.unwrap().is_none());

    let pod = disks.importer(&volume).await;
    let failed = json!({"terminated": {"exitCode": 1, "message": "there is no https://h/x.qcow2"}});
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    disks.report(&pod, "Running", 1, waiting, failed).await;
    scene.becomes("vm", "DataVolumeError").await;
    let volume = disks
        .volume("vm-disk", |volume| volume.state() == VolumeState::Retrying)
        .await;
    assert_eq!(volume.status.restart_count, Some(1));
    let running = objects::condition(&volume.status.conditions, "Running").unwrap();
    assert_eq!(running.message, "there is no https://h/x.qcow2");

    let runs = json!({"running": {}});
    disks.report(&pod, "Running", 1, runs, json!({})).await;
    scene.becomes("vm", "Provisioning").await;
    disks.succeed(&volume).await;
    let volume = disks.in_phase("vm-disk", DataVolumePhase::Succeeded).await;
    assert_eq!(volume.status.progress, "100.0%");
    let owner = &volume.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.name.as_str()),
        ("VirtualMachine", "vm")
    );

    scene.becomes("vm", "Starting").await;
    let _kubelet = scene.play_kubelet();
    scene.becomes("vm", "Running").await;
    let launchers = ListParams::default().labels("kubevirt.io=virt-launcher");
    let pods = scene.pods.list(&launchers).await.unwrap();
    let volumes = pods.items[0]
        .spec
        .as_ref()
        .unwrap()
        .volumes
        .as_ref()
        .unwrap();
    let claim = volumes
        .iter()
        .find_map(|volume| volume.persistent_volume_claim.as_ref());
    assert_eq!(claim.unwrap().claim_name, "vm-disk");
}

#[tokio::test]
async fn a_controller_that_is_killed_at_any_step_imports_once() {
    let scene = Scene::new().await;
    let disks = Disks::of(&scene);
    let start = |n: u8| Controller::named(&scene.namespace, "killed", &format!("killed-{n}"));
    let first = start(1);
    disks.create("a", spec(json!({"blank": {}}))).await;
    disks.bind("a").await;
    drop(first);
    let second = start(2);
    let volume = disks.in_phase("a", DataVolumePhase::ImportScheduled).await;
    let pod = disks.importer(&volume).await;
    drop(second);
    disks.succeed(&volume).await;
    let third = start(3);
    disks.in_phase("a", DataVolumePhase::Succeeded).await;
    drop(third);
    let gone = await_condition(scene.pods.clone(), pod.metadata.name.as_deref().unwrap(), {
        |pod: Option<&Pod>| pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
    });
    // The status is lost, as by a backup without it.
    let lost = Patch::Merge(json!({"status": null}));
    let params = PatchParams::default();
    disks
        .volumes
        .patch_status("a", &params, &lost)
        .await
        .unwrap();
    let _fourth = start(4);
    disks.in_phase("a", DataVolumePhase::Succeeded).await;
    tokio::time::timeout(LIMIT, gone).await.unwrap().unwrap();
    let list = ListParams::default().labels("cdi.kubevirt.io=importer");
    for pod in scene.pods.list(&list).await.unwrap() {
        assert!(
            pod.metadata.deletion_timestamp.is_some(),
            "it imports again"
        );
    }
}

#[tokio::test]
async fn a_copy_is_made_when_nobody_writes_to_its_source() {
    let scene = Scene::new().await;
    let disks = Disks::of(&scene);
    let user: Pod = serde_json::from_value(json!({
        "metadata": {"name": "user"},
        "spec": {
            "containers": [{"name": "a", "image": "a"}],
            "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "golden"}}],
        },
    }))
    .unwrap();
    let params = PostParams::default();
    scene.pods.create(&params, &user).await.unwrap();
    let _controller = Controller::start(&scene.namespace, "copies");
    disks.create("golden", spec(json!({"blank": {}}))).await;
    let source = json!({"pvc": {"name": "golden", "namespace": scene.namespace}});
    disks
        .create("copy", json!({"source": source, "storage": {}}))
        .await;
    disks.bind("golden").await;
    let golden = disks
        .in_phase("golden", DataVolumePhase::ImportScheduled)
        .await;
    disks.succeed(&golden).await;
    disks.bind("copy").await;
    disks
        .volume("copy", |volume| {
            let running = objects::condition(&volume.status.conditions, "Running");
            running.is_some_and(|running| running.reason == "CloneSourceInUse")
        })
        .await;
    let at_once = DeleteParams::default().grace_period(0);
    scene.pods.delete("user", &at_once).await.unwrap();
    let copy = disks
        .in_phase("copy", DataVolumePhase::CloneScheduled)
        .await;
    let pod = disks.importer(&copy).await;
    let args = pod.spec.unwrap().containers[0].args.clone().unwrap();
    assert!(
        args.contains(&"--file=/source/disk.img".to_owned()),
        "{args:?}"
    );
    disks.succeed(&copy).await;
    disks.in_phase("copy", DataVolumePhase::Succeeded).await;

    let name = "cdi.kubevirt.io/storage.deleteAfterCompletion";
    let drop = Patch::Merge(json!({"metadata": {"annotations": {name: "true"}}}));
    let params = PatchParams::default();
    disks.volumes.patch("copy", &params, &drop).await.unwrap();
    let gone = await_condition(
        disks.volumes.clone(),
        "copy",
        |volume: Option<&DataVolume>| volume.is_none(),
    );
    tokio::time::timeout(LIMIT, gone).await.unwrap().unwrap();
    let claim = disks.claims.get("copy").await.unwrap();
    assert_eq!(claim.metadata.owner_references, None);
    assert_eq!(claim.metadata.deletion_timestamp, None);
}

#[tokio::test]
async fn a_class_that_waits_for_a_consumer_and_a_claim_of_others_are_left_alone() {
    let scene = Scene::new().await;
    let disks = Disks::of(&scene);
    let classes: Api<StorageClass> = Api::all(scene.client.clone());
    let class: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": "waits"}, "provisioner": "example.com/disks",
        "volumeBindingMode": "WaitForFirstConsumer",
    }))
    .unwrap();
    classes
        .create(&PostParams::default(), &class)
        .await
        .unwrap();
    let _controller = Controller::start(&scene.namespace, "waits");
    let mut waits = spec(json!({"blank": {}}));
    waits["storage"]["storageClassName"] = json!("waits");
    disks.create("later", waits).await;
    disks
        .in_phase("later", DataVolumePhase::WaitForFirstConsumer)
        .await;
    disks.bind("later").await;
    let volume = disks
        .in_phase("later", DataVolumePhase::ImportScheduled)
        .await;
    disks.importer(&volume).await;

    let mut vm = with_template("vm");
    let templates = vm.spec.rest.get_mut("dataVolumeTemplates").unwrap();
    templates[0]["spec"]["storage"]["storageClassName"] = json!("waits");
    scene.vms.create(&PostParams::default(), &vm).await.unwrap();
    scene.becomes("vm", "WaitingForVolumeBinding").await;
    let uses_claim = |pod: &Pod| {
        let volumes = pod.spec.as_ref().unwrap().volumes.iter().flatten();
        let mut claims = volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref());
        claims.any(|claim| claim.claim_name == "vm-disk")
    };
    let consumers = ListParams::default().labels("kubevirt.io=virt-consumer");
    let consumer = disks.pod(&consumers, |_| true).await;
    assert!(uses_claim(&consumer), "{consumer:?}");
    // The scheduler chose a node for it: now the importer comes, too.
    let chosen = json!({"volume.kubernetes.io/selected-node": "n"});
    let chosen = Patch::Merge(json!({"metadata": {"annotations": chosen}}));
    let params = PatchParams::default();
    disks
        .claims
        .patch("vm-disk", &params, &chosen)
        .await
        .unwrap();
    let volume = disks.in_phase("vm-disk", DataVolumePhase::Pending).await;
    disks.importer(&volume).await;

    let foreign: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {"name": "taken"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }))
    .unwrap();
    let params = PostParams::default();
    disks.claims.create(&params, &foreign).await.unwrap();
    disks.create("taken", spec(json!({"blank": {}}))).await;
    disks
        .volume("taken", |volume| {
            let bound = objects::condition(&volume.status.conditions, "Bound");
            bound.is_some_and(|bound| bound.reason == "ErrResourceExists")
        })
        .await;
    let going = DeleteParams::default();
    disks.volumes.delete("taken", &going).await.unwrap();
    assert!(disks.claims.get("taken").await.is_ok());
}
