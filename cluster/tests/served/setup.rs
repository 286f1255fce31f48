//! The servers with what `podvisor-cluster install` prints, and objects to give them.

use std::sync::OnceLock;

use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind, TypeMeta},
};
use podvisor_cluster::{
    admission::{self, Policy},
    api, manifests,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::support;

/// Namespace of the components.
pub(super) const SYSTEM: &str = "podvisor";

/// Applies an object as `kubectl apply --server-side` does.
pub(super) async fn apply(client: &Client, item: &Value, dry_run: bool) {
    let object: DynamicObject = serde_json::from_value(item.clone()).unwrap();
    let types: &TypeMeta = object.types.as_ref().unwrap();
    let gvk = GroupVersionKind::try_from(types).unwrap();
    let resource = ApiResource::from_gvk(&gvk);
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let mut params = PatchParams::apply("test").validation_strict();
    params.dry_run = dry_run;
    let name = object.metadata.name.clone().unwrap();
    api.patch(&name, &params, &Patch::Apply(item))
        .await
        .unwrap_or_else(|error| panic!("{} {name} is taken: {error}", gvk.kind));
}

pub(super) fn install() -> Vec<Value> {
    let list = manifests::install(&manifests::Options::default());
    list["items"].as_array().unwrap().clone()
}

/// Starts both servers, once, on a runtime that outlives the test that came first.
pub(super) fn served() -> &'static support::Server {
    static SERVED: OnceLock<()> = OnceLock::new();
    let server = support::server();
    SERVED.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                start(server).await;
                sender.send(()).unwrap();
                std::future::pending::<()>().await;
            });
        });
        receiver.recv().expect("the servers start");
    });
    server
}

/// Where all replicas of the webhooks listen.
pub(super) fn webhooks() -> &'static std::net::TcpListener {
    static LISTENER: OnceLock<std::net::TcpListener> = OnceLock::new();
    LISTENER.get_or_init(|| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    })
}

/// Serves the webhooks, as one replica.
pub(super) async fn serve_webhooks(server: &support::Server, stop: impl Future<Output = ()>) {
    let client = server.service_account(SYSTEM, admission::NAME);
    let listener = TcpListener::from_std(webhooks().try_clone().unwrap()).unwrap();
    let policy = Policy::new(Default::default(), SYSTEM);
    admission::serve(client, listener, policy, stop)
        .await
        .unwrap();
}

async fn start(server: &'static support::Server) {
    let admin = server.admin();
    let kinds = [
        "Namespace",
        "ConfigMap",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    for item in install()
        .iter()
        .filter(|item| kinds.iter().any(|kind| item["kind"] == *kind))
    {
        apply(&admin, item, false).await;
    }

    for configuration in manifests::webhooks() {
        apply(&admin, &configuration, false).await;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = [
        (admission::NAME, webhooks().local_addr().unwrap().port()),
        (api::NAME, listener.local_addr().unwrap().port()),
    ];
    for (name, _) in ports {
        let service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": SYSTEM },
            "spec": { "type": "ExternalName", "externalName": "localhost" },
        });
        apply(&admin, &service, false).await;
    }
    for mut item in manifests::api_services(SYSTEM) {
        let service = &mut item["spec"]["service"];
        let port = ports.iter().find(|(name, _)| service["name"] == *name);
        service["port"] = json!(port.expect("a server of ours").1);
        apply(&admin, &item, false).await;
    }
    tokio::spawn(serve_webhooks(server, std::future::pending()));
    let client = server.service_account(SYSTEM, "podvisor-api");
    tokio::spawn(async move {
        api::serve(client, listener, SYSTEM, std::future::pending())
            .await
            .unwrap();
    });
    wait_until_served(&admin).await;
}

/// Until the API server has learnt of both: it says so by its answers alone.
async fn wait_until_served(admin: &Client) {
    let probe = vmi("probe", json!({}));
    let params = PostParams {
        dry_run: true,
        ..Default::default()
    };
    let vmis = api_of(admin, "default", "VirtualMachineInstance");
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(90);
    let services = ApiResource::from_gvk(&GroupVersionKind::gvk(
        "apiregistration.k8s.io",
        "v1",
        "APIService",
    ));
    let services: Api<DynamicObject> = Api::all_with(admin.clone(), &services);
    loop {
        let admitted = vmis.create(&params, &probe).await.map(drop);
        let refused = matches!(&admitted, Err(error) if error.to_string().contains("memory"));
        let mut conditions = Vec::new();
        for service in manifests::api_services(SYSTEM) {
            let name = service["metadata"]["name"].as_str().unwrap();
            let service = services.get(name).await.unwrap();
            conditions.push(service.data["status"]["conditions"][0].clone());
        }
        if refused
            && conditions
                .iter()
                .all(|condition| condition["status"] == "True")
        {
            return;
        }
        let now = std::time::Instant::now();
        assert!(
            now < limit,
            "the servers are not reached: {admitted:?}, {conditions:#?}"
        );
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

pub(super) fn api_of(client: &Client, namespace: &str, kind: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
    Api::namespaced_with(client.clone(), namespace, &resource)
}

pub(super) fn object(kind: &str, name: &str, spec: Value) -> DynamicObject {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
    DynamicObject::new(name, &resource).data(json!({ "spec": spec }))
}

pub(super) fn vmi(name: &str, domain: Value) -> DynamicObject {
    object("VirtualMachineInstance", name, json!({ "domain": domain }))
}

pub(super) fn vm(name: &str, strategy: &str) -> DynamicObject {
    let template = json!({ "spec": { "domain": { "memory": { "guest": "128Mi" } } } });
    object(
        "VirtualMachine",
        name,
        json!({ "runStrategy": strategy, "template": template }),
    )
}

/// The code of a failure of the API server.
#[track_caller]
pub(super) fn code<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("not refused by the API server: {other:?}"),
    }
}
