//! VMs that move between two nodes: the controller with its own rights, both nodes' parts with
//! those of kubelets, and bytes over TLS between them.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{
    Api, Client,
    api::{
        ApiResource, DeleteParams, DynamicObject, EvictParams, GroupVersionKind, ListParams, Patch,
        PatchParams, PostParams,
    },
};
use podvisor_cluster::controller::{self, Options};
use podvisor_node_api::messages::{MigrationState, VmName, VmPhase};
use serde_json::{Value, json};

use super::{SYSTEM, api_of, code, nodes, nodes::eventually, object, put, served, support};
use support::kubelet::{self, Kubelet};
use support::machines::StandIn;
use support::migrations::Fault;

pub(super) const KIND: &str = "VirtualMachineInstanceMigration";

/// A controller and a kubelet that end with the test.
pub(super) struct Task(tokio::task::JoinHandle<()>);

impl Task {
    pub(super) fn of(task: tokio::task::JoinHandle<()>) -> Self {
        Self(task)
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) fn start_controller(namespace: &str) -> Task {
    let mut options = Options::default();
    options.namespace = Some(namespace.to_owned());
    options.lease_namespace = SYSTEM.to_owned();
    options.lease_name = namespace.to_owned();
    options.lease_seconds = 3;
    let client = served().service_account(SYSTEM, "podvisor-controller");
    Task(tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    }))
}

/// Two nodes, and a VM that runs on the first one.
pub(super) struct Scene {
    admin: Client,
    pub(super) namespace: String,
    pub(super) vmis: Api<DynamicObject>,
    migrations: Api<DynamicObject>,
    pub(super) pods: Api<Pod>,
    names: [String; 2],
    source: StandIn,
    target: StandIn,
    vm: VmName,
    _kubelet: Kubelet,
    controller: Option<Task>,
}

impl Scene {
    pub(super) async fn new(name: &str) -> Self {
        let admin = served().admin();
        let namespace = support::namespace(&admin).await;
        let names = [format!("{name}-s"), format!("{name}-t")];
        let source = nodes::serve(&names[0]).await;
        let target = nodes::serve(&names[1]).await;
        let on: Vec<&str> = names.iter().map(String::as_str).collect();
        let kubelet = Kubelet::play_on(admin.clone(), &namespace, &on);
        let controller = Some(start_controller(&namespace));
        let template = json!({ "spec": {
            "domain": {
                "memory": { "guest": "128Mi" },
                "devices": { "interfaces": [{ "name": "default", "masquerade": {} }] },
            },
            "networks": [{ "name": "default", "pod": {} }],
        } });
        let mut template = template;
        template["spec"]["evictionStrategy"] = json!("LiveMigrate");
        template["metadata"] = json!({ "labels": { "app": name } });
        let spec = json!({ "runStrategy": "RerunOnFailure", "template": template });
        api_of(&admin, &namespace, "VirtualMachine")
            .create(&PostParams::default(), &object("VirtualMachine", "a", spec))
            .await
            .unwrap();
        let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
        let runs = async || {
            let vmi = vmis.get_opt("a").await.unwrap()?;
            (vmi.data["status"]["phase"] == "Running").then_some(vmi)
        };
        let vmi = eventually("the VM runs", runs).await;
        let vm = VmName::new(&namespace, "a", vmi.metadata.uid.unwrap());
        source.start(&vm, None);
        Self {
            migrations: api_of(&admin, &namespace, KIND),
            pods: Api::namespaced(admin.clone(), &namespace),
            vmis,
            admin,
            namespace,
            names,
            source,
            target,
            vm,
            _kubelet: kubelet,
            controller,
        }
    }

    async fn migrate(&self, name: &str) -> DynamicObject {
        let migration = object(KIND, name, json!({ "vmiName": "a" }));
        let params = PostParams::default();
        self.migrations.create(&params, &migration).await.unwrap()
    }

