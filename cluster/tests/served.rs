//! The webhooks and the subresources behind a real API server, with the accounts, the roles and
//! the policies that `podvisor-cluster install` prints.

#[path = "served/configuration.rs"]
mod configuration;
#[path = "served/copies.rs"]
mod copies;
#[path = "served/exports.rs"]
mod exports;
#[path = "served/hotplug.rs"]
mod hotplug;
#[path = "served/instances.rs"]
mod instances;
#[path = "served/joined.rs"]
mod joined;
#[path = "served/migrations.rs"]
mod migrations;
#[path = "served/nodes.rs"]
mod nodes;
#[path = "served/reviews.rs"]
mod reviews;
#[path = "served/security.rs"]
mod security;
#[path = "served/setup.rs"]
mod setup;
#[path = "served/sizes.rs"]
mod sizes;
#[path = "served/snapshots.rs"]
mod snapshots;
mod support;
#[path = "served/uploads.rs"]
mod uploads;
#[path = "served/virtctl.rs"]
mod virtctl;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind, TypeMeta},
};
use podvisor_cluster::{api, controller, manifests};
use serde_json::{Value, json};
use setup::{SYSTEM, api_of, apply, code, install, object, served, vm, vmi};

#[tokio::test]
async fn everything_that_install_prints_is_taken() {
    let admin = served().admin();
    for item in install() {
        apply(&admin, &item, true).await;
    }
}

#[tokio::test]
async fn a_vmi_is_stored_with_its_defaults_in_both_versions() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachineInstance");
    let memory = json!({ "resources": { "requests": { "memory": "128Mi" } } });
    let made = api
        .create(&PostParams::default(), &vmi("a", memory))
        .await
        .unwrap();
    let spec = &made.data["spec"];
    assert_eq!(spec["domain"]["memory"]["guest"], "128Mi");
    assert_eq!(spec["domain"]["cpu"]["sockets"], 1);
    assert_eq!(spec["networks"][0]["name"], "default");
    let finalizer = "kubevirt.io/foregroundDeleteVirtualMachine";
    assert_eq!(made.metadata.finalizers.unwrap(), [finalizer]);

    let gvk = GroupVersionKind::gvk("kubevirt.io", "v1alpha3", "VirtualMachineInstance");
    let resource = ApiResource::from_gvk(&gvk);
    let old: Api<DynamicObject> = Api::namespaced_with(admin, &namespace, &resource);
    assert_eq!(old.get("a").await.unwrap().data["spec"], *spec);
    let mut second = vmi("b", json!({ "cpu": { "cores": -1 } }));
    second.types = Some(TypeMeta {
        api_version: "kubevirt.io/v1alpha3".to_owned(),
        kind: "VirtualMachineInstance".to_owned(),
    });
    assert_eq!(code(old.create(&PostParams::default(), &second).await), 422);
}

#[tokio::test]
async fn an_invalid_vmi_is_refused_with_every_cause_by_its_field() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachineInstance");
    let domain = json!({
        "cpu": { "cores": -1 },
        "memory": { "guest": "1e30Gi" },
        "devices": { "tpm": {}, "disks": [{ "name": "none", "serial": "x".repeat(300) }] },
    });
    let error = api
        .create(&PostParams::default(), &vmi("a", domain))
        .await
        .unwrap_err();
    let kube::Error::Api(status) = error else {
        panic!("{error}")
    };
    assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"));
    let causes = status.details.unwrap().causes;
    let fields: Vec<_> = causes.iter().map(|cause| cause.field.as_str()).collect();
    assert_eq!(
        fields,
        [
            "spec.domain.memory.guest",
            "spec.domain.cpu.cores",
            "spec.domain.devices.disks[0].name",
            "spec.domain.devices.disks[0].serial",
            "spec.domain.devices.tpm",
        ]
    );
    assert_eq!(api.list(&Default::default()).await.unwrap().items.len(), 0);
}

