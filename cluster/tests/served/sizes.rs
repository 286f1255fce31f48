//! CPUs, memory and links that instances get while they run: as users ask for it, with the
//! accounts and rights of the components.

use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use podvisor_node_api::messages::VmName;
use serde_json::{Value, json};

use super::{SYSTEM, api_of, migrations, nodes, nodes::eventually, served, support, vm, vmi};
use support::kubelet::Kubelet;

/// Whether changes of templates are live, in all tests: other ones do not look at it.
async fn set_live(is_live: bool) {
    let strategy = is_live.then_some("LiveUpdate");
    let change = json!({ "spec": { "configuration": { "vmRolloutStrategy": strategy } } });
    let objects = api_of(&served().admin(), SYSTEM, "KubeVirt");
    let (params, change) = (PatchParams::default(), Patch::Merge(change));
    // A controller that has just begun makes the object.
    eventually("it is decided", async || {
        objects.patch("kubevirt", &params, &change).await.ok()
    })
    .await;
}

/// Waits until instances are made with bounds.
async fn is_heeded(namespace: &str) {
    let vmis = api_of(&served().admin(), namespace, "VirtualMachineInstance");
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let memory = json!({ "memory": { "guest": "1Gi" } });
    eventually("it is heeded", async || {
        let made = vmis.create(&params, &vmi("dry", memory.clone())).await;
        let domain = &made.unwrap().data["spec"]["domain"];
        let most = (&domain["cpu"]["maxSockets"], &domain["memory"]["maxGuest"]);
        (most == (&json!(4), &json!("4Gi"))).then_some(())
    })
    .await;
}

/// What a node has for pods, which the API server lets no pod exceed that is resized.
async fn set_allocatable(node: &str, memory: &str) {
    let nodes: Api<Node> = Api::all(served().admin());
    let has = json!({ "cpu": "8", "memory": memory, "pods": "110" });
    let has = Patch::Merge(json!({ "status": { "capacity": has, "allocatable": has } }));
    let params = PatchParams::default();
    nodes.patch_status(node, &params, &has).await.unwrap();
}

fn condition(object: &Value, kind: &str) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    let mut found = conditions.iter().filter(|one| one["type"] == kind);
    found.next().cloned()
}