    /// Waits for the pod of a migration, and has its machine wait.
    async fn arrive(&self, migration: &DynamicObject) -> Pod {
        let uid = migration.metadata.uid.as_deref().unwrap();
        let label = ListParams::default().labels(&format!("kubevirt.io/migrationJobUID={uid}"));
        let find = async || {
            self.pods
                .list(&label)
                .await
                .unwrap()
                .items
                .into_iter()
                .next()
        };
        let pod = eventually("the target's pod is made", find).await;
        self.target.await_migration(&self.vm, uid);
        pod
    }

    async fn ends(&self, migration: &DynamicObject, phase: &str) -> DynamicObject {
        let name = migration.metadata.name.as_deref().unwrap();
        let find = async || {
            let found = self.migrations.get(name).await.unwrap();
            (found.data["status"]["phase"] == phase).then_some(found)
        };
        eventually(&format!("the migration is {phase}"), find).await
    }

    async fn vmi(&self) -> DynamicObject {
        self.vmis.get("a").await.unwrap()
    }

    /// Waits until there is one pod, on that node.
    async fn one_pod_on(&self, node: &str) -> Pod {
        let find = async || {
            let pods = self.pods.list(&ListParams::default()).await.unwrap().items;
            let [pod] = &pods[..] else { return None };
            let on = pod.spec.as_ref()?.node_name.as_deref();
            (on == Some(node)).then(|| pod.clone())
        };
        eventually("one pod is left", find).await
    }

    /// Reports that the VM has left the source's pod, as its kubelet does.
    async fn report_moved(&self) {
        let pods = self.pods.list(&ListParams::default()).await.unwrap();
        let on = |pod: &&Pod| pod.spec.as_ref().unwrap().node_name.as_ref() == Some(&self.names[0]);
        if let Some(pod) = pods.items.iter().find(on) {
            let name = pod.metadata.name.as_deref().unwrap();
            kubelet::exit_because(&self.pods, name, 0, "Moved").await;
        }
    }

    /// Waits for a migration that something else made.
    async fn made(&self, what: &str) -> DynamicObject {
        let list = async || {
            let all = self.migrations.list(&ListParams::default()).await;
            all.unwrap().items.pop()
        };
        eventually(what, list).await
    }
}

#[tokio::test]
async fn a_vm_moves_to_another_node_and_stays_the_same_instance() {
    let scene = Scene::new("moves").await;
    assert_eq!(
        put(&scene.admin, &scene.namespace, "a", "migrate", "").await,
        202
    );
    let migration = scene.made("virtctl's migration is made").await;
    let target = scene.arrive(&migration).await;
    let annotations = target.metadata.annotations.clone().unwrap();
    assert_eq!(
        annotations.get("podvisor.io/migration"),
        migration.metadata.uid.as_ref()
    );
    let affinity = target.spec.as_ref().unwrap().affinity.clone().unwrap();
    assert!(affinity.pod_anti_affinity.is_some());
    // A second one at the same time is refused.
    let second = object(KIND, "second", json!({ "vmiName": "a" }));
    let refused = scene
        .migrations
        .create(&PostParams::default(), &second)
        .await;
    assert_eq!(code(refused), 409);

    scene.ends(&migration, "Succeeded").await;
    scene.report_moved().await;
    let left = scene.one_pod_on(&scene.names[1]).await;
    assert_eq!(left.metadata.uid, target.metadata.uid);
    let labelled = async || {
        let vmi = scene.vmi().await;
        let labels = vmi.metadata.labels.clone()?;
        (labels.get("kubevirt.io/nodeName") == Some(&scene.names[1])).then_some(vmi)
    };
    let vmi = eventually("the instance is labelled", labelled).await;
    assert_eq!(vmi.metadata.uid.as_deref(), Some(&*scene.vm.uid));
    let status = &vmi.data["status"];
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["nodeName"], json!(scene.names[1]));
    let state = &status["migrationState"];
    assert_eq!(
        (&state["completed"], &state["failed"]),
        (&json!(true), &Value::Null)
    );
    assert!(state["startTimestamp"].is_string() && state["endTimestamp"].is_string());
    assert_eq!(scene.target.machine(&scene.vm).phase, VmPhase::Running);
    let asked = scene.source.migrations.asked();
    assert_eq!((asked.len(), asked[0].completion_timeout_s), (1, 150));

    // What the guest's agent says comes from the new node.
    scene
        .target
        .start(&scene.vm, Some(support::machines::guest()));
    let reports = async || {
        let status = scene.vmi().await.data["status"].clone();
        status["guestOSInfo"]["id"].is_string().then_some(())
    };
    eventually("the new node reports", reports).await;
    // And it ends with its guest.
    let name = left.metadata.name.as_deref().unwrap();
    kubelet::exit(&scene.pods, name, 0).await;
    let stopped = async || {
        scene
            .vmis
            .get_opt("a")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    };
    eventually("the instance ends", stopped).await;
}

