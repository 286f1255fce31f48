//! The controllers against a real API server; the tests play the kubelet.

#[path = "controllers/csi.rs"]
mod csi;
#[path = "controllers/datavolumes.rs"]
mod datavolumes;
#[path = "controllers/restores.rs"]
mod restores;
#[path = "controllers/scene.rs"]
mod scene;
#[path = "controllers/snapshots.rs"]
mod snapshots;
#[path = "controllers/sources.rs"]
mod sources;
mod support;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{LimitRange, Namespace, PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use podvisor_cluster::controller::{self, Options};
use podvisor_cluster::objects::{
    Phase, StateChangeRequest, VirtualMachine, VirtualMachineInstance,
    VirtualMachineInstanceReplicaSet, condition,
};
use scene::{Controller, LIMIT, Scene, machine};
use serde_json::{Value, json};
use support::kubelet;

#[tokio::test]
async fn a_virtual_machine_starts_is_halted_and_goes() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "life");
    let _kubelet = scene.play_kubelet();
    scene.create("web", "Always").await;
    let vm = scene.becomes("web", "Running").await;
    assert!(vm.status.created);

    let vmi = scene.vmis.get("web").await.unwrap();
    assert_eq!(vmi.status.phase, Phase::Running);
    assert_eq!(vmi.status.node_name, kubelet::NODE);
    assert_eq!(vmi.status.interfaces[0].ip_address, "10.1.0.7");
    let revision = vmi.status.virtual_machine_revision_name.as_str();
    Api::<ControllerRevision>::namespaced(scene.client.clone(), &scene.namespace)
        .get(revision)
        .await
        .unwrap();
    let pod = scene.only_pod().await;
    let spec = pod.spec.unwrap();
    assert_eq!(spec.runtime_class_name.as_deref(), Some("podvisor-vm"));
    assert_eq!(
        spec.containers[0].image.as_deref(),
        Some("registry/debian:12")
    );
    let annotation = &pod.metadata.annotations.unwrap()["podvisor.io/vmi"];
    assert!(annotation.contains("#cloud-config"), "{annotation}");

    scene
        .patch("web", json!({"spec": {"runStrategy": "Halted"}}))
        .await;
    scene.becomes("web", "Stopped").await;
    scene.instance("web", |vmi| vmi.is_none()).await;
    assert!(
        scene
            .pods
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );

    scene
        .patch("web", json!({"spec": {"runStrategy": "Always"}}))
        .await;
    scene.becomes("web", "Running").await;
    scene
        .vms
        .delete("web", &DeleteParams::background())
        .await
        .unwrap();
    scene.gone("web").await;
    assert!(scene.vmis.get_opt("web").await.unwrap().is_none());
    assert!(
        scene
            .pods
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
}

#[tokio::test]
async fn a_start_costs_few_requests() {
    let scene = Scene::new().await;
    let user = "frugal";
    let _controller = Controller::start(&scene.namespace, user);
    let _kubelet = scene.play_kubelet();
    // The first one waits for the watches.
    scene.create("first", "Always").await;
    scene.becomes("first", "Running").await;
    let before = support::server().requests(user);
    scene.create("second", "Always").await;
    scene.becomes("second", "Running").await;
    let running = |vmi: Option<&VirtualMachineInstance>| {
        vmi.is_some_and(|vmi| vmi.status.phase == Phase::Running)
    };
    scene.instance("second", running).await;
    let requests = support::server().requests(user).since(&before);
    println!("from creation to Running:\n{requests}");
    assert!((5..=15).contains(&requests.total()), "{requests}");
}

