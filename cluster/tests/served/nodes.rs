//! The node's part behind a real API server: a kubelet's rights, what is reported, and whom it
//! answers.

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use podvisor_cluster::node::{self, Access};
use podvisor_node_api::messages::VmName;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{SYSTEM, api_of, code, served, support, vmi};
use support::machines::StandIn;

/// Makes a Node whose address is this machine's, and serves it; returns its machines.
pub(super) async fn serve(name: &str) -> StandIn {
    let server = served();
    make_node(&server.admin(), name).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let machines = StandIn::serve();
    let access = Access::of(server.kubelet(name));
    let socket = machines.socket();
    let stop = std::future::pending();
    tokio::spawn(async move {
        node::serve(access, listener, SYSTEM, &socket, stop)
            .await
            .unwrap();
    });
    let nodes: Api<Node> = Api::all(server.admin());
    eventually("the node is announced", async || {
        let node = nodes.get(name).await.unwrap();
        node.metadata.annotations?.remove(node::ANNOTATION)
    })
    .await;
    machines
}

pub(super) async fn make_node(admin: &Client, name: &str) {
    let nodes: Api<Node> = Api::all(admin.clone());
    let node = serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
    nodes.create(&PostParams::default(), &node).await.unwrap();
    let addresses = json!([{ "type": "InternalIP", "address": "127.0.0.1" }]);
    let status = Patch::Merge(json!({ "status": { "addresses": addresses } }));
    nodes
        .patch_status(name, &PatchParams::default(), &status)
        .await
        .unwrap();
}

/// Asks again and again until there is something.
pub(super) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..300 {
        if let Some(found) = ask().await {
            return found;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("{what}: not within 30 s");
}

/// Makes an instance that runs on a node, as the controller reports it; returns its name there.
pub(super) async fn running(node: &str, namespace: &str, name: &str, domain: Value) -> VmName {
    let server = served();
    let mut object = vmi(name, domain);
    let spec = &mut object.data["spec"]["domain"];
    spec["memory"] = json!({ "guest": "128Mi" });
    let vmis = api_of(&server.admin(), namespace, "VirtualMachineInstance");
    let made = vmis.create(&PostParams::default(), &object).await.unwrap();
    let controller = server.service_account(SYSTEM, "podvisor-controller");
    let interface = json!({ "name": "default", "ipAddress": "10.1.0.7" });
    let status = json!({
        "phase": "Running",
        "nodeName": node,
        "interfaces": [interface],
        "conditions": [{ "type": "Ready", "status": "True" }],
    });
    api_of(&controller, namespace, "VirtualMachineInstance")
        .patch_status(
            name,
            &PatchParams::default(),
            &Patch::Merge(json!({ "status": status })),
        )
        .await
        .unwrap();
    VmName::new(namespace, name, made.metadata.uid.unwrap())
}

#[tokio::test]
async fn what_the_guests_agent_says_is_in_the_status_beside_what_the_controller_says() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("reports").await;
    let key = running("reports", &namespace, "a", json!({})).await;
    machines.start(&key, Some(support::machines::guest()));
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let status = eventually("the node reports", async || {
        let status = vmis.get("a").await.unwrap().data["status"].clone();
        status["interfaces"][0]["mac"].is_string().then_some(status)
    })
    .await;
    assert_eq!(status["guestOSInfo"]["id"], "debian");
    assert_eq!(status["interfaces"][0]["name"], "default");
    assert_eq!(status["interfaces"][0]["interfaceName"], "eth0");
    let addresses = json!(["10.1.0.7", "fd00::7"]);
    assert_eq!(status["interfaces"][0]["ipAddresses"], addresses);
    let conditions = status["conditions"].as_array().unwrap();
    let kinds: Vec<_> = conditions
        .iter()
        .map(|c| c["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["Ready", "AgentConnected"]);
    assert_eq!(
        (&status["phase"], &status["nodeName"]),
        (&json!("Running"), &json!("reports"))
    );
}

#[tokio::test]
async fn a_node_writes_about_its_own_vms_only_and_only_what_is_a_nodes() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    make_node(&admin, "mine").await;
    make_node(&admin, "theirs").await;
    running("mine", &namespace, "a", json!({})).await;
    let paused = json!([{ "type": "Paused", "status": "True" }]);
    let apply = async |node: &str, status: Value| {
        let patch = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": { "name": "a" },
            "status": status,
        });
        let params = PatchParams::apply("podvisor-node").force();
        api_of(&server.kubelet(node), &namespace, "VirtualMachineInstance")
            .patch_status("a", &params, &Patch::Apply(patch))
            .await
    };
    let report = json!({ "conditions": paused });
    let refused = apply("theirs", report.clone()).await;
    assert_eq!(code(refused), 403);
    for status in [
        json!({ "phase": "Failed" }),
        json!({ "nodeName": "theirs" }),
        json!({ "conditions": [{ "type": "Ready", "status": "False" }] }),
    ] {
        assert_eq!(code(apply("mine", status).await), 403);
    }
    apply("mine", report).await.unwrap();

    let mine = api_of(
        &server.kubelet("mine"),
        &namespace,
        "VirtualMachineInstance",
    );
    assert_eq!(code(mine.get("a").await), 403);
    let label = Patch::Merge(json!({ "metadata": { "labels": { "a": "b" } } }));
    assert_eq!(
        code(mine.patch("a", &PatchParams::default(), &label).await),
        403
    );
    let nodes: Api<Node> = Api::all(server.kubelet("mine"));
    let forged = json!({ "metadata": { "annotations": { node::ANNOTATION: "{}" } } });
    let forged = Patch::Merge(forged);
    assert_eq!(
        code(
            nodes
                .patch("theirs", &PatchParams::default(), &forged)
                .await
        ),
        403
    );
}