#[tokio::test]
async fn an_unknown_field_is_refused_where_the_client_asks_for_it() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachine");
    let mut vm = vm("a", "Halted");
    vm.data["spec"]["template"]["spec"]["domain"]["cpus"] = json!(2);
    let params = PatchParams::apply("test").validation_strict();
    let error = api
        .patch("a", &params, &Patch::Apply(&vm))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("cpus"), "{error}");
}

#[tokio::test]
async fn a_dry_run_stores_nothing() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachine");
    let params = PostParams {
        dry_run: true,
        ..Default::default()
    };
    let made = api.create(&params, &vm("a", "Halted")).await.unwrap();
    assert!(made.data["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"].is_string());
    assert!(api.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn a_status_by_others_is_undone_and_the_controllers_is_kept() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let memory = json!({ "memory": { "guest": "128Mi" } });
    let of = |client: &Client| api_of(client, &namespace, "VirtualMachineInstance");
    of(&admin)
        .create(&PostParams::default(), &vmi("a", memory))
        .await
        .unwrap();
    let patch = Patch::Merge(json!({ "status": { "phase": "Succeeded" } }));
    let params = PatchParams::default();
    let after = of(&admin).patch_status("a", &params, &patch).await.unwrap();
    assert_eq!(after.data.get("status"), None);
    let controller = server.service_account(SYSTEM, "podvisor-controller");
    let after = of(&controller)
        .patch_status("a", &params, &patch)
        .await
        .unwrap();
    assert_eq!(after.data["status"]["phase"], "Succeeded");
}

#[tokio::test]
async fn a_running_vmi_changes_by_the_system_alone() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let memory = json!({ "memory": { "guest": "128Mi" } });
    let of = |client: &Client| api_of(client, &namespace, "VirtualMachineInstance");
    of(&admin)
        .create(&PostParams::default(), &vmi("a", memory))
        .await
        .unwrap();
    let patch = Patch::Merge(json!({ "spec": { "domain": { "cpu": { "sockets": 2 } } } }));
    let params = PatchParams::default();
    assert_eq!(code(of(&admin).patch("a", &params, &patch).await), 422);
    let controller = server.service_account(SYSTEM, "podvisor-controller");
    of(&controller).patch("a", &params, &patch).await.unwrap();
}

#[tokio::test]
async fn only_the_controller_makes_pods_that_are_vms() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let pod = |name: &str, annotations: Value, class: Value| -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "annotations": annotations },
            "spec": {
                "runtimeClassName": class,
                "containers": [{ "name": "a", "image": "a" }],
            },
        }))
        .unwrap()
    };
    let forged = json!({ "podvisor.io/vmi": "{}" });
    let of = |client: &Client| Api::<Pod>::namespaced(client.clone(), &namespace);
    let params = PostParams::default();
    let create = async |client: &Client, pod: Pod| of(client).create(&params, &pod).await;
    let class = json!("podvisor-vm");
    let error = create(&admin, pod("a", forged.clone(), Value::Null))
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("create a VirtualMachine instead"),
        "{error}"
    );
    assert_eq!(
        code(create(&admin, pod("a", Value::Null, class.clone())).await),
        403
    );
    assert_eq!(
        code(create(&admin, pod("a", forged.clone(), class.clone())).await),
        403
    );
    create(&admin, pod("plain", json!({ "other": "1" }), Value::Null))
        .await
        .unwrap();

    let controller = server.service_account(SYSTEM, "podvisor-controller");
    create(&controller, pod("vm", forged, class)).await.unwrap();
    let stranger = server.service_account("elsewhere", "podvisor-controller");
    assert_eq!(
        code(
            of(&stranger)
                .create(&params, &pod("b", Value::Null, Value::Null))
                .await
        ),
        403
    );

    let change = json!({ "metadata": { "annotations": { "podvisor.io/vmi": "{\"a\":1}" } } });
    for (client, name) in [(&admin, "plain"), (&admin, "vm"), (&controller, "vm")] {
        let patched = of(client)
            .patch(name, &PatchParams::default(), &Patch::Merge(&change))
            .await;
        assert_eq!(code(patched), 403, "{name}");
    }
    let label = json!({ "metadata": { "labels": { "a": "b" } } });
    of(&admin)
        .patch("vm", &PatchParams::default(), &Patch::Merge(&label))
        .await
        .unwrap();
}

