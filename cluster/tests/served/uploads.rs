//! Uploads from the request for a token to the filled claim: as `virtctl image-upload` asks for
//! them, through the real API server, the proxy, and the program of the claim's pod.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use podvisor_cluster::{controller, upload};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::migrations::Task;
use super::nodes::eventually;
use super::security::user;
use super::support::{self, certificates::trusting, kubelet};
use super::{SYSTEM, code, served};

/// An address of the loopback interface that no other test program has.
pub(super) fn address(number: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    [127, 64 | (high & 63), low, number].into()
}

/// Starts the proxy; returns where it is.
pub(super) async fn start_proxy() -> (Task, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let client = served().service_account(SYSTEM, upload::PROXY);
    let proxy = tokio::spawn(async move {
        let stop = std::future::pending();
        upload::serve(client, listener, SYSTEM, stop).await.unwrap();
    });
    (Task::of(proxy), address)
}

pub(super) fn start_controller(namespace: &str) -> Task {
    let mut options = controller::Options::default();
    options.namespace = Some(namespace.to_owned());
    options.lease_namespace = SYSTEM.to_owned();
    options.lease_name = format!("uploads-{namespace}");
    let client = served().service_account(SYSTEM, "podvisor-controller");
    Task::of(tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    }))
}

pub(super) fn volumes(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("cdi.kubevirt.io", "v1beta1", "DataVolume");
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&gvk))
}

/// Makes a DataVolume that waits for an upload, and binds its claim.
async fn make(client: &Client, namespace: &str, name: &str, size: &str) {
    let volume = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": { "name": name },
        "spec": {
            "source": { "upload": {} },
            "storage": { "resources": { "requests": { "storage": size } } },
        },
    });
    let volume = serde_json::from_value(volume).unwrap();
    let (api, params) = (volumes(client, namespace), PostParams::default());
    api.create(&params, &volume).await.unwrap();
    bind(namespace, name).await;
}

/// Binds a claim as soon as it is made.
pub(super) async fn bind(namespace: &str, name: &str) {
    let claims = Api::<PersistentVolumeClaim>::namespaced(served().admin(), namespace);
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    eventually("the claim is made", async || {
        let params = PatchParams::default();
        claims.patch_status(name, &params, &bound).await.ok()
    })
    .await;
}

pub(super) async fn in_phase(client: &Client, namespace: &str, name: &str, phase: &str) {
    eventually(&format!("{name} is {phase}"), async || {
        let volume = volumes(client, namespace).get(name).await.ok()?;
        (volume.data["status"]["phase"] == phase).then_some(())
    })
    .await;
}

/// Asks for a token, as `virtctl` does.
async fn token(client: &Client, namespace: &str, claim: &str) -> Result<String, kube::Error> {
    let request = json!({
        "apiVersion": "upload.cdi.kubevirt.io/v1beta1", "kind": "UploadTokenRequest",
        "metadata": { "name": "token-for-virtctl" }, "spec": { "pvcName": claim },
    });
    let path =
        format!("/apis/upload.cdi.kubevirt.io/v1beta1/namespaces/{namespace}/uploadtokenrequests");
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(request.to_string().into_bytes())
        .unwrap();
    let answer: Value = client.request(request).await?;
    Ok(answer["status"]["token"].as_str().unwrap().to_owned())
}

/// What a request to the proxy has.
struct Sent<'a> {
    method: &'a str,
    path: &'a str,
    token: Option<&'a str>,
    body: Vec<u8>,
}

fn post<'a>(path: &'a str, token: &'a str, body: &[u8]) -> Sent<'a> {
    Sent {
        method: "POST",
        path,
        token: Some(token),
        body: body.to_vec(),
    }
}

