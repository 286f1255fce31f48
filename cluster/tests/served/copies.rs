//! Copies of claims of other namespaces, through the real API server: who may have them, and the
//! programs of both pods.

use std::fs;
use std::process::{Child, Command, Stdio};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::nodes::eventually;
use super::security::user;
use super::support;
use super::uploads::{
    Program, address, bind, content, in_phase, mount, sign, start_controller, volumes,
};
use super::{SYSTEM, api_of, apply, code, object, served};

const TOKEN: &str = "cdi.kubevirt.io/storage.clone.token";

/// The right to copy claims of a namespace: all, or those of these names.
async fn allow(subject: Value, namespace: &str, names: &[&str]) {
    let group = "rbac.authorization.k8s.io";
    let name = format!("copies-{}", subject["name"].as_str().unwrap());
    let mut rule = json!({
        "apiGroups": ["cdi.kubevirt.io"], "resources": ["datavolumes/source"], "verbs": ["create"],
    });
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    let meta = json!({ "name": name, "namespace": namespace });
    let version = format!("{group}/v1");
    let role = json!({ "apiVersion": version, "kind": "Role", "metadata": meta, "rules": [rule] });
    let binding = json!({
        "apiVersion": version, "kind": "RoleBinding", "metadata": meta, "subjects": [subject],
        "roleRef": { "apiGroup": group, "kind": "Role", "name": name },
    });
    for item in [role, binding] {
        apply(&served().admin(), &item, false).await;
    }
}

fn person(name: &str) -> Value {
    json!({ "kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io" })
}

/// A claim that is bound, as a provisioner leaves it.
async fn bound_claim(namespace: &str, name: &str, size: &str) {
    let claims = Api::<PersistentVolumeClaim>::namespaced(served().admin(), namespace);
    let claim = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": size } },
        },
    });
    let claim = serde_json::from_value(claim).unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    bind(namespace, name).await;
}

fn volume(name: &str, source: &Value) -> DynamicObject {
    let mut spec = source.clone();
    spec["storage"] = json!({});
    let object = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": { "name": name }, "spec": spec,
    });
    serde_json::from_value(object).unwrap()
}

fn of_claim(namespace: &str, name: &str) -> Value {
    json!({ "source": { "pvc": { "namespace": namespace, "name": name } } })
}

fn of_data_source(namespace: &str, name: &str) -> Value {
    let reference = json!({ "kind": "DataSource", "namespace": namespace, "name": name });
    json!({ "sourceRef": reference })
}

async fn create(
    client: &Client,
    namespace: &str,
    name: &str,
    source: &Value,
) -> Result<DynamicObject, kube::Error> {
    let volume = volume(name, source);
    let params = PostParams::default();
    volumes(client, namespace).create(&params, &volume).await
}

/// Creates a DataVolume as soon as its author has the right to, which the authorizer learns.
async fn create_soon(client: &Client, namespace: &str, name: &str, source: &Value) {
    eventually("the right is known", async || {
        create(client, namespace, name, source).await.ok()
    })
    .await;
}

async fn running_reason(client: &Client, namespace: &str, name: &str, reason: &str) {
    eventually(&format!("{name}: {reason}"), async || {
        let volume = volumes(client, namespace).get(name).await.ok()?;
        let conditions = volume.data["status"]["conditions"].as_array()?.clone();
        let running = conditions
            .into_iter()
            .find(|one| one["type"] == "Running")?;
        (running["reason"] == reason).then_some(())
    })
    .await;
}

/// The pod beside the source of a DataVolume.
async fn source_pod(namespace: &str, volume: &str) -> Pod {
    let pods = Api::<Pod>::namespaced(served().admin(), namespace);
    let prefix = format!("source-{volume}-");
    eventually("the source pod is made", async || {
        let list = pods.list(&ListParams::default()).await.ok()?;
        let is_its = |pod: &Pod| pod.metadata.name.as_ref().unwrap().starts_with(&prefix);
        list.items.into_iter().find(is_its)
    })
    .await
}