/// PUTs to a subresource of a VM; the answer's code.
async fn put(client: &Client, namespace: &str, name: &str, sub: &str, body: &str) -> u16 {
    put_to(client, "virtualmachines", namespace, name, sub, body).await
}

/// The path of a subresource.
fn path(resource: &str, namespace: &str, name: &str, sub: &str) -> String {
    let group = api::GROUP;
    format!("/apis/{group}/v1/namespaces/{namespace}/{resource}/{name}/{sub}")
}

/// PUTs to a subresource; the answer's code.
async fn put_to(
    client: &Client,
    resource: &str,
    namespace: &str,
    name: &str,
    sub: &str,
    body: &str,
) -> u16 {
    let path = path(resource, namespace, name, sub);
    let request = http::Request::put(path)
        .body(body.as_bytes().to_vec())
        .unwrap();
    match client.request_text(request).await {
        Ok(_) => 202,
        Err(kube::Error::Api(status)) => status.code,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_vm_is_started_and_stopped_by_its_subresources() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachine");
    api.create(&PostParams::default(), &vm("a", "Halted"))
        .await
        .unwrap();
    let strategy = async || api.get("a").await.unwrap().data["spec"]["runStrategy"].clone();

    let dry = r#"{"dryRun":["All"]}"#;
    assert_eq!(put(&admin, &namespace, "a", "start", dry).await, 202);
    assert_eq!(strategy().await, "Halted");
    assert_eq!(put(&admin, &namespace, "a", "start", "").await, 202);
    assert_eq!(strategy().await, "Always");
    assert_eq!(put(&admin, &namespace, "a", "start", "").await, 409);
    assert_eq!(put(&admin, &namespace, "a", "restart", "").await, 409);
    assert_eq!(put(&admin, &namespace, "a", "stop", "{}").await, 202);
    assert_eq!(strategy().await, "Halted");
    assert_eq!(put(&admin, &namespace, "a", "stop", "").await, 409);
    assert_eq!(put(&admin, &namespace, "a", "start", "{").await, 400);
    assert_eq!(put(&admin, &namespace, "b", "start", "").await, 404);
    assert_eq!(put(&admin, &namespace, "a", "explode", "").await, 404);
}

#[tokio::test]
async fn a_manual_vm_gets_a_request_that_the_controller_sees() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachine");
    api.create(&PostParams::default(), &vm("a", "Manual"))
        .await
        .unwrap();
    assert_eq!(
        put(&admin, &namespace, "a", "start", r#"{"paused":true}"#).await,
        202
    );
    let requests = &api.get("a").await.unwrap().data["status"]["stateChangeRequests"];
    assert_eq!(
        requests,
        &json!([{ "action": "Start", "data": { "paused": "true" } }])
    );
    assert_eq!(put(&admin, &namespace, "a", "start", "").await, 409);
}

#[tokio::test]
async fn a_user_needs_the_right_to_the_subresource() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let api = api_of(&admin, &namespace, "VirtualMachine");
    api.create(&PostParams::default(), &vm("a", "Halted"))
        .await
        .unwrap();
    let (viewer, editor) = (server.client("viewer", &[]), server.client("editor", &[]));
    for (user, role) in [
        ("viewer", "podvisor-vm-view"),
        ("editor", "podvisor-vm-edit"),
    ] {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": { "name": user, "namespace": namespace },
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role,
            },
            "subjects": [
                { "kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io" },
            ],
        });
        apply(&admin, &binding, false).await;
    }
    assert_eq!(put(&viewer, &namespace, "a", "start", "").await, 403);
    assert_eq!(put(&viewer, "default", "a", "start", "").await, 403);
    // The authorizer learns of a new binding by its watch.
    let mut answer = 403;
    for _ in 0..300 {
        answer = put(&editor, &namespace, "a", "start", "").await;
        if answer != 403 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert_eq!(answer, 202);
    assert_eq!(put(&editor, "default", "a", "start", "").await, 403);
}

