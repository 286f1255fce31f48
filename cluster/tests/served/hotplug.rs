//! Volumes that are plugged into instances while they run: as users ask for it, with the accounts
//! and rights of the components.

use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
};
use podvisor_node_api::messages::VmName;
use serde_json::{Value, json};

use super::{api_of, migrations, nodes, nodes::eventually, object, put_to, served, support, vm};
use support::kubelet::Kubelet;
use support::machines::{STUBBORN, StandIn};

const VM: &str = "virtualmachines";
const VMI: &str = "virtualmachineinstances";

/// A VM that runs on a node.
struct Scene {
    admin: Client,
    namespace: String,
    vmis: Api<DynamicObject>,
    pods: Api<Pod>,
    node: StandIn,
    vm: VmName,
    controller: Option<migrations::Task>,
    _kubelet: Kubelet,
}

impl Scene {
    async fn new(name: &str) -> Self {
        let admin = served().admin();
        let namespace = support::namespace(&admin).await;
        let node = nodes::serve(name).await;
        let kubelet = Kubelet::play_on(admin.clone(), &namespace, &[name]);
        let controller = Some(migrations::start_controller(&namespace));
        let mut made = vm("a", "Always");
        made.data["spec"]["template"]["spec"]["domain"]["memory"] = json!({ "guest": "128Mi" });
        let vms = api_of(&admin, &namespace, "VirtualMachine");
        vms.create(&PostParams::default(), &made).await.unwrap();
        let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
        let vmi = eventually("the VM runs", async || {
            let vmi = vmis.get_opt("a").await.unwrap()?;
            (vmi.data["status"]["phase"] == "Running").then_some(vmi)
        })
        .await;
        let vm = VmName::new(&namespace, "a", vmi.metadata.uid.unwrap());
        node.start(&vm, None);
        Self {
            pods: Api::namespaced(admin.clone(), &namespace),
            admin,
            namespace,
            vmis,
            node,
            vm,
            controller,
            _kubelet: kubelet,
        }
    }

    async fn claim(&self, name: &str, mode: &str) {
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.admin.clone(), &self.namespace);
        let claim = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        let claim = serde_json::from_value(claim).unwrap();
        claims.create(&PostParams::default(), &claim).await.unwrap();
    }

    /// Asks as virtctl does; returns the code.
    async fn ask(&self, resource: &str, sub: &str, body: &Value) -> u16 {
        let (namespace, body) = (&self.namespace, body.to_string());
        put_to(&self.admin, resource, namespace, "a", sub, &body).await
    }

    async fn entry(&self, volume: &str) -> Option<Value> {
        let vmi = self.vmis.get("a").await.unwrap();
        let entries = vmi.data["status"]["volumeStatus"].as_array()?.clone();
        entries.into_iter().find(|entry| entry["name"] == volume)
    }

    /// Waits for the phase of a volume; returns what is reported of it.
    async fn is(&self, volume: &str, phase: &str) -> Value {
        eventually(&format!("{volume} is {phase}"), async || {
            let entry = self.entry(volume).await?;
            (entry["phase"] == phase).then_some(entry)
        })
        .await
    }

    async fn is_gone(&self, volume: &str) {
        eventually(&format!("{volume} is gone"), async || {
            self.entry(volume).await.is_none().then_some(())
        })
        .await;
        eventually("its pod is gone", async || {
            self.keepers().await.is_empty().then_some(())
        })
        .await;
    }

    async fn keepers(&self) -> Vec<Pod> {
        let label = ListParams::default().labels("kubevirt.io=hotplug-disk");
        self.pods.list(&label).await.unwrap().items
    }

    async fn has_event(&self, reason: &str) {
        let events: Api<Event> = Api::namespaced(self.admin.clone(), &self.namespace);
        eventually(&format!("the event {reason}"), async || {
            let all = events.list(&ListParams::default()).await.unwrap().items;
            let mut reasons = all.iter().filter_map(|event| event.reason.as_deref());
            reasons.any(|found| found == reason).then_some(())
        })
        .await;
    }

    /// What the node was asked to do. It may be asked again, before the controller has seen that it
    /// has done it: that changes nothing.
    fn done(&self) -> Vec<String> {
        let mut done = self.node.machine(&self.vm).done;
        done.dedup();
        done
    }
}

