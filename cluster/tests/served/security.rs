//! What somebody tries by VMs who has rights in one namespace, or a node: docs/cluster.md has the
//! table. Each attempt is made against the real API server.

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use podvisor_cluster::{api, controller, manifests};
use serde_json::{Value, json};

use super::nodes::{eventually, running};
use super::reviews::port_of;
use super::support::{self, certificates::trusting};
use super::{SYSTEM, api_of, apply, code, object, path, put_to, served, vmi};

const VMIS: &str = "virtualmachineinstances";

/// A user with these cluster roles in a namespace, once the authorizer knows it.
pub(super) async fn user(name: &str, namespace: &str, roles: &[&str]) -> Client {
    let server = served();
    let group = "rbac.authorization.k8s.io";
    for role in roles {
        let binding = json!({
            "apiVersion": format!("{group}/v1"),
            "kind": "RoleBinding",
            "metadata": {
                "name": format!("{name}-{}", role.replace(':', "-")), "namespace": namespace,
            },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": role },
            "subjects": [{ "kind": "User", "name": name, "apiGroup": group }],
        });
        apply(&server.admin(), &binding, false).await;
    }
    let client = server.client(name, &[]);
    let vmis = api_of(&client, namespace, "VirtualMachineInstance");
    eventually("the rights are known", async || {
        vmis.list(&Default::default()).await.ok()
    })
    .await;
    client
}

/// A user who may change everything in a namespace that Kubernetes' role `edit` has.
async fn editor(name: &str, namespace: &str) -> Client {
    let roles = ["system:aggregate-to-edit", "podvisor-vm-edit"];
    user(name, namespace, &roles).await
}

/// A VMI with other fields in its specification.
fn with(name: &str, fields: &Value) -> DynamicObject {
    let mut vmi = vmi(name, json!({ "memory": { "guest": "128Mi" } }));
    for (key, value) in fields.as_object().into_iter().flatten() {
        vmi.data["spec"][key] = value.clone();
    }
    vmi
}

fn volume(source: &Value) -> Value {
    let mut volume = json!({ "name": "a" });
    for (key, value) in source.as_object().into_iter().flatten() {
        volume[key] = value.clone();
    }
    json!({ "volumes": [volume] })
}

#[tokio::test]
async fn nothing_of_the_node_is_shown_to_a_guest() {
    let namespace = support::namespace(&served().admin()).await;
    let editor = editor("paths", &namespace).await;
    let vmis = api_of(&editor, &namespace, "VirtualMachineInstance");
    let devices = |devices: Value| json!({ "domain": { "memory": { "guest": "128Mi" }, "devices": devices } });
    for fields in [
        volume(&json!({ "hostDisk": { "path": "/etc/shadow", "type": "Disk" } })),
        volume(&json!({ "containerPath": { "path": "/var/lib/kubelet" } })),
        volume(&json!({ "downwardMetrics": {} })),
        devices(json!({ "hostDevices": [{ "name": "a", "deviceName": "vendor.com/device" }] })),
        devices(json!({ "gpus": [{ "name": "a", "deviceName": "vendor.com/gpu" }] })),
        devices(json!({ "interfaces": [{ "name": "default", "sriov": {} }] })),
    ] {
        let refused = vmis
            .create(&PostParams::default(), &with("a", &fields))
            .await;
        assert_eq!(code(refused), 422, "{fields}");
    }
    let mut sidecar = with("a", &json!({}));
    let hook = ("hooks.kubevirt.io/hookSidecars".to_owned(), "[]".to_owned());
    sidecar.metadata.annotations = Some([hook].into());
    let refused = vmis.create(&PostParams::default(), &sidecar).await;
    assert_eq!(code(refused), 422);
}

#[tokio::test]
async fn names_of_claims_and_secrets_lead_to_no_other_namespace() {
    let namespace = support::namespace(&served().admin()).await;
    let editor = editor("claims", &namespace).await;
    let vmis = api_of(&editor, &namespace, "VirtualMachineInstance");
    for name in ["other/claim", "../claim", "other%2Fclaim", ""] {
        for source in [
            json!({ "persistentVolumeClaim": { "claimName": name } }),
            json!({ "ephemeral": { "persistentVolumeClaim": { "claimName": name } } }),
            json!({ "dataVolume": { "name": name } }),
            json!({ "secret": { "secretName": name } }),
            json!({ "configMap": { "name": name } }),
            json!({ "serviceAccount": { "serviceAccountName": name } }),
            json!({ "cloudInitNoCloud": { "secretRef": { "name": name } } }),
            json!({ "cloudInitConfigDrive": { "networkDataSecretRef": { "name": name } } }),
        ] {
            let vmi = with("a", &volume(&source));
            let refused = vmis.create(&PostParams::default(), &vmi).await;
            assert_eq!(code(refused), 422, "{source}");
        }
    }
}