async fn send(proxy: SocketAddr, sent: Sent<'_>) -> (u16, String) {
    let stream = TcpStream::connect(proxy).await.unwrap();
    let name = "localhost".try_into().unwrap();
    let stream = trusting(None).connect(name, stream).await.unwrap();
    let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.unwrap();
    tokio::spawn(connection);
    let mut request = http::Request::builder().method(sent.method).uri(sent.path);
    request = request.header("host", "proxy");
    if let Some(token) = sent.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if sent.path.contains("form") {
        request = request.header("content-type", "multipart/form-data; boundary=xYz");
    }
    let request = request.body(Full::new(Bytes::from(sent.body))).unwrap();
    let answer = sender.send_request(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

/// The beginning of an upload whose rest does not come.
async fn begin(proxy: SocketAddr, token: &str) -> impl Sized + use<> {
    let stream = TcpStream::connect(proxy).await.unwrap();
    let name = "localhost".try_into().unwrap();
    let mut stream = trusting(None).connect(name, stream).await.unwrap();
    let head = format!(
        "POST /v1beta1/upload HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\
         Content-Length: 2000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![1; 1_000_000]).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

/// Writes what a Secret has into a directory.
pub(super) async fn mount(directory: &TempDir, namespace: &str, secret: &str) {
    let secrets = Api::<Secret>::namespaced(served().admin(), namespace);
    let secret = eventually("the Secret is made", async || {
        secrets.get(secret).await.ok()
    })
    .await;
    for (name, bytes) in secret.data.unwrap() {
        fs::write(directory.path().join(name), bytes.0).unwrap();
    }
}

/// The program of a pod, with a directory as the volume of its claim.
pub(super) struct Program {
    child: Child,
    pod: Pod,
    claim: TempDir,
    /// The pod's certificates and its logs.
    pub(super) others: TempDir,
    address: IpAddr,
}

impl Program {
    /// Plays the kubelet for the pod of a DataVolume.
    pub(super) async fn start(namespace: &str, volume: &str, address: IpAddr) -> Self {
        let admin = served().admin();
        let pods = Api::<Pod>::namespaced(admin.clone(), namespace);
        let prefix = format!("importer-{volume}-");
        let pod = eventually("the pod is made", async || {
            let list = pods.list(&ListParams::default()).await.ok()?;
            let is_its = |pod: &Pod| pod.metadata.name.as_ref().unwrap().starts_with(&prefix);
            list.items.into_iter().find(is_its)
        })
        .await;
        let (claim, others) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let spec = pod.spec.as_ref().unwrap();
        let mut volumes = spec.volumes.iter().flatten();
        let secret = volumes.find_map(|volume| volume.secret.as_ref()).unwrap();
        mount(&others, namespace, secret.secret_name.as_deref().unwrap()).await;
        fs::write(others.path().join("log"), "").unwrap();
        let mut program = Self {
            child: Command::new("true").spawn().unwrap(),
            pod,
            claim,
            others,
            address,
        };
        program.run().await;
        program
    }

    async fn run(&mut self) {
        let path = |directory: &TempDir| directory.path().display().to_string();
        let spec = self.pod.spec.as_ref().unwrap();
        let args = spec.containers[0].args.as_ref().unwrap().iter();
        let args = args.map(|arg| match arg.split_once('=') {
            Some(("--directory", _)) => format!("--directory={}", path(&self.claim)),
            Some(("--credentials", _)) => format!("--credentials={}", path(&self.others)),
            _ => arg.replace("[::]", &self.address.to_string()),
        });
        let _ = self.child.wait();
        self.child = Command::new(env!("CARGO_BIN_EXE_podvisor-cluster"))
            .args(args)
            .arg(format!("--termination-log={}/log", path(&self.others)))
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.others.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        eventually("the pod listens", async || {
            TcpStream::connect((self.address, 8443)).await.ok()
        })
        .await;
        let running = json!({ "running": {} });
        self.report("Running", &running, true).await;
    }

    async fn report(&self, phase: &str, state: &Value, ready: bool) {
        let namespace = self.pod.metadata.namespace.as_deref().unwrap();
        let pods = Api::<Pod>::namespaced(served().admin(), namespace);
        let container = json!({
            "name": "importer", "image": "i", "imageID": "i", "ready": ready, "restartCount": 0,
            "state": state,
        });
        let status = json!({
            "phase": phase, "podIP": self.address.to_string(),
            "podIPs": [{ "ip": self.address.to_string() }], "containerStatuses": [container],
        });
        kubelet::set_status(&pods, self.pod.metadata.name.as_deref().unwrap(), status).await;
    }

    /// Waits until the program has done its work; returns the disk.
    pub(super) async fn finish(mut self) -> Vec<u8> {
        let code = eventually("the program ends", async || self.child.try_wait().unwrap()).await;
        assert_eq!(code.code(), Some(0), "{}", self.log());
        let done = json!({ "terminated": { "exitCode": 0 } });
        self.report("Succeeded", &done, false).await;
        fs::read(self.disk()).unwrap()
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.claim.path().join("disk.img")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.others.path().join("stderr")).unwrap_or_default()
    }

    /// Nothing is left of what was refused.
    async fn is_empty(&self) {
        eventually("nothing is left", async || {
            let mut entries = fs::read_dir(self.claim.path()).unwrap();
            entries.next().is_none().then_some(())
        })
        .await;
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A disk with some data, and most of it zeros.
pub(super) fn content() -> Vec<u8> {
    let mut content = vec![0; 3 << 20];
    for (at, byte) in content.iter_mut().enumerate().take(1 << 20) {
        *byte = u8::try_from(at % 251).unwrap();
    }
    content
}

pub(super) fn packed(content: &[u8], program: &str, args: &[&str]) -> Vec<u8> {
    let directory = TempDir::new().unwrap();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    fs::write(&from, content).unwrap();
    let mut command = Command::new(program);
    command.args(args).arg(&from);
    if program == "qemu-img" {
        assert!(command.arg(&to).status().unwrap().success());
        return fs::read(to).unwrap();
    }
    command.output().unwrap().stdout
}

fn form(file: &[u8]) -> Vec<u8> {
    let mut form = b"--xYz\r\nContent-Disposition: form-data; name=\"file\"; \
        filename=\"<script>\"\r\nContent-Type: application/octet-stream\r\n\r\n"
        .to_vec();
    form.extend(file);
    form.extend(b"\r\n--xYz--\r\n");
    form
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_uploaded_as_virtctl_does_it() {
    let namespace = support::namespace(&served().admin()).await;
    let roles = ["system:aggregate-to-edit", "podvisor-vm-edit"];
    let ann = user("uploader", &namespace, &roles).await;
    let (_proxy, proxy) = start_proxy().await;
    let _controller = start_controller(&namespace);
    make(&ann, &namespace, "disk", "8Mi").await;
    in_phase(&ann, &namespace, "disk", "UploadScheduled").await;
    let too_early = token(&ann, &namespace, "disk").await.unwrap();
    let (status, _) = send(proxy, post("/v1beta1/upload", &too_early, b"x")).await;
    assert_eq!(status, 503);
    let program = Program::start(&namespace, "disk", address(1)).await;
    in_phase(&ann, &namespace, "disk", "UploadReady").await;

    let token_of = || token(&ann, &namespace, "disk");
    let right = token_of().await.unwrap();
    let head = Sent {
        method: "HEAD",
        path: "/v1beta1/upload-async",
        token: Some(&right),
        body: Vec::new(),
    };
    assert_eq!(send(proxy, head).await.0, 200);

    // What is no disk for this claim is refused with its reason, and another may come.
    let large = vec![7; 9 << 20];
    let zeros = packed(&vec![0; 64 << 20], "gzip", &["-c"]);
    let sync = "/v1beta1/upload";
    for (path, body, why) in [
        (sync, b"KDMV....".to_vec(), "VMDK"),
        (sync, large.clone(), "ask for a larger claim"),
        ("/v1alpha1/upload-async", large, "ask for a larger claim"),
        (sync, zeros, "ask for a larger claim"),
        (sync, Vec::new(), "empty"),
        (
            sync,
            packed(&content(), "gzip", &["-c"])[..5000].to_vec(),
            "cut off",
        ),
        ("/v1beta1/upload-form", b"x".to_vec(), "cut off"),
    ] {
        let (status, text) = send(proxy, post(path, &right, &body)).await;
        assert!(
            status == 400 && text.contains(why),
            "{why}: {status} {text}"
        );
        program.is_empty().await;
    }
    // One at a time; and one that is cut off is as if it had not begun.
    let begun = begin(proxy, &right).await;
    eventually("the upload has begun", async || {
        program
            .claim
            .path()
            .join(".podvisor-import/disk.img")
            .exists()
            .then_some(())
    })
    .await;
    let (status, text) = send(proxy, post(sync, &right, b"x")).await;
    assert!(
        status == 503 && text.contains("another upload"),
        "{status} {text}"
    );
    drop(begun);
    program.is_empty().await;
    in_phase(&ann, &namespace, "disk", "UploadReady").await;

    let qcow2 = packed(
        &content(),
        "qemu-img",
        &["convert", "-fraw", "-Oqcow2", "-c"],
    );
    let path = "/v1beta1/upload-async";
    let (status, text) = send(proxy, post(path, &right, &qcow2)).await;
    assert_eq!(status, 200, "{text}");
    let mut disk = content();
    disk.resize(8 << 20, 0);
    assert!(program.finish().await == disk);
    in_phase(&ann, &namespace, "disk", "Succeeded").await;
    let claims = Api::<PersistentVolumeClaim>::namespaced(served().admin(), &namespace);
    let claim = claims.get("disk").await.unwrap();
    let annotations = claim.metadata.annotations.unwrap();
    assert_eq!(
        annotations["cdi.kubevirt.io/storage.pod.phase"],
        "Succeeded"
    );
    // It is never written to again.
    assert_eq!(code(token_of().await), 409);
    assert_eq!(send(proxy, post(sync, &right, b"x")).await.0, 400);

    // A form, and a program that was killed meanwhile.
    make(&ann, &namespace, "form", "8Mi").await;
    let mut program = Program::start(&namespace, "form", address(2)).await;
    in_phase(&ann, &namespace, "form", "UploadReady").await;
    let right = token(&ann, &namespace, "form").await.unwrap();
    let begun = begin(proxy, &right).await;
    program.child.kill().unwrap();
    program.run().await;
    drop(begun);
    let xz = form(&packed(&content(), "xz", &["-c"]));
    let (status, text) = send(proxy, post("/v1beta1/upload-form", &right, &xz)).await;
    assert_eq!(status, 200, "{text} {}", program.log());
    assert!(
        program.disk().exists(),
        "the answer comes when the disk is there"
    );
    assert!(program.finish().await == disk);
    in_phase(&ann, &namespace, "form", "Succeeded").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_a_data_volume_is_uploaded_to() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let (_proxy, proxy) = start_proxy().await;
    let _controller = start_controller(&namespace);
    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    let claim = serde_json::from_value(json!({
        "metadata": {
            "name": "bare", "annotations": { "cdi.kubevirt.io/storage.upload.target": "" },
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "8Mi" } },
        },
    }))
    .unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    let params = PatchParams::default();
    claims.patch_status("bare", &params, &bound).await.unwrap();
    let program = Program::start(&namespace, "bare", address(5)).await;
    let annotation = async |name: &str, value: &str| {
        let name = format!("cdi.kubevirt.io/{name}");
        eventually(&name, async || {
            let claim = claims.get("bare").await.ok()?;
            (claim.metadata.annotations?.get(&name)? == value).then_some(())
        })
        .await;
    };
    annotation("storage.pod.ready", "true").await;
    let right = token(&admin, &namespace, "bare").await.unwrap();
    let (status, text) = send(proxy, post("/v1beta1/upload-async", &right, &content())).await;
    assert_eq!(status, 200, "{text}");
    assert!(program.finish().await.starts_with(&content()));
    annotation("storage.pod.phase", "Succeeded").await;
    eventually("the DataVolume goes", async || {
        let found = volumes(&admin, &namespace).get_opt("bare").await.ok()?;
        found.is_none().then_some(())
    })
    .await;
    let claim = claims.get("bare").await.unwrap();
    assert_eq!(claim.metadata.deletion_timestamp, None);
}

/// A token that is signed with the right key, or another one.
fn forge(key: &[u8], claim: &PersistentVolumeClaim, lives: i64) -> String {
    let claims = json!({
        "op": "Upload", "ns": claim.metadata.namespace,
        "sub": claim.metadata.name, "uid": claim.metadata.uid,
    });
    sign(key, claims, 0, lives)
}

/// Signs what a token says, which was made `age` seconds ago and lives for so many from now on.
pub(super) fn sign(key: &[u8], mut claims: Value, age: i64, lives: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    claims["iss"] = json!("podvisor");
    claims["iat"] = json!(now - age);
    claims["exp"] = json!(now + lives);
    let header = BASE64.encode(r#"{"alg":"HS256","typ":"JWT"}"#);
    let signed = format!("{header}.{}", BASE64.encode(claims.to_string()));
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key);
    let tag = ring::hmac::sign(&key, signed.as_bytes());
    format!("{signed}.{}", BASE64.encode(tag.as_ref()))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_may_make_a_claims_token_writes_to_it() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let elsewhere = support::namespace(&admin).await;
    let (_proxy, proxy) = start_proxy().await;
    let controllers = [start_controller(&namespace), start_controller(&elsewhere)];
    let editor = ["system:aggregate-to-edit", "podvisor-vm-edit"];
    let neighbour = user("upload-neighbour", &elsewhere, &editor).await;
    let viewer = user("upload-viewer", &namespace, &["podvisor-vm-view"]).await;
    make(&admin, &namespace, "disk", "8Mi").await;
    make(&neighbour, &elsewhere, "disk", "8Mi").await;
    let program = Program::start(&namespace, "disk", address(3)).await;
    in_phase(&admin, &namespace, "disk", "UploadReady").await;

    for client in [&neighbour, &viewer] {
        assert_eq!(code(token(client, &namespace, "disk").await), 403);
    }
    assert_eq!(code(token(&neighbour, &elsewhere, "gone").await), 404);
    assert_eq!(code(token(&neighbour, &elsewhere, "../disk").await), 400);

    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    let claim = claims.get("disk").await.unwrap();
    let mut older = claim.clone();
    older.metadata.uid = Some("another".to_owned());
    token(&admin, &namespace, "disk").await.unwrap();
    let secrets = Api::<Secret>::namespaced(admin.clone(), SYSTEM);
    let secret = secrets.get("podvisor-upload-tokens").await.unwrap();
    let key = secret.data.unwrap()["key"].0.clone();
    let own = token(&neighbour, &elsewhere, "disk").await.unwrap();
    let path = "/v1beta1/upload";
    for (token, expected) in [
        (None, 401),
        (Some(String::new()), 401),
        (Some("x.y.z".to_owned()), 401),
        (Some(forge(&[0; 32], &claim, 300)), 401),
        (Some(forge(&key, &claim, -3600)), 401),
        // A good token, and a claim that was replaced.
        (Some(forge(&key, &older, 300)), 400),
        // It is for the claim of that name in the other namespace, which has no pod yet.
        (Some(own), 503),
    ] {
        for (method, path) in [("POST", path), ("HEAD", "/v1beta1/upload-async")] {
            let sent = Sent {
                method,
                path,
                token: token.as_deref(),
                body: content(),
            };
            assert_eq!(send(proxy, sent).await.0, expected, "{token:?}");
        }
    }
    assert_eq!(send(proxy, post("/v1beta1/other", "x", b"")).await.0, 404);
    let archive = post("/v1beta1/upload-archive", "x", b"");
    assert_eq!(send(proxy, archive).await.0, 501);
    // Nobody but the proxy reaches the pod, whatever certificate they show.
    let files = server.authority().client("x-proxy", upload::PROXY, &[]);
    for files in [None, Some(files.unwrap())] {
        let stream = TcpStream::connect((program.address, 8443)).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let mut answer = String::new();
        if let Ok(mut stream) = trusting(files.as_ref()).connect(name, stream).await {
            let request = "POST /v1beta1/upload HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx";
            let _ = stream.write_all(request.as_bytes()).await;
            let _ = stream.read_to_string(&mut answer).await;
        }
        assert!(!answer.contains("200"), "{answer}");
    }
    // Who changes where a claim's upload goes has it sent nowhere: another server has no
    // certificate for it.
    let listener = TcpListener::bind((address(4), 8443)).await.unwrap();
    let stranger = support::certificates::tls_server(server.authority());
    let heard = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        stranger.accept(stream).await.is_ok()
    });
    let annotation = json!({ "podvisor.io/upload-address": address(4).to_string() });
    let patch = Patch::Merge(json!({ "metadata": { "annotations": annotation } }));
    drop(controllers);
    let params = PatchParams::default();
    claims.patch("disk", &params, &patch).await.unwrap();
    let right = forge(&key, &claim, 300);
    assert_eq!(send(proxy, post(path, &right, &content())).await.0, 502);
    let heard = tokio::time::timeout(Duration::from_secs(60), heard).await;
    assert!(!heard.unwrap().unwrap(), "the proxy trusts a stranger");
    assert!(!program.disk().exists());
}
