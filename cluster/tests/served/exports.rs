//! Exports from the object to the bytes: through the real API server, the controller with its own
//! rights, and the program of the exporter's pod.

use std::fs;
use std::io::Read as _;
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use flate2::read::GzDecoder;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::nodes::eventually;
use super::security::user;
use super::snapshots::{of, of_kind, reference};
use super::support::{self, csi, kubelet};
use super::uploads::{self, address, content, mount};
use super::{api_of, code, object, served};

const TOKEN: &str = "x-kubevirt-export-token";

pub(super) fn exports(client: &Client, namespace: &str, version: &str) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("export.kubevirt.io", version, "VirtualMachineExport");
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&gvk))
}

fn export(version: &str, name: &str, spec: &Value) -> DynamicObject {
    let gvk = GroupVersionKind::gvk("export.kubevirt.io", version, "VirtualMachineExport");
    DynamicObject::new(name, &ApiResource::from_gvk(&gvk)).data(json!({ "spec": spec }))
}

fn source(group: &str, kind: &str, name: &str) -> Value {
    json!({ "apiGroup": group, "kind": kind, "name": name })
}

fn of_claim(name: &str) -> Value {
    json!({ "source": source("", "PersistentVolumeClaim", name) })
}

async fn create(client: &Client, namespace: &str, name: &str, spec: &Value) {
    let export = export("v1beta1", name, spec);
    let exports = exports(client, namespace, "v1beta1");
    exports
        .create(&PostParams::default(), &export)
        .await
        .unwrap();
}

/// Makes a claim that is bound.
pub(super) async fn claim(client: &Client, namespace: &str, name: &str) {
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    let claim = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "8Mi" } },
        },
    }));
    let params = PostParams::default();
    claims.create(&params, &claim.unwrap()).await.unwrap();
    uploads::bind(namespace, name).await;
}

/// Waits until an export's status is as expected.
async fn status(
    client: &Client,
    namespace: &str,
    name: &str,
    is: impl Fn(&Value) -> bool,
) -> Value {
    let exports = exports(client, namespace, "v1beta1");
    let mut last = Value::Null;
    let found = async || {
        last = exports.get(name).await.ok()?.data["status"].clone();
        is(&last).then(|| last.clone())
    };
    eventually(&format!("the export {name} is as expected"), found).await
}

fn phase(status: &Value) -> (&str, &str, &str) {
    let conditions = status["conditions"].as_array();
    let ready = conditions.and_then(|all| all.iter().find(|of| of["type"] == "Ready"));
    let text = |key: &str| {
        ready
            .and_then(|ready| ready[key].as_str())
            .unwrap_or_default()
    };
    let phase = status["phase"].as_str().unwrap_or_default();
    (phase, text("reason"), text("message"))
}

/// The program of an exporter's pod, with directories as its claims.
pub(super) struct Program {
    child: Child,
    pods: Api<Pod>,
    /// The pod's name.
    pub(super) pod: String,
    address: IpAddr,
    directory: TempDir,
}