#[tokio::test]
async fn the_pod_of_a_vm_has_no_privileges_and_no_annotations_that_its_user_forged() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let editor = editor("forger", &namespace).await;
    let mut options = controller::Options::default();
    options.namespace = Some(namespace.clone());
    options.lease_namespace = SYSTEM.to_owned();
    options.lease_name = "security".to_owned();
    let client = server.service_account(SYSTEM, "podvisor-controller");
    let controller = tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    });
    let mut forged = with("a", &json!({}));
    let annotations = [
        ("podvisor.io/vmi", "{\"metadata\":{\"name\":\"other\"}}"),
        (
            "podvisor.io/migration",
            "00000000-0000-0000-0000-000000000000",
        ),
        ("podvisor.io/attachment", "{}"),
        ("kubernetes.io/target-runtime", "virtlet.cloud"),
        ("mine", "kept"),
    ];
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    forged.metadata.annotations = Some(annotations.map(owned).into());
    forged.metadata.labels = Some([owned(("app", "web"))].into());
    api_of(&editor, &namespace, "VirtualMachineInstance")
        .create(&PostParams::default(), &forged)
        .await
        .unwrap();
    let pods: Api<Pod> = Api::namespaced(admin.clone(), &namespace);
    let pod = eventually("the pod is made", async || {
        let list = pods.list(&Default::default()).await.unwrap();
        list.items.into_iter().next()
    })
    .await;
    controller.abort();
    let pod = serde_json::to_value(&pod).unwrap();
    let (meta, spec) = (&pod["metadata"], &pod["spec"]);
    let described: Value =
        serde_json::from_str(meta["annotations"][manifests::ANNOTATION].as_str().unwrap()).unwrap();
    assert_eq!(described["metadata"]["name"], "a");
    assert_eq!(meta["annotations"]["mine"], "kept");
    assert_eq!(meta["labels"]["app"], "web");
    for name in [
        "podvisor.io/migration",
        "podvisor.io/attachment",
        "kubernetes.io/target-runtime",
    ] {
        assert_eq!(meta["annotations"].get(name), None, "{name}");
    }
    for field in ["hostNetwork", "hostPID", "hostIPC", "hostUsers"] {
        assert_ne!(spec.get(field), Some(&json!(true)), "{field}");
    }
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["containers"].as_array().unwrap().len(), 1);
    assert_eq!(spec.get("initContainers"), None);
    let context = &spec["containers"][0]["securityContext"];
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context.get("privileged"), None);
    assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        assert_eq!(volume.get("hostPath"), None, "{volume}");
    }
}

#[tokio::test]
async fn a_pod_that_a_user_made_is_not_taken_for_a_vm() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let editor = editor("maker", &namespace).await;
    let pods: Api<Pod> = Api::namespaced(editor.clone(), &namespace);
    let pod = |name: &str, annotations: Value| -> Pod {
        let spec = json!({ "containers": [{ "name": "a", "image": "a" }] });
        let meta = json!({ "name": name, "annotations": annotations });
        serde_json::from_value(json!({ "metadata": meta, "spec": spec })).unwrap()
    };
    let create = async |pod: Pod| pods.create(&PostParams::default(), &pod).await;
    for name in [
        "podvisor.io/vmi",
        "podvisor.io/migration",
        "podvisor.io/attachment",
    ] {
        assert_eq!(
            code(create(pod("a", json!({ name: "{}" }))).await),
            403,
            "{name}"
        );
    }
    create(pod("plain", json!({}))).await.unwrap();
    // Later, by each way that changes annotations.
    let admins: Api<Pod> = Api::namespaced(admin, &namespace);
    for name in [
        "podvisor.io/vmi",
        "podvisor.io/migration",
        "podvisor.io/attachment",
    ] {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: "{}" } } }));
        let params = PatchParams::default();
        assert_eq!(code(pods.patch("plain", &params, &patch).await), 403);
        let status = admins.patch_status("plain", &params, &patch).await;
        assert_eq!(code(status), 403, "{name} by the status");
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": { "name": "plain", "annotations": { name: "{}" } },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "n" },
        });
        let bound: Result<Value, _> = admins
            .create_subresource("binding", "plain", &Default::default(), &binding)
            .await;
        assert_eq!(code(bound), 403, "{name} by a binding");
    }
}

