//! The authority of our servers is replaced while several replicas serve, and the API server calls
//! them all the time.

#[path = "served/setup.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod setup;
mod support;

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use podvisor_cluster::admission;
use serde_json::json;
use setup::{SYSTEM, api_of, serve_webhooks, served, vmi, webhooks};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(90);

fn secrets() -> Api<Secret> {
    Api::namespaced(served().admin(), SYSTEM)
}

/// Writes a date of the authority, relative to now.
async fn set_date(annotation: &str, from_now: Duration) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + from_now;
    let date = since.as_secs().to_string();
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { annotation: date } } }));
    let params = PatchParams::default();
    secrets()
        .patch("podvisor-cluster-authority", &params, &patch)
        .await
        .unwrap();
}

async fn used_key() -> Vec<u8> {
    let secret = secrets().get("podvisor-cluster-authority").await.unwrap();
    secret.data.unwrap()["tls.key"].0.clone()
}

/// Asks the webhooks many times at once; every answer is theirs.
async fn review(admin: &Client) {
    let vmis = api_of(admin, "default", "VirtualMachineInstance");
    let params = PostParams {
        dry_run: true,
        ..Default::default()
    };
    let asked = (0..16).map(|_| {
        let (vmis, params) = (vmis.clone(), params.clone());
        let memory = json!({ "memory": { "guest": "64Mi" } });
        tokio::spawn(async move { vmis.create(&params, &vmi("a", memory)).await })
    });
    let asked: Vec<_> = asked.collect();
    for asked in asked {
        let made = asked.await.unwrap().unwrap();
        assert_eq!(made.data["spec"]["domain"]["cpu"]["sockets"], 1);
    }
}

/// The certificates of the API server's trust.
async fn trusted(admin: &Client) -> usize {
    let kind = GroupVersionKind::gvk("apiregistration.k8s.io", "v1", "APIService");
    let services: Api<DynamicObject> = Api::all_with(admin.clone(), &ApiResource::from_gvk(&kind));
    let name = format!("{}.{}", admission::VERSION, admission::GROUP);
    let service = services.get(&name).await.unwrap();
    let bundle: k8s_openapi::ByteString =
        serde_json::from_value(service.data["spec"]["caBundle"].clone()).unwrap();
    let bundle = String::from_utf8(bundle.0).unwrap();
    bundle.matches("BEGIN CERTIFICATE").count()
}

/// Starts a replica and waits until new connections meet it.
async fn replica() -> tokio::task::JoinHandle<()> {
    let before = certificates(20).await;
    let replica = tokio::spawn(serve_webhooks(served(), std::future::pending()));
    let met = async {
        while certificates(1).await.is_subset(&before) {
            assert!(!replica.is_finished(), "the replica has ended");
        }
    };
    let met = tokio::time::timeout(PATIENCE, met).await;
    met.expect("the replica serves");
    replica
}

/// Ends a replica as a kill does, and lets the API server learn that its connections are closed:
/// a request on one of them fails, whoever serves.
async fn kill(replica: tokio::task::JoinHandle<()>, admin: &Client) {
    replica.abort();
    let _ = replica.await;
    for _ in 0..8 {
        trusted(admin).await;
    }
}

/// The certificates that so many connections meet.
async fn certificates(connections: usize) -> HashSet<Vec<u8>> {
    let mut met = HashSet::new();
    for _ in 0..connections {
        let address = webhooks().local_addr().unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let tls = support::certificates::trusting(None);
        let tls = tls.connect("localhost".try_into().unwrap(), stream).await;
        let tls = tls.unwrap();
        let shown = tls.get_ref().1.peer_certificates().unwrap();
        met.insert(shown[0].to_vec());
        tokio::task::yield_now().await;
    }
    met
}

#[tokio::test]
async fn the_authority_is_replaced_while_replicas_serve() {
    let admin = served().admin();
    let first = used_key().await;
    assert_eq!(trusted(&admin).await, 1);

    // It ends in 30 days: a successor is made known, and not used yet.
    set_date("podvisor.io/not-after", Duration::from_secs(30 * 24 * 3600)).await;
    let second = replica().await;
    assert_eq!(trusted(&admin).await, 2);
    assert_eq!(used_key().await, first);
    review(&admin).await;

    // A day later it is used; replicas of before go on with what they have.
    set_date("podvisor.io/next-from", Duration::ZERO).await;
    let third = replica().await;
    assert_ne!(used_key().await, first);
    assert_eq!(trusted(&admin).await, 2);
    for _ in 0..4 {
        review(&admin).await;
    }
    kill(second, &admin).await;
    review(&admin).await;
    kill(third, &admin).await;
    review(&admin).await;
}