/// What the kubelet says of the container.
fn container(resources: &Value) -> Value {
    json!({ "containerStatuses": [{
        "name": "compute", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
        "resources": resources, "allocatedResources": resources["requests"],
    }] })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_runs_gets_cpus_and_memory_when_its_pod_has_them() {
    let namespace = support::namespace(&served().admin()).await;
    let controller = migrations::start_controller(&namespace);
    set_live(true).await;
    is_heeded(&namespace).await;
    let done = AssertUnwindSafe(resizes(&namespace)).catch_unwind().await;
    drop(controller);
    set_live(false).await;
    if let Err(panic) = done {
        resume_unwind(panic);
    }
}

async fn resizes(namespace: &str) {
    let admin = served().admin();
    let node = nodes::serve("sizes").await;
    set_allocatable("sizes", "64Gi").await;
    let _kubelet = Kubelet::play_on(admin.clone(), namespace, &["sizes"]);
    let mut made = vm("a", "Always");
    let domain = json!({
        "cpu": { "sockets": 1 }, "memory": { "guest": "1Gi" },
        "devices": { "interfaces": [{ "name": "default", "masquerade": {}, "state": "down" }] },
    });
    made.data["spec"]["template"]["spec"]["domain"] = domain;
    made.data["spec"]["template"]["spec"]["networks"] = json!([{ "name": "default", "pod": {} }]);
    let vms = api_of(&admin, namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &made).await.unwrap();
    let vmis = api_of(&admin, namespace, "VirtualMachineInstance");
    let runs = eventually("the VM runs", async || {
        let vmi = vmis.get_opt("a").await.unwrap()?;
        (vmi.data["status"]["phase"] == "Running").then_some(vmi)
    })
    .await;
    assert_eq!(runs.data["status"]["currentCPUTopology"]["sockets"], 1);
    let name = VmName::new(namespace, "a", runs.metadata.uid.unwrap());
    node.start(&name, None);

    let pods: Api<Pod> = Api::namespaced(admin.clone(), namespace);
    let label = ListParams::default().labels("kubevirt.io=virt-launcher");
    let pod = pods.list(&label).await.unwrap().items.remove(0);
    let pod = pod.metadata.name.unwrap();
    let say = async |status: Value| {
        let patch = Patch::Strategic(json!({ "status": status }));
        let params = PatchParams::default();
        pods.patch_status(&pod, &params, &patch).await.unwrap();
    };
    let resources = async || {
        let pod = serde_json::to_value(pods.get(&pod).await.unwrap()).unwrap();
        pod["spec"]["containers"][0]["resources"].clone()
    };
    let ask = async |domain: Value| {
        let change = json!({ "spec": { "template": { "spec": { "domain": domain } } } });
        let params = PatchParams::default();
        vms.patch("a", &params, &Patch::Merge(change))
            .await
            .unwrap();
    };
    let says = async |what: &str, kind: &str, reason: &str| {
        eventually(what, async || {
            let vmi = vmis.get("a").await.unwrap();
            let found = condition(&vmi.data, kind)?;
            (found["reason"] == reason).then_some(found)
        })
        .await
    };

    // A link needs neither a restart nor the pod.
    let link = async |what: &str, state: &str| {
        eventually(what, async || {
            let vmi = vmis.get("a").await.unwrap();
            (vmi.data["status"]["interfaces"][0]["linkState"] == state).then_some(())
        })
        .await;
    };
    link("it begins without a link", "down").await;
    let card = json!([{ "name": "default", "masquerade": {}, "state": "up" }]);
    ask(json!({ "devices": { "interfaces": card } })).await;
    link("the link is up", "up").await;
    assert_eq!(node.machine(&name).done, ["links down: "]);

    // Its kubelet does not say what the container has: the API server takes it for an old one.
    ask(json!({ "cpu": { "sockets": 2 }, "memory": { "guest": "2Gi" } })).await;
    let refused = says("the refusal is told", "HotVCPUChange", "PodResizeRefused").await;
    assert_eq!(refused["status"], "False");
    let before = resources().await;
    assert_eq!(before["requests"]["cpu"], "100m");
    say(container(&before)).await;
    let waits = says(
        "the pod is resized",
        "HotMemoryChange",
        "PodResizeInProgress",
    )
    .await;
    assert_eq!(waits["status"], "True");
    let larger = resources().await;
    assert_eq!(larger["requests"]["cpu"], "200m");
    assert_ne!(larger["requests"]["memory"], before["requests"]["memory"]);
    assert_eq!(node.machine(&name).done.len(), 1, "the pod comes first");
    say(container(&larger)).await;
    let grown = eventually("the VM has it", async || {
        let vmi = vmis.get("a").await.unwrap();
        let status = &vmi.data["status"];
        let is_grown = status["currentCPUTopology"]["sockets"] == 2
            && status["memory"]["guestCurrent"] == "2Gi";
        is_grown.then_some(vmi)
    })
    .await;
    assert_eq!(grown.data["status"]["memory"]["guestAtBoot"], "1Gi");
    assert_eq!(grown.data["status"]["memory"]["guestRequested"], "2Gi");
    for kind in ["HotVCPUChange", "HotMemoryChange"] {
        assert_eq!(condition(&grown.data, kind), None);
    }
    let mut done = node.machine(&name).done;
    done.dedup();
    assert_eq!(done, ["links down: ", "2 CPUs, 2147483648 bytes"]);
    let vm = vms.get("a").await.unwrap();
    assert_eq!(condition(&vm.data, "RestartRequired"), None);

    // A node without room, and what no machine that runs takes.
    ask(json!({ "cpu": { "sockets": 3 } })).await;
    says(
        "the pod asks for more",
        "HotVCPUChange",
        "PodResizeInProgress",
    )
    .await;
    let pending = json!({ "conditions": [{
        "type": "PodResizePending", "status": "True", "reason": "Infeasible",
        "message": "Node didn't have enough capacity",
    }] });
    say(pending).await;
    let full = says("it is told", "HotVCPUChange", "PodResizeInfeasible").await;
    assert!(
        full["message"]
            .as_str()
            .unwrap()
            .contains("enough capacity")
    );
    set_allocatable("sizes", "3Gi").await;
    ask(json!({ "memory": { "guest": "4Gi" } })).await;
    let small = says("it is too small", "HotMemoryChange", "PodResizeRefused").await;
    let message = small["message"].as_str().unwrap();
    assert!(message.contains("enough allocatable"), "{message}");
    assert!(!message.contains("Status {"), "{message}");
    ask(json!({ "cpu": { "sockets": 5 } })).await;
    eventually("a restart is asked for", async || {
        let vm = vms.get("a").await.unwrap();
        condition(&vm.data, "RestartRequired")
    })
    .await;
    assert_eq!(
        node.machine(&name).done.len(),
        2,
        "nothing was asked for since"
    );
}