#[tokio::test]
async fn a_user_writes_no_status() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let editor = editor("liar", &namespace).await;
    running("liars", &namespace, "a", json!({})).await;
    let patch = Patch::Merge(json!({ "status": { "nodeName": "another", "phase": "Failed" } }));
    let params = PatchParams::default();
    let vmis = api_of(&editor, &namespace, "VirtualMachineInstance");
    assert_eq!(code(vmis.patch_status("a", &params, &patch).await), 403);
    // Without the subresource it is not looked at.
    vmis.patch("a", &params, &patch).await.unwrap();
    let mut forged = object("VirtualMachine", "v", json!({}));
    forged.data = super::vm("v", "Halted").data;
    forged.data["status"] = json!({ "ready": true, "printableStatus": "Running" });
    let vms = api_of(&editor, &namespace, "VirtualMachine");
    let made = vms.create(&PostParams::default(), &forged).await.unwrap();
    assert_ne!(made.data["status"]["ready"], json!(true));
    assert_eq!(code(vms.patch_status("v", &params, &patch).await), 403);
    let vmi = api_of(&admin, &namespace, "VirtualMachineInstance");
    assert_eq!(
        vmi.get("a").await.unwrap().data["status"]["nodeName"],
        "liars"
    );
}

#[tokio::test]
async fn a_console_needs_the_right_to_it() {
    let server = served();
    let namespace = support::namespace(&server.admin()).await;
    running("consoles", &namespace, "a", json!({})).await;
    let viewer = user("onlooker", &namespace, &["podvisor-vm-view"]).await;
    let elsewhere = support::namespace(&server.admin()).await;
    let neighbour = editor("neighbour", &elsewhere).await;
    for client in [&viewer, &neighbour] {
        for sub in ["console", "portforward/22", "vsock?port=1&tls=false", "vnc"] {
            let request = http::Request::get(path(VMIS, &namespace, "a", sub));
            let answer = client.request_text(request.body(Vec::new()).unwrap()).await;
            assert_eq!(code(answer), 403, "{sub}");
        }
        for sub in ["pause", "reset", "softreboot", "freeze"] {
            let answer = put_to(client, VMIS, &namespace, "a", sub, "").await;
            assert_eq!(answer, 403, "{sub}");
        }
    }
    // A path that is another one for whoever decodes it names nothing.
    let request = http::Request::get(path(VMIS, &elsewhere, "..%2fa", "console"));
    let answer = neighbour
        .request_text(request.body(Vec::new()).unwrap())
        .await;
    assert!(matches!(code(answer), 400 | 403 | 404));
}

#[tokio::test]
async fn nobody_but_the_api_server_says_who_a_user_is() {
    let server = served();
    let namespace = support::namespace(&server.admin()).await;
    running("proxied", &namespace, "a", json!({})).await;
    let port = port_of(&format!("v1.{}", api::GROUP)).await;
    let console = path(VMIS, &namespace, "a", "console");
    // With no certificate, and with one that is a user's and not the front proxy's.
    let files = server
        .authority()
        .client("x-user", "admin", &["system:masters"]);
    for files in [None, Some(files.unwrap())] {
        let answer = ask_as_proxy(port, files.as_ref(), &console).await;
        let is_refused = answer.as_ref().is_ok_and(|answer| {
            answer.starts_with("HTTP/1.1 401") || answer.starts_with("HTTP/1.1 403")
        });
        assert!(is_refused || answer.is_err(), "{answer:?}");
    }
}