#[tokio::test]
async fn the_controller_makes_the_pod_of_a_vm_with_the_rights_that_install_gives_it() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let mut options = controller::Options::default();
    options.namespace = Some(namespace.clone());
    options.lease_namespace = SYSTEM.to_owned();
    let client = server.service_account(SYSTEM, "podvisor-controller");
    let controller = tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    });
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &vm("a", "Always"))
        .await
        .unwrap();
    let pods: Api<Pod> = Api::namespaced(admin.clone(), &namespace);
    let found = async {
        loop {
            let list = pods.list(&Default::default()).await.unwrap();
            if let Some(pod) = list.items.into_iter().next() {
                return pod;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let pod = tokio::time::timeout(std::time::Duration::from_secs(60), found)
        .await
        .expect("the controller makes a pod");
    controller.abort();
    assert_eq!(
        pod.spec.unwrap().runtime_class_name.as_deref(),
        Some("podvisor-vm")
    );
    assert!(
        pod.metadata
            .annotations
            .unwrap()
            .contains_key(manifests::ANNOTATION)
    );
}

#[tokio::test]
async fn a_data_volume_is_validated_and_filled_with_the_rights_that_install_gives() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let api = |client: &Client| {
        let gvk = GroupVersionKind::gvk("cdi.kubevirt.io", "v1beta1", "DataVolume");
        let resource = ApiResource::from_gvk(&gvk);
        Api::<DynamicObject>::namespaced_with(client.clone(), &namespace, &resource)
    };
    let volume = |name: &str, source: Value| -> DynamicObject {
        let request = json!({ "requests": { "storage": "1Gi" } });
        serde_json::from_value(json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1",
            "kind": "DataVolume",
            "metadata": { "name": name },
            "spec": { "source": source, "storage": { "resources": request } },
        }))
        .unwrap()
    };
    let params = PostParams::default();
    let wrong = volume(
        "wrong",
        json!({ "http": { "url": "ftp://h/x" }, "blank": {} }),
    );
    let Err(kube::Error::Api(status)) = api(&admin).create(&params, &wrong).await else {
        panic!("it is taken");
    };
    let causes = status.details.unwrap().causes;
    let fields: Vec<&str> = causes.iter().map(|cause| cause.field.as_str()).collect();
    assert_eq!(fields, ["spec.source", "spec.source.http.url"]);

    let mut options = controller::Options::default();
    options.namespace = Some(namespace.clone());
    options.lease_namespace = SYSTEM.to_owned();
    options.lease_name = "data-volumes".to_owned();
    let client = server.service_account(SYSTEM, "podvisor-controller");
    let controller = tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    });
    let right = volume("right", json!({ "blank": {} }));
    api(&admin).create(&params, &right).await.unwrap();
    let change = Patch::Merge(json!({ "spec": { "contentType": "kubevirt" } }));
    let patch = PatchParams::default();
    let changed = api(&admin).patch("right", &patch, &change).await;
    assert_eq!(code(changed), 422);
    let pods = Api::<Pod>::namespaced(admin.clone(), &namespace);
    let limit = std::time::Duration::from_secs(120);
    let importer = async {
        loop {
            let list = pods.list(&Default::default()).await.unwrap();
            if let Some(pod) = list.items.into_iter().next() {
                return pod;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let pod = tokio::time::timeout(limit, importer).await;
    let spec = pod.expect("the controller makes an importer").spec.unwrap();
    assert_eq!(spec.automount_service_account_token, Some(false));
    controller.abort();
}