#[tokio::test]
async fn services_leave_out_the_pod_of_a_paused_vm() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "paused");
    let _kubelet = scene.play_kubelet();
    scene.create("web", "Always").await;
    scene.becomes("web", "Running").await;
    let is_ready = |status: &'static str| {
        move |vmi: Option<&VirtualMachineInstance>| {
            let conditions = vmi.map(|vmi| vmi.status.conditions.as_slice());
            conditions
                .and_then(|conditions| condition(conditions, "Ready"))
                .is_some_and(|ready| ready.status == status)
        }
    };
    scene.instance("web", is_ready("True")).await;
    let name = scene.only_pod().await.metadata.name.unwrap();
    let gate_is = |status: &'static str| {
        move |pod: Option<&Pod>| {
            let conditions = pod.and_then(|pod| pod.status.as_ref()?.conditions.as_ref());
            conditions.into_iter().flatten().any(|condition| {
                condition.type_ == "kubevirt.io/virtual-machine-unpaused"
                    && condition.status == status
            })
        }
    };
    let gate = async |status| {
        let wait = await_condition(scene.pods.clone(), &name, gate_is(status));
        let pod = tokio::time::timeout(LIMIT, wait).await;
        pod.expect("the gate is not written").unwrap().unwrap()
    };
    let pod = gate("True").await;
    let gates = pod.spec.unwrap().readiness_gates.unwrap();
    assert_eq!(
        gates[0].condition_type,
        "kubevirt.io/virtual-machine-unpaused"
    );
    // As the node reports it.
    let pause = async |conditions: Value| {
        let patch = Patch::Apply(json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "web"},
            "status": {"conditions": conditions},
        }));
        let params = PatchParams::apply("podvisor-node").force();
        let patched = scene.vmis.patch_status("web", &params, &patch).await;
        patched.unwrap();
    };
    pause(json!([{"type": "Paused", "status": "True"}])).await;
    let vmi = scene.instance("web", is_ready("False")).await.unwrap();
    let ready = condition(&vmi.status.conditions, "Ready").unwrap();
    assert_eq!(ready.reason, "GuestNotRunning");
    gate("False").await;
    scene.becomes("web", "Paused").await;
    pause(json!([])).await;
    gate("True").await;
    scene.instance("web", is_ready("True")).await;
}

#[tokio::test]
async fn requests_of_users_are_carried_out() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "requests");
    let _kubelet = scene.play_kubelet();
    scene.create("manual", "Manual").await;
    scene.becomes("manual", "Stopped").await;
    let request = async |request: &[StateChangeRequest]| {
        let patch = json!({"status": {"stateChangeRequests": request}});
        scene
            .vms
            .patch_status("manual", &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    };
    request(&[StateChangeRequest::start()]).await;
    let first = scene.becomes("manual", "Running").await;
    assert!(first.status.ready || first.status.created);
    let uid = async || {
        scene
            .vmis
            .get("manual")
            .await
            .unwrap()
            .metadata
            .uid
            .unwrap()
    };
    let before = uid().await;
    request(&[
        StateChangeRequest::stop(&before),
        StateChangeRequest::start(),
    ])
    .await;
    scene
        .instance("manual", |vmi| {
            vmi.is_some_and(|vmi| {
                vmi.metadata.uid.as_ref() != Some(&before) && vmi.status.phase == Phase::Running
            })
        })
        .await;
    request(&[StateChangeRequest::stop(&uid().await)]).await;
    scene.instance("manual", |vmi| vmi.is_none()).await;
    let stopped = scene.becomes("manual", "Stopped").await;
    assert_eq!(stopped.spec.run_strategy.as_deref(), Some("Manual"));
}

#[tokio::test]
async fn how_a_guest_ends_decides_what_follows() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "ends");
    let _kubelet = scene.play_kubelet();
    for (name, strategy) in [("rerun", "RerunOnFailure"), ("once", "Once")] {
        scene.create(name, strategy).await;
        scene.becomes(name, "Running").await;
    }
    let pod_of = async |name: &str| {
        let list = ListParams::default().labels(&format!("app={name}"));
        scene.pods.list(&list).await.unwrap().items[0].clone()
    };
    let end = async |name: &str, code: i32| {
        let pod = pod_of(name).await.metadata.name.unwrap();
        kubelet::exit(&scene.pods, &pod, code).await;
    };
    // A failed one is started again, one that powered off is not.
    let before = scene.vmis.get("rerun").await.unwrap().metadata.uid;
    end("rerun", 1).await;
    scene
        .instance("rerun", |vmi| {
            vmi.is_some_and(|vmi| vmi.metadata.uid != before && vmi.status.phase == Phase::Running)
        })
        .await;
    end("rerun", 0).await;
    scene.instance("rerun", |vmi| vmi.is_none()).await;
    scene.becomes("rerun", "Stopped").await;
    // Of one that runs once, the end is kept.
    end("once", 1).await;
    let kept = scene
        .instance("once", |vmi| {
            vmi.is_some_and(|vmi| vmi.status.phase.is_final())
        })
        .await
        .unwrap();
    assert_eq!(
        (kept.status.phase, &*kept.status.reason),
        (Phase::Failed, "Exited")
    );
    scene.becomes("once", "Stopped").await;
}