impl Program {
    /// Plays the kubelet for the pod of an export, all of whose claims have this disk.
    pub(super) async fn start(namespace: &str, export: &str, address: IpAddr, disk: &[u8]) -> Self {
        let pods = Api::<Pod>::namespaced(served().admin(), namespace);
        let prefix = format!("virt-export-{export}-");
        let pod = eventually("the pod is made", async || {
            let list = pods.list(&ListParams::default()).await.ok()?;
            let is_its = |pod: &Pod| pod.metadata.name.as_ref().unwrap().starts_with(&prefix);
            list.items.into_iter().find(is_its)
        })
        .await;
        let directory = TempDir::new().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let spec = pod.spec.as_ref().unwrap();
        for volume in spec.volumes.iter().flatten() {
            if let Some(secret) = &volume.secret {
                mount(
                    &directory,
                    namespace,
                    secret.secret_name.as_deref().unwrap(),
                )
                .await;
            }
        }
        let args = spec.containers[0].args.as_ref().unwrap().iter();
        let args: Vec<_> = args
            .map(|arg| match arg.split_once('=') {
                Some(("--volume", volume)) => {
                    let (name, _) = volume.split_once('=').unwrap();
                    fs::write(at(name), disk).unwrap();
                    format!("--volume={name}={}", at(name))
                }
                Some(("--files", volume)) => {
                    let (name, _) = volume.split_once('=').unwrap();
                    fs::create_dir(at(name)).unwrap();
                    fs::write(directory.path().join(name).join("vm.memory.dump"), disk).unwrap();
                    format!("--files={name}={}", at(name))
                }
                Some(("--token", _)) => format!("--token={}", at("token")),
                Some(("--credentials", _)) => format!("--credentials={}", at("")),
                _ => arg.replace("[::]", &address.to_string()),
            })
            .collect();
        let child = Command::new(env!("CARGO_BIN_EXE_podvisor-cluster"))
            .args(args)
            .arg(format!("--termination-log={}", at("log")))
            .stdout(Stdio::null())
            .stderr(fs::File::create(at("stderr")).unwrap())
            .spawn()
            .unwrap();
        let program = Self {
            child,
            pods,
            pod: pod.metadata.name.unwrap(),
            address,
            directory,
        };
        eventually("the pod listens", async || {
            TcpStream::connect((address, 8443)).await.ok()
        })
        .await;
        program.report("Running", "True").await;
        program
    }