#[tokio::test]
async fn a_migration_that_fails_leaves_the_vm_where_it_is_and_nothing_else() {
    let scene = Scene::new("fails").await;
    for (name, fault, why) in [
        ("early", Fault::CutEarly, "cut off"),
        ("refused", Fault::Refused, "cannot move"),
        ("doubt", Fault::CutAndFailed, ""),
    ] {
        scene.source.migrations.set(fault);
        scene.target.migrations.set(fault);
        let migration = scene.migrate(name).await;
        scene.arrive(&migration).await;
        let failed = scene.ends(&migration, "Failed").await;
        let state = &failed.data["status"]["migrationState"];
        let reason = state["failureReason"].as_str().unwrap();
        assert!(reason.contains(why), "{name}: {reason}");
        scene.one_pod_on(&scene.names[0]).await;
        let status = scene.vmi().await.data["status"].clone();
        assert_eq!(status["phase"], "Running", "{name}");
        assert_eq!(status["nodeName"], json!(scene.names[0]), "{name}");
        assert_eq!(
            scene.source.machine(&scene.vm).phase,
            VmPhase::Running,
            "{name}"
        );
    }
}

#[tokio::test]
async fn a_source_in_doubt_ends_where_the_target_says_that_it_runs() {
    let scene = Scene::new("doubt").await;
    scene.target.migrations.set(Fault::CutLate);
    let migration = scene.migrate("m").await;
    scene.arrive(&migration).await;
    scene.ends(&migration, "Succeeded").await;
    let resolved = async || {
        let machine = scene.source.machine(&scene.vm);
        (machine.phase == VmPhase::Ended).then_some(())
    };
    eventually("the source is told", resolved).await;
    scene.one_pod_on(&scene.names[1]).await;
    assert_eq!(scene.vmi().await.data["status"]["phase"], "Running");
}

#[tokio::test]
async fn a_deleted_migration_is_cancelled_and_a_killed_controller_goes_on() {
    let mut scene = Scene::new("cancels").await;
    scene.source.migrations.set(Fault::Endless);
    let migration = scene.migrate("m").await;
    scene.arrive(&migration).await;
    scene.ends(&migration, "Running").await;
    scene.controller = None;
    scene
        .migrations
        .delete("m", &DeleteParams::default())
        .await
        .unwrap();
    scene.controller = Some(start_controller(&scene.namespace));
    let gone = async || {
        scene
            .migrations
            .get_opt("m")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    };
    eventually("the migration is gone", gone).await;
    let state = scene.source.migration(&scene.vm).unwrap().state();
    assert_eq!(state, MigrationState::Cancelled);
    let status = scene.vmi().await.data["status"].clone();
    assert_eq!(status["migrationState"]["abortStatus"], "Succeeded");
    scene.one_pod_on(&scene.names[0]).await;
}

