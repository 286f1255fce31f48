//! What is asked of the webhooks, and of the other servers, by somebody who is not the API server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
};
use podvisor_cluster::{admission, api};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::migrations::Scene;
use super::setup::webhooks;
use super::support::{
    self,
    certificates::{Files, trusting},
};
use super::{api_of, put, served, vm, vmi};

/// How long an answer may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The path of a webhook.
fn path(webhook: &str) -> String {
    let (group, version) = (admission::GROUP, admission::VERSION);
    format!("/apis/{group}/{version}/{webhook}")
}

/// The port of the server behind an APIService.
pub(super) async fn port_of(service: &str) -> u16 {
    let kind = kube::core::GroupVersionKind::gvk("apiregistration.k8s.io", "v1", "APIService");
    let resource = kube::core::ApiResource::from_gvk(&kind);
    let services: Api<DynamicObject> = Api::all_with(served().admin(), &resource);
    let service = services.get(service).await.unwrap();
    let port = service.data["spec"]["service"]["port"].as_u64().unwrap();
    u16::try_from(port).unwrap()
}

/// Sends the head of a request that claims to come from the front proxy for its account, and waits
/// for the answer; the body is never sent. Returns the answer's code.
async fn ask(port: u16, files: Option<&Files>, method: &str, path: &str) -> Option<u16> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.ok()?;
    let tls = trusting(files).connect("localhost".try_into().unwrap(), stream);
    let mut stream = tls.await.ok()?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nX-Remote-User: system:apiserver\r\n\
         X-Remote-Group: system:masters\r\nContent-Length: 4000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    let mut answer = vec![0; 12];
    let read = stream.read_exact(&mut answer);
    let read = tokio::time::timeout(PATIENCE, read).await;
    read.expect("it is answered before the body is read").ok()?;
    let text = String::from_utf8(answer).ok()?;
    text.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

/// Those who are not the front proxy: nobody, and users of the same authority.
fn strangers() -> [Option<Files>; 3] {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let authority = served().authority();
    let user = |user: &str| {
        let file = format!("stranger-{number}-{user}");
        authority.client(&file, user, &["system:masters"])
    };
    [
        None,
        Some(user("admin").unwrap()),
        Some(user("system:apiserver").unwrap()),
    ]
}