#[tokio::test]
async fn starts_that_fail_are_delayed() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "crashes");
    scene.create("bad", "Always").await;
    let pending = |vmi: Option<&VirtualMachineInstance>| {
        vmi.is_some_and(|vmi| vmi.status.phase == Phase::Scheduling)
    };
    scene.instance("bad", pending).await;
    let pod = scene.only_pod().await.metadata.name.unwrap();
    kubelet::exit(&scene.pods, &pod, 1).await;
    let vm = scene.becomes("bad", "CrashLoopBackOff").await;
    let failure = vm.status.start_failure.unwrap();
    assert_eq!(failure.consecutive_fail_count, 1);
    assert!(failure.retry_after_timestamp.is_some());
}

#[tokio::test]
async fn a_missing_claim_is_waited_for() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "claims");
    let _kubelet = scene.play_kubelet();
    let mut vm = machine("data", "Always");
    let template = vm.spec.template.as_mut().unwrap();
    template.spec["volumes"][1] =
        json!({"name": "seed", "persistentVolumeClaim": {"claimName": "disk"}});
    scene.vms.create(&PostParams::default(), &vm).await.unwrap();
    let waiting = scene.becomes("data", "ErrorPvcNotFound").await;
    let failure = condition(&waiting.status.conditions, "Failure").unwrap();
    assert!(failure.message.contains("disk"), "{}", failure.message);
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {"name": "disk"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": "Block",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }))
    .unwrap();
    Api::namespaced(scene.client.clone(), &scene.namespace)
        .create(&PostParams::default(), &claim)
        .await
        .unwrap();
    scene.becomes("data", "Running").await;
    let pod = scene.only_pod().await.spec.unwrap();
    let devices = pod.containers[0].volume_devices.as_ref().unwrap();
    assert_eq!(devices[0].device_path, "/podvisor/devices/seed");
}

#[tokio::test]
async fn what_the_api_server_refuses_is_told_and_tried_again() {
    let scene = Scene::new().await;
    let limits = Api::<LimitRange>::namespaced(scene.client.clone(), &scene.namespace);
    let small: LimitRange = serde_json::from_value(json!({
        "metadata": {"name": "small"},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "1Mi"}}]},
    }))
    .unwrap();
    limits.create(&PostParams::default(), &small).await.unwrap();
    let _controller = Controller::start(&scene.namespace, "limits");
    let _kubelet = scene.play_kubelet();
    scene.create("big", "Always").await;
    let refused = |vm: Option<&VirtualMachine>| {
        vm.and_then(|vm| condition(&vm.status.conditions, "Failure"))
            .is_some_and(|failure| failure.reason == "FailedCreate")
    };
    let wait = await_condition(scene.vms.clone(), "big", refused);
    let vm = tokio::time::timeout(LIMIT, wait)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let failure = condition(&vm.status.conditions, "Failure").unwrap();
    assert!(failure.message.contains("memory"), "{}", failure.message);
    limits
        .delete("small", &DeleteParams::default())
        .await
        .unwrap();
    let vm = scene.becomes("big", "Running").await;
    assert!(condition(&vm.status.conditions, "Failure").is_none());
}

#[tokio::test]
async fn virtual_machines_run_in_restricted_namespaces() {
    let scene = Scene::new().await;
    let restricted = json!({"metadata": {"labels": {
        "pod-security.kubernetes.io/enforce": "restricted",
    }}});
    Api::<Namespace>::all(scene.client.clone())
        .patch(
            &scene.namespace,
            &PatchParams::default(),
            &Patch::Merge(restricted),
        )
        .await
        .unwrap();
    let _controller = Controller::start(&scene.namespace, "restricted");
    let _kubelet = scene.play_kubelet();
    scene.create("safe", "Always").await;
    scene.becomes("safe", "Running").await;
}

#[tokio::test]
async fn an_orphan_keeps_running() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "orphans");
    let _kubelet = scene.play_kubelet();
    scene.create("parent", "Always").await;
    scene.becomes("parent", "Running").await;
    scene
        .vms
        .delete("parent", &DeleteParams::orphan())
        .await
        .unwrap();
    let vmi = scene
        .instance("parent", |vmi| {
            vmi.is_some_and(|vmi| {
                vmi.metadata
                    .owner_references
                    .as_ref()
                    .is_none_or(Vec::is_empty)
            })
        })
        .await
        .unwrap();
    assert!(vmi.metadata.deletion_timestamp.is_none());
    assert_eq!(vmi.status.phase, Phase::Running);
}