#[tokio::test]
async fn a_client_without_a_certificate_of_the_authority_is_not_answered() {
    let server = served();
    serve("closed").await;
    let nodes: Api<Node> = Api::all(server.admin());
    let node = nodes.get("closed").await.unwrap();
    let contact = &node.metadata.annotations.unwrap()[node::ANNOTATION];
    let contact: Value = serde_json::from_str(contact).unwrap();
    let port = u16::try_from(contact["port"].as_u64().unwrap()).unwrap();
    // The authority of the API server is another one than that of our components.
    for name in ["podvisor-api", "admin"] {
        let files = server
            .authority()
            .client(&format!("x-{name}"), name, &[])
            .unwrap();
        assert!(ask(port, Some(&files)).await.is_err(), "{name}");
    }
    assert!(ask(port, None).await.is_err());
}

/// Sends a request to a node, whoever that is; returns what it answers.
async fn ask(port: u16, files: Option<&support::certificates::Files>) -> std::io::Result<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let tls = support::certificates::trusting(files);
    let mut stream = tls.connect("localhost".try_into().unwrap(), stream).await?;
    let request = b"GET /v1/a/b/c/guestosinfo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn a_machine_of_an_older_instance_says_nothing_of_the_one_of_its_name() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("older").await;
    let key = running("older", &namespace, "a", json!({})).await;
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let version = async || vmis.get("a").await.unwrap().metadata.resource_version;
    let before = version().await;
    let older = VmName::new(&namespace, "a", "00000000-0000-0000-0000-000000000000");
    machines.start(&older, Some(support::machines::guest()));
    // The node tries; nobody sees what it says of the older one, not for a moment.
    let user = "system:node:older";
    let tries = "patch virtualmachineinstances/status";
    eventually("the node tries", async || {
        (served().requests(user).count(tries) >= 2).then_some(())
    })
    .await;
    assert_eq!(version().await, before);
    machines.start(&key, Some(support::machines::guest()));
    let reports = async || {
        let status = vmis.get("a").await.unwrap().data["status"].clone();
        status["interfaces"][0]["mac"].is_string().then_some(())
    };
    eventually("the right one reports", reports).await;
}