/// A request as virtctl writes it.
fn add(name: &str, claim: &str) -> Value {
    json!({
        "name": name,
        "disk": { "disk": { "bus": "scsi" }, "serial": name },
        "volumeSource": { "persistentVolumeClaim": { "claimName": claim } },
    })
}

fn remove(name: &str) -> Value {
    json!({ "name": name })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_plugged_into_a_vm_that_runs_and_unplugged() {
    let mut scene = Scene::new("plugs").await;
    scene.claim("block", "Block").await;
    scene.claim("files", "Filesystem").await;
    // For this run of the VM alone.
    assert_eq!(
        scene.ask(VMI, "addvolume", &add("data", "block")).await,
        202
    );
    let entry = scene.is("data", "Ready").await;
    assert_eq!(entry["target"], "disk/by-id/virtio-data");
    let keepers = scene.keepers().await;
    let [keeper] = keepers.as_slice() else {
        panic!("{keepers:?}");
    };
    let meta = &keeper.metadata;
    let uid = meta.uid.clone().unwrap();
    assert_eq!(
        entry["hotplugVolume"],
        json!({ "attachPodName": meta.name, "attachPodUID": uid })
    );
    assert_eq!(scene.done(), [format!("plug {uid}")]);
    let vmi = scene.vmis.get("a").await.unwrap();
    let conditions = vmi.data["status"]["conditions"].as_array().unwrap();
    let migratable = conditions
        .iter()
        .find(|one| one["type"] == "LiveMigratable");
    let migratable = migratable.unwrap();
    assert_eq!(migratable["status"], "False");
    let message = migratable["message"].as_str().unwrap();
    assert!(message.contains("PVC block is not shared"), "{message}");
    // And for the next ones; another controller finds what there is.
    scene.controller = None;
    scene.controller = Some(migrations::start_controller(&scene.namespace));
    assert_eq!(scene.ask(VM, "addvolume", &add("more", "files")).await, 202);
    scene.is("more", "Ready").await;
    assert_eq!(scene.done().len(), 2, "{:?}", scene.done());
    let vms = api_of(&scene.admin, &scene.namespace, "VirtualMachine");
    let vm = vms.get("a").await.unwrap();
    let volumes = &vm.data["spec"]["template"]["spec"]["volumes"];
    assert_eq!(volumes[0]["name"], "more");
    assert_eq!(volumes.as_array().unwrap().len(), 1);
    let conditions = vm.data["status"]["conditions"].to_string();
    assert!(!conditions.contains("RestartRequired"), "{conditions}");
    // What cannot be.
    for (resource, body, code) in [
        (VMI, add("data", "other"), 409),
        (VMI, add("again", "block"), 409),
        (VM, add("more", "other"), 409),
        (VMI, add("x", "other/claim"), 422),
        (VMI, add("x", "../claim"), 422),
        (VM, add("x", "other/claim"), 422),
        (VMI, json!({ "name": "x" }), 400),
    ] {
        let found = scene.ask(resource, "addvolume", &body).await;
        assert_eq!(found, code, "{body}");
    }
    let mut lun = add("x", "other");
    lun["disk"] = json!({ "lun": {} });
    assert_eq!(scene.ask(VMI, "addvolume", &lun).await, 422);
    assert_eq!(scene.ask(VM, "addvolume", &lun).await, 422);
    assert_eq!(scene.ask(VMI, "removevolume", &remove("none")).await, 409);
    let vmi = scene.vmis.get("a").await.unwrap();
    assert_eq!(vmi.data["spec"]["volumes"].as_array().unwrap().len(), 2);

    assert_eq!(scene.ask(VM, "removevolume", &remove("more")).await, 202);
    assert_eq!(scene.ask(VMI, "removevolume", &remove("data")).await, 202);
    scene.is_gone("data").await;
    scene.is_gone("more").await;
    let mut last = scene.done().split_off(2);
    last.sort();
    last.dedup();
    assert_eq!(last, ["unplug data", "unplug more"]);
    scene.has_event("VolumeUnplugged").await;
    let vm = vms.get("a").await.unwrap();
    assert_eq!(vm.data["spec"]["template"]["spec"]["volumes"], json!([]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_keeps_a_volume_from_a_guest_is_told() {
    let scene = Scene::new("refuses").await;
    // No claim yet.
    let request = add(STUBBORN, "late");
    assert_eq!(scene.ask(VMI, "addvolume", &request).await, 202);
    let entry = scene.is(STUBBORN, "Pending").await;
    assert_eq!(entry["reason"], "PVCNotFound");
    // Another VM has it.
    let why = "the disk is in use by another virtual machine";
    *scene.node.refuses_disks.lock().unwrap() = Some(why.to_owned());
    scene.claim("late", "Block").await;
    let refused = eventually("the refusal is told", async || {
        let entry = scene.entry(STUBBORN).await?;
        (entry["reason"] == "HotplugFailed").then_some(entry)
    })
    .await;
    assert_eq!(refused["phase"], "MountedToPod");
    assert!(refused["message"].as_str().unwrap().contains("in use"));
    scene.has_event("HotplugFailed").await;
    // It is tried again.
    *scene.node.refuses_disks.lock().unwrap() = None;
    scene.is(STUBBORN, "Ready").await;
    // A guest that does not release it.
    let removed = scene.ask(VMI, "removevolume", &remove(STUBBORN)).await;
    assert_eq!(removed, 202);
    scene.is_gone(STUBBORN).await;
    scene.has_event("VolumeForciblyUnplugged").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_of_a_vm_comes_back_with_its_next_instance() {
    let scene = Scene::new("returns").await;
    scene.claim("kept", "Block").await;
    assert_eq!(scene.ask(VM, "addvolume", &add("kept", "kept")).await, 202);
    scene.is("kept", "Ready").await;
    let params = DeleteParams::default();
    scene.vmis.delete("a", &params).await.unwrap();
    let next = eventually("the next instance runs", async || {
        let vmi = scene.vmis.get_opt("a").await.unwrap()?;
        let is_next = vmi.metadata.uid.as_deref() != Some(&scene.vm.uid);
        (is_next && vmi.data["status"]["phase"] == "Running").then_some(vmi)
    })
    .await;
    // A guest that shuts down is not asked for its disks.
    assert_eq!(scene.done().len(), 1, "{:?}", scene.done());
    let uid = next.metadata.uid.unwrap();
    scene
        .node
        .start(&VmName::new(&scene.namespace, "a", uid), None);
    scene.is("kept", "Ready").await;
    let label = ListParams::default().labels("kubevirt.io=virt-launcher");
    for pod in scene.pods.list(&label).await.unwrap().items {
        let volumes = pod.spec.unwrap().volumes.unwrap_or_default();
        let claims = volumes
            .iter()
            .filter(|one| one.persistent_volume_claim.is_some());
        assert_eq!(claims.count(), 0, "it is not the VM's own pod that has it");
    }
}

#[tokio::test]
async fn an_instance_that_does_not_run_gets_no_volume() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let spec = json!({ "domain": { "memory": { "guest": "128Mi" } } });
    let vmi = object("VirtualMachineInstance", "a", spec);
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    vmis.create(&PostParams::default(), &vmi).await.unwrap();
    let body = add("data", "c").to_string();
    assert_eq!(
        put_to(&admin, VMI, &namespace, "a", "addvolume", &body).await,
        409
    );
}