/// Runs the program of a source pod with a file as its claim.
fn send(pod: &Pod, disk: &TempDir, credentials: &TempDir) -> Child {
    let args = pod.spec.as_ref().unwrap().containers[0]
        .args
        .clone()
        .unwrap();
    let path = |directory: &TempDir| directory.path().display().to_string();
    let args = args.iter().map(|arg| match arg.split_once('=') {
        Some(("--file", _)) => format!("--file={}/disk.img", path(disk)),
        Some(("--credentials", _)) => format!("--credentials={}", path(credentials)),
        _ => arg.clone(),
    });
    Command::new(env!("CARGO_BIN_EXE_podvisor-cluster"))
        .args(args)
        .arg(format!("--termination-log={}/message", path(credentials)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

async fn exit_code(mut child: Child) -> Option<i32> {
    eventually("the source's program ends", async || {
        child.try_wait().unwrap()
    })
    .await
    .code()
}

async fn is_gone(namespace: &str, pod: &Pod) {
    let pods = Api::<Pod>::namespaced(served().admin(), namespace);
    let name = pod.metadata.name.as_deref().unwrap();
    eventually("the source pod goes", async || {
        pods.get_opt(name).await.ok()?.is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_another_namespace_is_copied() {
    let admin = served().admin();
    let (namespace, golden) = (
        support::namespace(&admin).await,
        support::namespace(&admin).await,
    );
    let roles = ["system:aggregate-to-edit", "podvisor-vm-edit"];
    let ann = user("copier", &namespace, &roles).await;
    let controller = start_controller(&namespace);
    bound_claim(&golden, "debian", "8Mi").await;
    let source = of_claim(&golden, "debian");
    assert_eq!(code(create(&ann, &namespace, "copy", &source).await), 403);
    allow(person("copier"), &golden, &["debian"]).await;
    create_soon(&ann, &namespace, "copy", &source).await;
    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    bind(&namespace, "copy").await;
    let claim = claims.get("copy").await.unwrap();
    let request = claim.spec.unwrap().resources.unwrap().requests.unwrap();
    assert_eq!(
        request["storage"].0, "9Mi",
        "the source's size, and its file system's"
    );
    let program = Program::start(&namespace, "copy", address(11)).await;
    let sender = source_pod(&golden, "copy").await;
    in_phase(&ann, &namespace, "copy", "CloneScheduled").await;
    let held = volumes(&ann, &namespace).get("copy").await.unwrap();
    assert_eq!(
        held.metadata.finalizers.unwrap(),
        ["podvisor.io/clone-source"]
    );

    // The controller is killed, and another one goes on.
    drop(controller);
    let _controller = start_controller(&namespace);
    let disk = TempDir::new().unwrap();
    let mut given = content();
    // What a guest writes is never taken for a format.
    given[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    fs::write(disk.path().join("disk.img"), &given).unwrap();
    // Who has another certificate of the authority sends nothing: here the importer's own.
    let strange = send(&sender, &disk, &program.others);
    assert_ne!(exit_code(strange).await, Some(0));
    assert!(!program.disk().exists());
    let own = TempDir::new().unwrap();
    mount(&own, &golden, sender.metadata.name.as_deref().unwrap()).await;
    fs::write(own.path().join("message"), "").unwrap();
    // What is too large is refused with its reason.
    let large = TempDir::new().unwrap();
    fs::write(large.path().join("disk.img"), vec![1; 9 << 20]).unwrap();
    assert_eq!(exit_code(send(&sender, &large, &own)).await, Some(1));
    let message = fs::read_to_string(own.path().join("message")).unwrap();
    assert!(message.contains("ask for a larger claim"), "{message}");
    assert_eq!(exit_code(send(&sender, &disk, &own)).await, Some(0));
    given.resize(8 << 20, 0);
    assert!(program.finish().await == given);
    in_phase(&ann, &namespace, "copy", "Succeeded").await;
    is_gone(&golden, &sender).await;
    eventually("the finalizer comes off", async || {
        let volume = volumes(&ann, &namespace).get("copy").await.ok()?;
        let finalizers = volume.metadata.finalizers.unwrap_or_default();
        finalizers.is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_golden_image_is_copied_for_a_machine_once_nobody_uses_it() {
    let admin = served().admin();
    let (namespace, golden) = (
        support::namespace(&admin).await,
        support::namespace(&admin).await,
    );
    let _controller = start_controller(&namespace);
    bound_claim(&golden, "debian-13", "8Mi").await;
    let kind = GroupVersionKind::gvk("cdi.kubevirt.io", "v1beta1", "DataSource");
    let sources: Api<DynamicObject> =
        Api::namespaced_with(admin.clone(), &golden, &ApiResource::from_gvk(&kind));
    let named = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource",
        "metadata": { "name": "debian" }, "spec": { "source": { "pvc": { "name": "debian-13" } } },
    });
    let named = serde_json::from_value(named).unwrap();
    sources
        .create(&PostParams::default(), &named)
        .await
        .unwrap();
    let pods: Api<Pod> = Api::namespaced(admin.clone(), &golden);
    let user = json!({
        "metadata": { "name": "user" },
        "spec": {
            "containers": [{ "name": "a", "image": "a" }],
            "volumes": [{
                "name": "disk", "persistentVolumeClaim": { "claimName": "debian-13" },
            }],
        },
    });
    let user = serde_json::from_value(user).unwrap();
    pods.create(&PostParams::default(), &user).await.unwrap();

    // Whose right counts is the account's that the machine has, not its author's.
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let mut spec = of_data_source(&golden, "debian");
    spec["storage"] = json!({});
    let vm = object(
        "VirtualMachine",
        "vm",
        json!({
            "runStrategy": "Halted",
            "dataVolumeTemplates": [{ "metadata": { "name": "root" }, "spec": spec }],
            "template": { "spec": {
                "domain": {
                    "memory": { "guest": "128Mi" },
                    "devices": { "disks": [{ "name": "root", "disk": {} }] },
                },
                "volumes": [{ "name": "root", "dataVolume": { "name": "root" } }],
            } },
        }),
    );
    let refused = vms.create(&PostParams::default(), &vm).await.unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("spec.dataVolumeTemplates[0]")
            && text.contains(&format!("{namespace}:default")),
        "{text}"
    );
    let account = json!({ "kind": "ServiceAccount", "name": "default", "namespace": namespace });
    allow(account, &golden, &[]).await;
    eventually("the right is known", async || {
        vms.create(&PostParams::default(), &vm).await.ok()
    })
    .await;
    bind(&namespace, "root").await;
    running_reason(&admin, &namespace, "root", "CloneSourceInUse").await;
    pods.delete("user", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    let program = Program::start(&namespace, "root", address(12)).await;
    let sender = source_pod(&golden, "root").await;
    let spec = sender.spec.as_ref().unwrap();
    let claim = spec.volumes.iter().flatten().find_map(|volume| {
        let claim = volume.persistent_volume_claim.as_ref()?;
        Some((claim.claim_name.as_str(), claim.read_only))
    });
    assert_eq!(claim, Some(("debian-13", Some(true))));

    // Deleted in the middle, it leaves nothing in the namespace of its source.
    vms.delete("vm", &DeleteParams::default()).await.unwrap();
    let all = volumes(&admin, &namespace);
    all.delete("root", &DeleteParams::default()).await.unwrap();
    is_gone(&golden, &sender).await;
    eventually("the DataVolume goes", async || {
        all.get_opt("root").await.ok()?.is_none().then_some(())
    })
    .await;
    assert!(!program.disk().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_copied_without_the_right_to_its_source() {
    let admin = served().admin();
    let (namespace, golden) = (
        support::namespace(&admin).await,
        support::namespace(&admin).await,
    );
    let roles = ["system:aggregate-to-edit", "podvisor-vm-edit"];
    let eve = user("eve", &namespace, &roles).await;
    for claim in ["public", "secret"] {
        bound_claim(&golden, claim, "8Mi").await;
    }
    allow(person("eve"), &golden, &["public"]).await;
    let public = of_claim(&golden, "public");
    let names = [
        "kept", "other", "forged", "expired", "early", "widened", "removed",
    ];
    for name in names {
        create_soon(&eve, &namespace, name, &public).await;
    }
    for source in [
        of_claim(&golden, "secret"),
        // It may name any claim by the time of the copy.
        of_data_source(&golden, "public"),
        of_claim("kube-system", "public"),
    ] {
        let refused = create(&eve, &namespace, "x", &source).await;
        assert_eq!(code(refused), 403, "{source}");
    }
    for source in [
        of_claim("../../v1", "public"),
        of_claim(&golden, "../secret"),
        json!({ "source": { "snapshot": { "namespace": golden, "name": "public" } } }),
    ] {
        let refused = create(&eve, &namespace, "x", &source).await;
        assert_eq!(code(refused), 422, "{source}");
    }
    let all = volumes(&eve, &namespace);
    // A copied token is not kept, and a specification does not change under one.
    let kept = all.get("kept").await.unwrap();
    let token = kept.metadata.annotations.unwrap()[TOKEN].clone();
    let mut copied = volume("copied", &public);
    copied.metadata.annotations = Some([(TOKEN.to_owned(), token.clone())].into());
    let copied = all.create(&PostParams::default(), &copied).await.unwrap();
    assert_ne!(copied.metadata.annotations.unwrap()[TOKEN], token);
    let change = Patch::Merge(json!({ "spec": of_claim(&golden, "secret") }));
    let params = PatchParams::default();
    assert_eq!(code(all.patch("kept", &params, &change).await), 422);

    let secrets = Api::<Secret>::namespaced(admin.clone(), SYSTEM);
    let secret = secrets.get("podvisor-clone-tokens").await.unwrap();
    let key = secret.data.unwrap()["key"].0.clone();
    let claims = |name: &str, source: &str| {
        json!({
            "op": "Clone", "ns": namespace, "sub": name, "srcNs": golden,
            "srcKind": "PersistentVolumeClaim", "src": source,
        })
    };
    for (name, token) in [
        ("other", Some(token)),
        (
            "forged",
            Some(sign(&[0; 32], claims("forged", "public"), 0, 300)),
        ),
        (
            "expired",
            Some(sign(&key, claims("expired", "public"), 7200, -3600)),
        ),
        // Signed for a DataVolume that was created later.
        (
            "early",
            Some(sign(&key, claims("early", "public"), -3600, 7200)),
        ),
        // Signed for another source than that which it has.
        (
            "widened",
            Some(sign(&key, claims("widened", "secret"), 0, 300)),
        ),
        ("removed", None),
    ] {
        let annotations = json!({ "metadata": { "annotations": { TOKEN: token } } });
        let patch = Patch::Merge(annotations);
        all.patch(name, &params, &patch).await.unwrap();
    }
    let _controller = start_controller(&namespace);
    let made = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    for name in &names[1..] {
        running_reason(&eve, &namespace, name, "CloneUnauthorized").await;
        assert!(made.get_opt(name).await.unwrap().is_none(), "{name}");
    }
    bind(&namespace, "kept").await;
    in_phase(&eve, &namespace, "kept", "CloneScheduled").await;
    let pods: Api<Pod> = Api::namespaced(admin, &golden);
    let pods = pods.list(&ListParams::default()).await.unwrap();
    assert!(pods.items.is_empty(), "{:?}", pods.items);
}