/// Asks for a review by way of the API server; returns the code, or the review's answer.
async fn review(client: &Client, webhook: &str, request: &Value) -> Result<Value, u16> {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request,
    });
    let request = http::Request::post(path(webhook)).body(review.to_string().into_bytes());
    match client.request::<Value>(request.unwrap()).await {
        Ok(answer) => Ok(answer["response"].clone()),
        Err(kube::Error::Api(status)) => Err(status.code),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_forged_eviction_moves_no_vm() {
    let scene = Scene::new("forged").await;
    let pods = scene.pods.list(&Default::default()).await.unwrap();
    let is_launcher = |name: &&String| name.starts_with("virt-launcher-");
    let names = pods
        .items
        .iter()
        .filter_map(|pod| pod.metadata.name.as_ref());
    let pod = names.clone().find(is_launcher).expect("the VM's pod");
    let eviction = json!({
        "uid": "1", "operation": "CREATE", "namespace": scene.namespace, "name": pod,
        "kind": { "group": "policy", "version": "v1", "kind": "Eviction" },
        "subResource": "eviction",
        "object": { "metadata": { "name": pod, "namespace": scene.namespace } },
    });
    let is_marked = async || {
        let vmi = scene.vmis.get("a").await.unwrap();
        vmi.data["status"]["evacuationNodeName"].is_string()
    };
    let server = served();
    // The API server lets nobody without rights through, and the webhook nobody but itself.
    for user in [server.client("anybody", &[]), server.admin()] {
        assert_eq!(review(&user, "validate", &eviction).await, Err(403));
    }
    let port = webhooks().local_addr().unwrap().port();
    for files in &strangers() {
        let answer = ask(port, files.as_ref(), "POST", &path("validate")).await;
        assert!(matches!(answer, None | Some(401)), "{files:?}: {answer:?}");
    }
    assert!(!is_marked().await);
    // The same one of the API server itself.
    let itself = server.client("system:apiserver", &["system:masters"]);
    let answer = review(&itself, "validate", &eviction).await.unwrap();
    assert_eq!(answer["status"]["code"], 429, "{answer}");
    assert!(is_marked().await);
}

#[tokio::test]
async fn a_forged_review_does_not_tell_what_a_user_may_do() {
    let server = served();
    let namespace = support::namespace(&server.admin()).await;
    let spec = json!({
        "source": { "pvc": { "name": "a", "namespace": "default" } }, "storage": {},
    });
    let copy = json!({
        "uid": "1", "operation": "CREATE", "namespace": namespace, "name": "a",
        "kind": { "group": "cdi.kubevirt.io", "version": "v1beta1", "kind": "DataVolume" },
        "userInfo": { "username": "admin", "groups": ["system:masters"] },
        "object": { "metadata": { "name": "a", "namespace": namespace }, "spec": spec },
    });
    for user in [server.client("anybody", &[]), server.admin()] {
        assert_eq!(review(&user, "mutate", &copy).await, Err(403));
    }
    let port = webhooks().local_addr().unwrap().port();
    for files in &strangers() {
        let answer = ask(port, files.as_ref(), "POST", &path("mutate")).await;
        assert!(matches!(answer, None | Some(401)), "{files:?}: {answer:?}");
    }
    let itself = server.client("system:apiserver", &["system:masters"]);
    let answer = review(&itself, "mutate", &copy).await.unwrap();
    assert_eq!(answer["allowed"], true, "{answer}");
}

#[tokio::test]
async fn every_path_but_that_of_health_is_for_the_api_server_alone() {
    let subresources = port_of(&format!("v1.{}", api::GROUP)).await;
    let group = api::GROUP;
    let tokens = "/apis/upload.cdi.kubevirt.io/v1beta1";
    let of_api = [
        "/apis".to_owned(),
        "/openapi/v2".to_owned(),
        "/openapi/v3".to_owned(),
        format!("/openapi/v3/apis/{group}/v1"),
        format!("/apis/{group}/v1"),
        format!("/apis/{group}/v1/version"),
        format!("/apis/{group}/v1/healthz"),
        format!("/apis/{group}/v1/guestfs"),
        format!("/apis/{group}/v1/namespaces/default/expand-vm-spec"),
        format!("/apis/{group}/v1/namespaces/default/virtualmachines/a/start"),
        format!("/apis/{group}/v1/namespaces/default/virtualmachineinstances/a/console"),
        tokens.to_owned(),
        format!("{tokens}/namespaces/default/uploadtokenrequests"),
        "/nothing".to_owned(),
    ];
    let of_webhooks = ["/apis", "/healthz/", "/mutate", "/validate", "/nothing"];
    let (group, version) = (admission::GROUP, admission::VERSION);
    let more = [
        format!("/apis/{group}"),
        format!("/apis/{group}/{version}"),
        path("mutate"),
        path("validate"),
    ];
    let reviews = webhooks().local_addr().unwrap().port();
    let of_webhooks = of_webhooks.map(str::to_owned).into_iter().chain(more);
    let all = of_api.into_iter().map(|path| (subresources, path));
    let all: Vec<_> = all.chain(of_webhooks.map(|path| (reviews, path))).collect();
    for files in &strangers() {
        for (port, path) in &all {
            for method in ["GET", "PUT", "POST"] {
                let answer = ask(*port, files.as_ref(), method, path).await;
                assert!(
                    matches!(answer, None | Some(401)),
                    "{method} {path}: {answer:?}"
                );
            }
        }
    }
    for port in [subresources, reviews] {
        assert_eq!(ask(port, None, "GET", "/healthz").await, Some(200));
    }
}

/// Opens connections from an address of loopback and holds them.
async fn hold(from: Ipv4Addr, port: u16, with_tls: bool) -> Vec<Box<dyn Send>> {
    let mut held: Vec<Box<dyn Send>> = Vec::new();
    for _ in 0..150 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let Ok(stream) = socket.connect(to).await else {
            continue;
        };
        match with_tls {
            false => held.push(Box::new(stream)),
            true => {
                let tls = trusting(None).connect("localhost".try_into().unwrap(), stream);
                if let Ok(stream) = tls.await {
                    held.push(Box::new(stream));
                }
            }
        }
    }
    held
}

#[tokio::test]
async fn connections_that_a_pod_holds_keep_nobody_out() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &vm("a", "Halted"))
        .await
        .unwrap();
    let subresources = port_of(&format!("v1.{}", api::GROUP)).await;
    let reviews = webhooks().local_addr().unwrap().port();
    let mut held = Vec::new();
    for port in [subresources, reviews] {
        for last in 2..6 {
            let from = Ipv4Addr::new(127, 0, 0, last);
            held.extend(hold(from, port, last % 2 == 0).await);
        }
    }
    assert!(held.len() > 600, "{} connections", held.len());
    let params = PostParams {
        dry_run: true,
        ..Default::default()
    };
    // Many at once, so that the API server needs new connections.
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let created = (0..32).map(|_| {
        let (vmis, params) = (vmis.clone(), params.clone());
        let memory = json!({ "memory": { "guest": "64Mi" } });
        tokio::spawn(async move { vmis.create(&params, &vmi("b", memory)).await.map(drop) })
    });
    let created: Vec<_> = created.collect();
    for created in created {
        created.await.unwrap().unwrap();
    }
    let dry = r#"{"dryRun":["All"]}"#;
    let started = (0..32).map(|_| {
        let (admin, namespace) = (admin.clone(), namespace.clone());
        tokio::spawn(async move { put(&admin, &namespace, "a", "start", dry).await })
    });
    let started: Vec<_> = started.collect();
    for started in started {
        assert_eq!(started.await.unwrap(), 202);
    }
    drop(held);
}