/// Sends a request that claims to come from the front proxy.
async fn ask_as_proxy(
    port: u16,
    files: Option<&support::certificates::Files>,
    path: &str,
) -> std::io::Result<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = trusting(files)
        .connect("localhost".try_into().unwrap(), stream)
        .await?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: x\r\nX-Remote-User: admin\r\n\
         X-Remote-Group: system:masters\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn the_controllers_account_makes_no_secrets_but_those_of_uploads_copies_and_exports() {
    let server = served();
    let namespace = support::namespace(&server.admin()).await;
    let controller = server.service_account(SYSTEM, "podvisor-controller");
    let owner = |kind: &str| json!([{ "apiVersion": "v1", "kind": kind, "name": "a", "uid": "u" }]);
    let secret = |name: &str, kind: &str, keys: &[&str], owners: Value| -> Secret {
        let data: serde_json::Map<_, _> = keys
            .iter()
            .map(|key| ((*key).to_owned(), json!("")))
            .collect();
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "ownerReferences": owners,
                "annotations": { "kubernetes.io/service-account.name": "default" },
            },
            "type": kind, "data": data,
        }))
        .unwrap()
    };
    let tls = "kubernetes.io/tls";
    let keys = ["tls.crt", "tls.key"];
    let create = async |namespace: &str, secret: &Secret| {
        let secrets: Api<Secret> = Api::namespaced(controller.clone(), namespace);
        secrets.create(&PostParams::default(), secret).await
    };
    for refused in [
        secret(
            "upload-a",
            "kubernetes.io/service-account-token",
            &[],
            owner("DataVolume"),
        ),
        secret("upload-a", "Opaque", &keys, owner("DataVolume")),
        secret(
            "upload-a",
            tls,
            &["tls.crt", "tls.key", "token"],
            owner("DataVolume"),
        ),
        secret("upload-a", tls, &keys, Value::Null),
        secret("upload-a", tls, &keys, owner("Pod")),
        secret("registry", tls, &keys, owner("DataVolume")),
        secret("virt-export-a", tls, &keys, owner("VirtualMachineExport")),
        secret("virt-export-a", "Opaque", &["token"], owner("Pod")),
        secret("export-token-a", "Opaque", &["token"], owner("Pod")),
        secret("export-token-a", "Opaque", &["token"], Value::Null),
        secret(
            "export-token-a",
            "kubernetes.io/service-account-token",
            &["token"],
            owner("VirtualMachineExport"),
        ),
        secret(
            "export-token-a",
            "Opaque",
            &["token", "x"],
            owner("VirtualMachineExport"),
        ),
        secret("podvisor-cluster-authority", tls, &keys, Value::Null),
    ] {
        assert_eq!(code(create(&namespace, &refused).await), 403, "{refused:?}");
    }
    let own = secret("podvisor-upload-tokens", tls, &keys, Value::Null);
    assert_eq!(code(create(SYSTEM, &own).await), 403);
    for (name, kind) in [
        ("upload-a", "DataVolume"),
        ("source-a", "Pod"),
        ("virt-export-a", "Pod"),
    ] {
        let allowed = secret(name, tls, &keys, owner(kind));
        create(&namespace, &allowed).await.unwrap();
    }
    let export = owner("VirtualMachineExport");
    let token = secret("export-token-a", "Opaque", &["token"], export);
    create(&namespace, &token).await.unwrap();
}

#[tokio::test]
async fn a_node_changes_neither_vms_nor_pods_of_other_nodes() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    running("victim", &namespace, "a", json!({})).await;
    let node = server.kubelet("intruder");
    let vmis = api_of(&node, &namespace, "VirtualMachineInstance");
    let params = PatchParams::default();
    assert_eq!(code(vmis.get("a").await), 403);
    assert_eq!(code(vmis.list(&Default::default()).await), 403);
    let looks = serde_json::from_value(json!([{ "op": "test", "path": "/kind", "value": "x" }]));
    let looks = Patch::Json::<()>(looks.unwrap());
    // Not even to look at it by a patch that changes nothing.
    let looked = code(vmis.patch_status("a", &params, &looks).await);
    assert!(matches!(looked, 403 | 422), "{looked}");
    let nothing = Patch::Json::<()>(serde_json::from_value(json!([])).unwrap());
    assert_eq!(code(vmis.patch_status("a", &params, &nothing).await), 403);
    let claim = Patch::Merge(json!({ "status": { "nodeName": "intruder" } }));
    assert_eq!(code(vmis.patch_status("a", &params, &claim).await), 403);
    assert_eq!(put_to(&node, VMIS, &namespace, "a", "pause", "").await, 403);
    let vms = api_of(&node, &namespace, "VirtualMachine");
    assert_eq!(code(vms.list(&Default::default()).await), 403);
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(node, SYSTEM);
    assert_eq!(code(secrets.list(&Default::default()).await), 403);
}