#[tokio::test]
async fn an_evicted_vm_leaves_its_node_and_is_not_ended() {
    let scene = Scene::new("evicted").await;
    let pod = scene
        .one_pod_on(&scene.names[0])
        .await
        .metadata
        .name
        .unwrap();
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(scene.admin.clone(), &scene.namespace);
    let kept = async || {
        let found = budgets
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .pop()?;
        (found.spec?.min_available == Some(IntOrString::Int(1))).then_some(())
    };
    eventually("the pod has a disruption budget", kept).await;
    // A dry run marks nothing.
    let dry = EvictParams {
        post_options: PostParams {
            dry_run: true,
            ..PostParams::default()
        },
        ..EvictParams::default()
    };
    // Who drains is told to try again (429), which this client does by itself.
    let refused = tokio::time::timeout(Duration::from_secs(2), scene.pods.evict(&pod, &dry));
    assert!(refused.await.is_err());
    assert!(scene.vmi().await.data["status"]["evacuationNodeName"].is_null());
    let drains = {
        let (pods, pod) = (scene.pods.clone(), pod.clone());
        Task(tokio::spawn(async move {
            let _ = pods.evict(&pod, &EvictParams::default()).await;
        }))
    };
    let marked = async || {
        let status = scene.vmi().await.data["status"].clone();
        (status["evacuationNodeName"] == json!(scene.names[0])).then_some(())
    };
    eventually("the VM is marked", marked).await;
    let migration = scene.made("it has to migrate").await;
    let annotations = migration.metadata.annotations.as_ref().unwrap();
    let from = &annotations["kubevirt.io/evacuationMigration"];
    assert_eq!(from, &scene.names[0]);
    scene.arrive(&migration).await;
    scene.ends(&migration, "Succeeded").await;
    scene.one_pod_on(&scene.names[1]).await;
    drop(drains);
    let unmarked = async || {
        let status = scene.vmi().await.data["status"].clone();
        status["evacuationNodeName"].is_null().then_some(())
    };
    eventually("the mark is gone", unmarked).await;
    let all = scene.migrations.list(&ListParams::default()).await.unwrap();
    assert_eq!(all.items.len(), 1, "it does not move on");
}

#[tokio::test]
async fn a_policy_and_a_taint_move_a_vm_with_the_policys_settings() {
    let scene = Scene::new("drained").await;
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("migrations.kubevirt.io", "v1alpha1", "MigrationPolicy"),
        "migrationpolicies",
    );
    let policies: Api<DynamicObject> = Api::all_with(scene.admin.clone(), &resource);
    let policy = |name: &str, post_copy: bool| {
        DynamicObject::new(name, &resource).data(json!({ "spec": {
            "selectors": { "virtualMachineInstanceSelector": { "app": "drained" } },
            "bandwidthPerMigration": "64Mi",
            "completionTimeoutPerGiB": 40,
            "allowAutoConverge": true,
            "allowPostCopy": post_copy,
        } }))
    };
    let params = PostParams::default();
    assert_eq!(
        code(policies.create(&params, &policy("post", true)).await),
        422
    );
    policies
        .create(&params, &policy("slow", false))
        .await
        .unwrap();

    let nodes: Api<Node> = Api::all(scene.admin.clone());
    let taint = json!({ "spec": { "taints": [
        { "key": "kubevirt.io/drain", "effect": "NoSchedule" },
    ] } });
    nodes
        .patch(
            &scene.names[0],
            &PatchParams::default(),
            &Patch::Merge(taint),
        )
        .await
        .unwrap();
    let migration = scene.made("it has to migrate").await;
    scene.arrive(&migration).await;
    let ended = scene.ends(&migration, "Succeeded").await;
    let state = &ended.data["status"]["migrationState"];
    assert_eq!(state["migrationPolicyName"], "slow");
    let asked = scene.source.migrations.asked();
    assert_eq!(asked[0].bandwidth_bytes_per_second, 64 << 20);
    assert_eq!(asked[0].completion_timeout_s, 40);
    assert!(asked[0].auto_converge);
}

#[tokio::test]
async fn nobody_but_the_controller_says_where_a_vm_is() {
    let scene = Scene::new("rights").await;
    let forged = json!({ "migrationState": { "completed": true, "targetPod": "x" } });
    let kubelet = served().kubelet(&scene.names[0]);
    let apply = Patch::Apply(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": { "name": "a" },
        "status": forged,
    }));
    let params = PatchParams::apply("podvisor-node").force();
    let vmis = api_of(&kubelet, &scene.namespace, "VirtualMachineInstance");
    assert_eq!(code(vmis.patch_status("a", &params, &apply).await), 403);
    // A user's is undone without a word.
    let merge = Patch::Merge(json!({ "status": forged }));
    let params = PatchParams::default();
    scene.vmis.patch_status("a", &params, &merge).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(scene.vmi().await.data["status"]["migrationState"].is_null());
}
