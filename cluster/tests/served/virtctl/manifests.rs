//! Manifests that the client makes, and what the API server says to them.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{Api, Client, api::PostParams};
use serde_json::{Value, json};

use super::super::served;
use super::Virtctl;

/// Manifests that `virtctl create` prints, as it is called, and why each is refused, if it is.
const CREATED: [(&str, Result<(), &str>); 22] = [
    ("vm --name=v", Ok(())),
    (
        "vm --name=v --run-strategy=Manual --memory=1Gi --termination-grace-period=5",
        Ok(()),
    ),
    (
        "vm --name=v --volume-containerdisk=src:registry/disk:1",
        Ok(()),
    ),
    ("vm --name=v --volume-pvc=src:some", Ok(())),
    ("vm --name=v --volume-import=type:blank,size:1Gi", Ok(())),
    (
        "vm --name=v --volume-import=type:ds,src:golden,size:1Gi",
        Ok(()),
    ),
    (
        "vm --name=v --volume-import=type:http,url:https://example/disk.img,size:1Gi",
        Ok(()),
    ),
    (
        "vm --name=v --volume-import=type:registry,url:docker://example/disk:1,size:1Gi",
        Ok(()),
    ),
    (
        "vm --name=v --volume-import=type:pvc,src:NAMESPACE/golden,size:1Gi",
        Ok(()),
    ),
    (
        "vm --name=v --volume-import=type:snapshot,src:NAMESPACE/golden,size:1Gi",
        Ok(()),
    ),
    (
        "vm --name=v --volume-import=type:s3,url:https://example/disk.img,size:1Gi",
        Err("dataVolumeTemplates[0].spec.source.s3"),
    ),
    (
        "vm --name=v --volume-sysprep=src:answers",
        Err("volumes[0].sysprep"),
    ),
    ("vm --name=v --user=ann --ssh-key=ssh-ed25519", Ok(())),
    ("vm --name=v --user=ann --cloud-init=configdrive", Ok(())),
    (
        "vm --name=v --user=ann --access-cred=type:ssh,src:keys",
        Ok(()),
    ),
    ("vm --name=v --access-cred=type:password,src:words", Ok(())),
    (
        "vm --name=v --instancetype=virtualmachineinstancetype/small",
        Ok(()),
    ),
    (
        "vm --name=v --instancetype=missing",
        Err("spec.instancetype.name"),
    ),
    (
        "instancetype --namespaced --name=i --cpu=2 --memory=1Gi",
        Ok(()),
    ),
    (
        "instancetype --namespaced --name=i --cpu=2 --memory=1Gi --gpu=name:g,devicename:d",
        Ok(()),
    ),
    (
        "preference --namespaced --name=p --cpu-topology=preferCores --volume-storage-class=fast",
        Ok(()),
    ),
    ("clone --name=c --source-name=v --target-name=w", Ok(())),
];

/// Sends a manifest to the API server as `kubectl create` does, with all checks.
pub(super) async fn create(
    client: &Client,
    namespace: &str,
    manifest: &str,
    is_dry: bool,
) -> Result<Value, String> {
    let field = |name: &str| {
        let mut lines = manifest.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    let kind = field("kind").expect("a kind").to_ascii_lowercase();
    let version = field("apiVersion").expect("a version");
    let dry = if is_dry { "&dryRun=All" } else { "" };
    let path =
        format!("/apis/{version}/namespaces/{namespace}/{kind}s?fieldValidation=Strict{dry}");
    let request = http::Request::post(path)
        .header("content-type", "application/yaml")
        .body(manifest.as_bytes().to_vec())
        .unwrap();
    let answer = client.request(request).await;
    answer.map_err(|error| error.to_string())
}

/// Makes the instance type `small` of the namespace, as `virtctl` writes it.
async fn create_small(admin: &Client, virtctl: &Virtctl) {
    let small = "create instancetype --namespaced --name=small --cpu=1 --memory=128Mi";
    let small = virtctl.run(small).await.text;
    create(admin, &virtctl.namespace, &small, false)
        .await
        .unwrap();
}

#[tokio::test]
async fn what_virtctl_creates_is_taken_or_refused_by_its_path() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let namespace = &virtctl.namespace;
    create_small(&admin, &virtctl).await;
    for (arguments, expected) in CREATED {
        let arguments = arguments.replace("NAMESPACE", namespace);
        let said = virtctl.run(&format!("create {arguments}")).await;
        assert!(said.succeeded, "{arguments}: {said:?}");
        let found = create(&admin, namespace, &said.text, true).await;
        match (expected, &found) {
            (Ok(()), Ok(_)) => {}
            (Err(path), Err(error)) if error.contains(path) => {}
            _ => panic!(
                "{arguments}: {found:?}, and not {expected:?}: {}",
                said.text
            ),
        }
    }
}

/// What is inferred from a claim's labels, as `virtctl create vm` asks for it.
#[tokio::test]
async fn a_vm_has_the_instance_type_that_its_volume_names() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let namespace = &virtctl.namespace;
    create_small(&admin, &virtctl).await;
    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), namespace);
    for (name, labels) in [
        (
            "labelled",
            json!({
                "instancetype.kubevirt.io/default-instancetype": "small",
                "instancetype.kubevirt.io/default-instancetype-kind": "VirtualMachineInstancetype",
            }),
        ),
        ("plain", json!({})),
    ] {
        let claim = serde_json::from_value(json!({
            "metadata": { "name": name, "labels": labels },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Gi" } },
            },
        }));
        let params = PostParams::default();
        claims.create(&params, &claim.unwrap()).await.unwrap();
    }
    let source = "source:\n  pvc:\n    name: labelled";
    let source = format!(
        "apiVersion: cdi.kubevirt.io/v1beta1\nkind: DataSource\nmetadata:\n  name: golden\n\
         spec:\n  {}\n",
        source.replace('\n', "\n  ")
    );
    create(&admin, namespace, &source, false).await.unwrap();
    let small = json!({ "name": "small", "kind": "VirtualMachineInstancetype" });
    for (volume, instancetype, memory) in [
        ("--volume-pvc=src:labelled", &small, &Value::Null),
        (
            "--volume-pvc=src:labelled --infer-instancetype",
            &small,
            &Value::Null,
        ),
        ("--volume-pvc=src:plain", &Value::Null, &json!("512Mi")),
        ("--volume-pvc=src:missing", &Value::Null, &json!("512Mi")),
        (
            "--volume-import=type:ds,src:golden,size:1Gi",
            &small,
            &Value::Null,
        ),
        (
            "--volume-import=type:pvc,src:NAMESPACE/labelled,size:1Gi",
            &small,
            &Value::Null,
        ),
    ] {
        let volume = volume.replace("NAMESPACE", namespace);
        let said = virtctl.run(&format!("create vm --name=v {volume}")).await;
        let vm = create(&admin, namespace, &said.text, true).await.unwrap();
        assert_eq!(vm["spec"]["instancetype"], *instancetype, "{volume}");
        assert_eq!(vm["spec"]["preference"], Value::Null, "{volume}");
        let domain = &vm["spec"]["template"]["spec"]["domain"];
        assert_eq!(domain["memory"]["guest"], *memory, "{volume}");
    }
    // Who asks for it by name is told why there is none.
    let asked = "create vm --name=v --volume-pvc=src:plain --infer-instancetype";
    let said = virtctl.run(asked).await;
    let refused = create(&admin, namespace, &said.text, true)
        .await
        .unwrap_err();
    let why = "spec.instancetype.inferFromVolume is of the claim plain, which has no label";
    assert!(refused.contains(why), "{refused}");
}