    async fn report(&self, phase: &str, ready: &str) {
        let address = self.address.to_string();
        let status = json!({
            "phase": phase, "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": ready }],
        });
        kubelet::set_status(&self.pods, &self.pod, status).await;
    }

    /// Waits until the pod is to end, and ends it.
    async fn ends(mut self) {
        eventually("the pod is deleted", async || {
            let pod = self.pods.get_opt(&self.pod).await.unwrap();
            pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
                .then_some(())
        })
        .await;
        kubelet::finish(&self.pods, &self.pod).await;
        self.child.kill().unwrap();
    }

    fn token(&self) -> String {
        fs::read_to_string(self.directory.path().join("token")).unwrap()
    }

    /// Asks for a link, known by the certificate that stands beside it.
    async fn ask(
        &self,
        link: &Value,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
    ) -> (http::response::Parts, Bytes) {
        let (host, path) = url
            .strip_prefix("https://")
            .unwrap()
            .split_once('/')
            .unwrap();
        let mut roots = RootCertStore::empty();
        let authorities = link["cert"].as_str().unwrap().as_bytes();
        for authority in CertificateDer::pem_slice_iter(authorities) {
            roots.add(authority.unwrap()).unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect((self.address, 8443)).await.unwrap();
        let name = host.to_owned().try_into().unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let stream = TokioIo::new(stream.await.unwrap());
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut request = http::Request::builder()
            .method(method)
            .uri(format!("/{path}"));
        request = request.header("host", host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Empty::<Bytes>::new()).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let (head, body) = answer.into_parts();
        (head, body.collect().await.unwrap().to_bytes())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_downloaded_by_who_has_the_token() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let roles = [
        "system:aggregate-to-edit",
        "system:aggregate-to-view",
        "podvisor-vm-edit",
    ];
    let ann = user("exporter", &namespace, &roles).await;
    let _controller = uploads::start_controller(&namespace);
    claim(&ann, &namespace, "disk").await;
    let mut made = export("v1beta1", "e", &of_claim("disk"));
    let forged = [("team", "a"), ("kubevirt.io", "virt-launcher")];
    made.metadata.labels = Some(forged.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    let vmi = ("podvisor.io/vmi".to_owned(), "{}".to_owned());
    made.metadata.annotations = Some([vmi].into());
    let api = exports(&ann, &namespace, "v1beta1");
    api.create(&PostParams::default(), &made).await.unwrap();
    let program = Program::start(&namespace, "e", address(21), &content()).await;
    let is_ready = |status: &Value| status["phase"] == "Ready";
    let found = status(&ann, &namespace, "e", is_ready).await;
    assert_eq!(phase(&found), ("Ready", "PodReady", ""));
    assert_eq!(found["serviceName"], "virt-export-e");
    assert_eq!(found["tokenSecretRef"], "export-token-e");
    assert_eq!(found["links"].get("external"), None);

    let link = &found["links"]["internal"];
    let volume = &link["volumes"][0];
    assert_eq!(volume["name"], "disk");
    let url = |format: &str| {
        let formats = volume["formats"].as_array().unwrap();
        let found = formats.iter().find(|of| of["format"] == format);
        found.unwrap()["url"].as_str().unwrap().to_owned()
    };
    let token = program.token();
    let own = Api::<Secret>::namespaced(ann.clone(), &namespace);
    let secret = own.get("export-token-e").await.unwrap();
    assert_eq!(secret.data.unwrap()["token"].0, token.as_bytes());
    let good = (TOKEN, token.as_str());

    let (head, raw) = program.ask(link, "GET", &url("raw"), &[good]).await;
    assert_eq!((head.status.as_u16(), raw == content()), (200, true));
    let (_, packed) = program.ask(link, "GET", &url("gzip"), &[good]).await;
    let mut unpacked = Vec::new();
    GzDecoder::new(&*packed).read_to_end(&mut unpacked).unwrap();
    assert!(unpacked == content() && packed.len() < content().len());
    let part = [good, ("range", "bytes=5-9")];
    let (head, raw) = program.ask(link, "GET", &url("raw"), &part).await;
    assert_eq!((head.status.as_u16(), &raw[..]), (206, &content()[5..10]));
    let (head, raw) = program.ask(link, "HEAD", &url("raw"), &[good]).await;
    assert_eq!(head.headers["content-length"], content().len().to_string());
    assert!(raw.is_empty());
    let outside = [good, ("range", "bytes=99999999-")];
    let (head, _) = program.ask(link, "GET", &url("raw"), &outside).await;
    assert_eq!(head.status, 416);

    let other = format!("{token}x");
    for headers in [&[][..], &[(TOKEN, "")], &[(TOKEN, other.as_str())]] {
        for path in [&url("raw"), &url("raw").replace("disk/", "other/")] {
            let (head, body) = program.ask(link, "GET", path, headers).await;
            assert_eq!(head.status, 401, "{headers:?}");
            assert!(body.len() < 200);
        }
    }
    for (method, path, status) in [
        ("GET", url("raw").replace("disk/", "other/"), 404),
        ("GET", url("raw").replace("disk/disk.img", "../token"), 404),
        ("PUT", url("raw"), 405),
    ] {
        let (head, _) = program.ask(link, method, &path, &[good]).await;
        assert_eq!(head.status, status, "{method} {path}");
    }

    // What leads to the pod, and nothing else.
    let services = Api::<Service>::namespaced(ann.clone(), &namespace);
    let service = services.get("virt-export-e").await.unwrap().spec.unwrap();
    let selector = service.selector.unwrap();
    let labels: Vec<_> = selector.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let pods = Api::<Pod>::namespaced(ann.clone(), &namespace);
    let chosen = pods
        .list(&ListParams::default().labels(&labels.join(",")))
        .await;
    let [pod] = &chosen.unwrap().items[..] else {
        panic!("the Service is of one pod")
    };
    assert_eq!(pod.metadata.name.as_ref(), Some(&program.pod));
    let labels = pod.metadata.labels.as_ref().unwrap();
    let labels = (labels["team"].as_str(), labels["kubevirt.io"].as_str());
    assert_eq!(labels, ("a", "virt-exporter"));
    assert_eq!(pod.metadata.annotations, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_a_pod_may_write_to_is_not_exported() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let _controller = uploads::start_controller(&namespace);
    create(&admin, &namespace, "e", &of_claim("disk")).await;
    let missing = ("Pending", "Initializing", "pvc NS/disk not found");
    let message = missing.2.replace("NS", &namespace);
    status(&admin, &namespace, "e", |status| {
        phase(status) == (missing.0, missing.1, &message)
    })
    .await;
    claim(&admin, &namespace, "disk").await;
    let program = Program::start(&namespace, "e", address(22), b"disk").await;
    status(&admin, &namespace, "e", |status| status["phase"] == "Ready").await;

    let pods = Api::<Pod>::namespaced(admin.clone(), &namespace);
    let writer = serde_json::from_value(json!({
        "metadata": { "name": "writer" },
        "spec": {
            "containers": [{ "name": "c", "image": "i" }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "disk" } }],
        },
    }));
    let params = PostParams::default();
    pods.create(&params, &writer.unwrap()).await.unwrap();
    let message = format!("pvc {namespace}/disk is in use by the pod writer");
    let found = status(&admin, &namespace, "e", |status| {
        phase(status) == ("Pending", "InUse", &message)
    })
    .await;
    assert_eq!(found.get("links"), None);
    program.ends().await;
    kubelet::exit(&pods, "writer", 0).await;
    let program = Program::start(&namespace, "e", address(22), b"disk").await;
    status(&admin, &namespace, "e", |status| status["phase"] == "Ready").await;
    drop(program);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_claims_of_a_machine_are_exported_while_it_is_stopped() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let _controller = uploads::start_controller(&namespace);
    claim(&admin, &namespace, "one").await;
    claim(&admin, &namespace, "two").await;
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let params = PostParams::default();
    for (name, volumes) in [("vm", vec!["one", "two"]), ("bare", vec![])] {
        let volumes: Vec<Value> = volumes
            .iter()
            .map(|of| json!({ "name": of, "persistentVolumeClaim": { "claimName": of } }))
            .collect();
        let template = json!({ "spec": {
            "domain": { "memory": { "guest": "128Mi" } }, "volumes": volumes,
        } });
        let spec = json!({ "runStrategy": "Manual", "template": template });
        let vm = object("VirtualMachine", name, spec);
        vms.create(&params, &vm).await.unwrap();
        let spec = json!({ "source": source("kubevirt.io", "VirtualMachine", name) });
        create(&admin, &namespace, name, &spec).await;
    }
    status(&admin, &namespace, "bare", |status| {
        phase(status).0 == "Skipped" && phase(status).1 == "VMNoVolumes"
    })
    .await;
    let program = Program::start(&namespace, "vm", address(23), b"disk").await;
    let is_ready = |status: &Value| status["phase"] == "Ready";
    let found = status(&admin, &namespace, "vm", is_ready).await;
    assert_eq!(found["virtualMachineName"], "vm");
    let volumes = found["links"]["internal"]["volumes"].as_array().unwrap();
    let names: Vec<_> = volumes
        .iter()
        .map(|of| of["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["one", "two"]);

    let start = async || {
        let put = super::put(&admin, &namespace, "vm", "start", "").await;
        (put == 202).then_some(())
    };
    eventually("the VM is started", start).await;
    let message = format!("Virtual Machine {namespace}/vm is running");
    status(&admin, &namespace, "vm", |status| {
        phase(status) == ("Pending", "InUse", &message)
    })
    .await;
    program.ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_volumes_of_a_snapshot_are_exported_from_claims_of_their_own() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    csi::install(&admin).await;
    let _controller = uploads::start_controller(&namespace);
    let group = "snapshot.kubevirt.io";
    let spec = json!({ "source": source(group, "VirtualMachineSnapshot", "s") });
    create(&admin, &namespace, "e", &spec).await;
    let message = format!("VirtualMachineSnapshot {namespace}/s does not exist");
    status(&admin, &namespace, "e", |status| phase(status).2 == message).await;

    super::snapshots::claim(&admin, &namespace, "data").await;
    let template = json!({ "spec": {
        "domain": { "memory": { "guest": "128Mi" } },
        "volumes": [{ "name": "root", "persistentVolumeClaim": { "claimName": "data" } }],
    } });
    let spec = json!({ "runStrategy": "Halted", "template": template });
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let params = PostParams::default();
    let vm = object("VirtualMachine", "vm", spec);
    vms.create(&params, &vm).await.unwrap();
    let snapshots = of_kind(&admin, &namespace, group, "VirtualMachineSnapshot");
    let snapshot = json!({ "source": reference("vm") });
    let snapshot = of("VirtualMachineSnapshot", "s", snapshot);
    let uid = snapshots.create(&params, &snapshot).await.unwrap();
    let name = format!("vmsnapshot-{}-volume-root", uid.metadata.uid.unwrap());
    let group = "snapshot.storage.k8s.io";
    let taken = of_kind(&admin, &namespace, group, "VolumeSnapshot");
    eventually("the volume is to be taken", async || {
        taken.get_opt(&name).await.unwrap()
    })
    .await;
    let ready = json!({
        "creationTime": "2026-01-01T00:00:00Z", "readyToUse": true, "restoreSize": "2Gi",
    });
    let ready = Patch::Merge(json!({ "status": ready }));
    let patch = PatchParams::default();
    taken.patch_status(&name, &patch, &ready).await.unwrap();

    let program = Program::start(&namespace, "e", address(24), b"disk").await;
    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    let made = claims.get("e-data").await.unwrap();
    let owner = &made.metadata.owner_references.unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.name.as_str()),
        ("VirtualMachineExport", "e")
    );
    let spec = made.spec.unwrap();
    assert_eq!(spec.data_source.unwrap().name, name);
    assert_eq!(
        spec.resources.unwrap().requests.unwrap()["storage"].0,
        "2Gi"
    );
    let is_ready = |status: &Value| status["phase"] == "Ready";
    let found = status(&admin, &namespace, "e", is_ready).await;
    assert_eq!(found["virtualMachineName"], "vm");
    let volume = &found["links"]["internal"]["volumes"][0];
    assert_eq!(volume["name"], "data");
    drop(program);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_goes_when_its_time_is_over() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let _controller = uploads::start_controller(&namespace);
    let mut spec = of_claim("disk");
    spec["ttlDuration"] = json!("0s");
    create(&admin, &namespace, "e", &spec).await;
    let exports = exports(&admin, &namespace, "v1beta1");
    eventually("the export is gone", async || {
        let found = exports.get_opt("e").await.unwrap();
        found.is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn exports_are_judged_in_both_versions_and_readers_make_none() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let params = PostParams::default();
    for version in ["v1beta1", "v1alpha1"] {
        let exports = exports(&admin, &namespace, version);
        let mut wrong = of_claim("a");
        wrong["source"]["kind"] = json!("Pod");
        wrong["source"]["name"] = json!("other/a");
        wrong["ttlDuration"] = json!("soon");
        let wrong = export(version, "e", &wrong);
        let Err(kube::Error::Api(status)) = exports.create(&params, &wrong).await else {
            panic!("it is taken")
        };
        let causes = status.details.unwrap().causes;
        let fields: Vec<_> = causes.iter().map(|cause| cause.field.as_str()).collect();
        assert_eq!(
            fields,
            ["spec.source.kind", "spec.source.name", "spec.ttlDuration"]
        );
        let right = export(version, "e", &of_claim("a"));
        exports.create(&params, &right).await.unwrap();
        let change = Patch::Merge(json!({ "spec": { "ttlDuration": "3h" } }));
        let changed = exports.patch("e", &PatchParams::default(), &change).await;
        assert_eq!(code(changed), 422, "it does not change");
        exports.delete("e", &DeleteParams::default()).await.unwrap();
    }
    let roles = ["system:aggregate-to-view", "podvisor-vm-view"];
    let reader = user("export-reader", &namespace, &roles).await;
    let exports = exports(&reader, &namespace, "v1beta1");
    exports.list(&ListParams::default()).await.unwrap();
    let export = export("v1beta1", "e", &of_claim("a"));
    assert_eq!(code(exports.create(&params, &export).await), 403);
}