#[tokio::test]
async fn a_changed_template_leaves_the_instance_alone() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "changes");
    let _kubelet = scene.play_kubelet();
    scene.create("web", "Always").await;
    scene.becomes("web", "Running").await;
    let uid = scene.vmis.get("web").await.unwrap().metadata.uid;
    let change = json!({"spec": {"template": {"spec": {"domain": {"cpu": {"cores": 2}}}}}});
    scene.patch("web", change).await;
    let restart = |vm: Option<&VirtualMachine>| {
        vm.is_some_and(|vm| condition(&vm.status.conditions, "RestartRequired").is_some())
    };
    let wait = await_condition(scene.vms.clone(), "web", restart);
    tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
    assert_eq!(scene.vmis.get("web").await.unwrap().metadata.uid, uid);
}

#[tokio::test]
async fn another_replica_takes_over() {
    let scene = Scene::new().await;
    let first = Controller::named(&scene.namespace, "first", "first");
    let _kubelet = scene.play_kubelet();
    scene.create("one", "Always").await;
    scene.becomes("one", "Running").await;
    let _second = Controller::named(&scene.namespace, "second", "second");
    scene.create("two", "Always").await;
    scene.becomes("two", "Running").await;
    assert_eq!(
        support::server().requests("second").total(),
        0,
        "only the leader acts"
    );
    drop(first);
    scene.create("three", "Always").await;
    scene.becomes("three", "Running").await;
}

#[tokio::test]
async fn a_replica_set_has_as_many_instances_as_wanted() {
    let scene = Scene::new().await;
    let _controller = Controller::start(&scene.namespace, "replicas");
    let _kubelet = scene.play_kubelet();
    let sets =
        Api::<VirtualMachineInstanceReplicaSet>::namespaced(scene.client.clone(), &scene.namespace);
    let template = machine("web", "Always").spec.template;
    let set: VirtualMachineInstanceReplicaSet = serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": {"app": "web"}},
            "template": template,
        },
    }))
    .unwrap();
    sets.create(&PostParams::default(), &set).await.unwrap();
    let ready = async |count: i32| {
        let reached = move |set: Option<&VirtualMachineInstanceReplicaSet>| {
            set.is_some_and(|set| {
                (set.status.replicas, set.status.ready_replicas) == (count, count)
            })
        };
        let wait = await_condition(sets.clone(), "web", reached);
        tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
    };
    ready(3).await;
    let vmis = scene.vmis.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(vmis.len(), 3);
    // One that ended is replaced.
    let lost = vmis[0].metadata.name.clone().unwrap();
    let label = ListParams::default().labels(&format!("vm.kubevirt.io/name={lost}"));
    let pod = scene.pods.list(&label).await.unwrap().items.remove(0);
    kubelet::exit(&scene.pods, &pod.metadata.name.unwrap(), 1).await;
    scene
        .instance(&lost, |vmi| {
            vmi.is_none_or(|vmi| vmi.metadata.uid != vmis[0].metadata.uid)
        })
        .await;
    ready(3).await;
    let scale = Patch::Merge(json!({"spec": {"replicas": 1}}));
    sets.patch("web", &PatchParams::default(), &scale)
        .await
        .unwrap();
    ready(1).await;
}

#[tokio::test]
async fn a_controller_that_is_told_to_end_gives_its_lease_back() {
    let scene = Scene::new().await;
    let client = support::server().client("polite", &["system:masters"]);
    let leases = Api::<Lease>::namespaced(scene.client.clone(), &scene.namespace);
    let mut options = Options::default();
    options.namespace = Some(scene.namespace.clone());
    options.lease_namespace = scene.namespace.clone();
    options.lease_seconds = 3600;
    options.identity = Some("polite".to_owned());
    let name = options.lease_name.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let controller = tokio::spawn(async move {
        let stopped = async {
            let _ = stopped.await;
        };
        controller::run_until(client, &options, stopped).await;
    });
    let holder = |lease: &Lease| lease.spec.as_ref()?.holder_identity.clone();
    let held = |lease: Option<&Lease>| lease.and_then(holder).as_deref() == Some("polite");
    let wait = await_condition(leases.clone(), &name, held);
    tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
    stop.send(()).unwrap();
    controller.await.unwrap();
    let lease = leases.get(&name).await.unwrap();
    assert_eq!(holder(&lease).unwrap_or_default(), "");
}
