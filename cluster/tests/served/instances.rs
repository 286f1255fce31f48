//! The subresources of instances, as clients of KubeVirt use them.

use futures_util::{SinkExt, StreamExt};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
    core::GroupVersionKind,
};
use podvisor_cluster::{api, controller};
use podvisor_node_api::messages::VmPhase;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use super::nodes::{eventually, running, serve};
use super::support::{self, machines::guest, server::WebSocket};
use super::{SYSTEM, api_of, path, put_to, served, vm, vmi};

const VMIS: &str = "virtualmachineinstances";
const PLAIN: &str = "plain.kubevirt.io";

/// GETs a subresource; the code and the answer.
async fn get(client: &Client, namespace: &str, name: &str, sub: &str) -> (u16, Value) {
    let request = http::Request::get(path(VMIS, namespace, name, sub));
    get_raw(client, request.body(Vec::new()).unwrap()).await
}

async fn get_raw(client: &Client, request: http::Request<Vec<u8>>) -> (u16, Value) {
    match client.request::<Value>(request).await {
        Ok(value) => (200, value),
        Err(kube::Error::Api(status)) => (status.code, json!(status.message)),
        Err(error) => panic!("{error}"),
    }
}

async fn heard(socket: &mut WebSocket) -> String {
    loop {
        match socket.next().await.expect("a message").expect("a frame") {
            Message::Binary(bytes) => return String::from_utf8_lossy(&bytes).into_owned(),
            Message::Close(Some(frame)) => {
                return format!("closed {} {}", frame.code, frame.reason);
            }
            Message::Ping(_) | Message::Pong(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn an_instance_is_paused_and_resumed_on_its_node_and_says_so() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("pauses").await;
    let key = running("pauses", &namespace, "a", json!({})).await;
    machines.start(&key, None);
    let put = async |sub: &str, body: &str| put_to(&admin, VMIS, &namespace, "a", sub, body).await;
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let paused = async || {
        let status = vmis.get("a").await.unwrap().data["status"].clone();
        let conditions = status["conditions"].as_array().unwrap();
        conditions
            .iter()
            .any(|c| c["type"] == "Paused" && c["status"] == "True")
    };

    assert_eq!(put("unpause", "").await, 409);
    assert_eq!(put("pause", r#"{"dryRun":["All"]}"#).await, 202);
    assert_eq!(machines.machine(&key).phase, VmPhase::Running);
    assert_eq!(put("pause", "{}").await, 202);
    assert_eq!(machines.machine(&key).phase, VmPhase::Paused);
    eventually("the pause is reported", async || {
        paused().await.then_some(())
    })
    .await;
    assert_eq!(put("pause", "").await, 409);
    let forward = path(VMIS, &namespace, "a", "portforward/22");
    assert_eq!(served().websocket(&forward, PLAIN).await.unwrap_err(), 409);
    assert_eq!(put("unpause", "").await, 202);
    eventually("the resumption is reported", async || {
        (!paused().await).then_some(())
    })
    .await;

    assert_eq!(put("softreboot", "").await, 202);
    assert_eq!(put("reset", "").await, 202);
    let done = machines.machine(&key).done;
    let expected = ["pause", "unpause", "soft reboot", "reset"];
    assert_eq!(done, expected);
    // Without an agent, the guest's error is told.
    assert_eq!(put("freeze", "").await, 500);
    assert_eq!(get(&admin, &namespace, "a", "guestosinfo").await.0, 409);
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(admin, &namespace);
    eventually("what happened is told", async || {
        let events = events.list(&Default::default()).await.unwrap();
        let reasons: Vec<_> = events
            .items
            .iter()
            .filter_map(|e| e.reason.as_deref())
            .collect();
        let expected = ["Paused", "Resumed", "SoftRebooted", "Reset", "FreezeError"];
        expected
            .iter()
            .all(|reason| reasons.contains(reason))
            .then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_console_is_a_websocket_that_a_second_one_takes_over() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("console").await;
    let key = running("console", &namespace, "a", json!({})).await;
    machines.start(&key, None);
    let console = path(VMIS, &namespace, "a", "console");
    let mut first = server.websocket(&console, PLAIN).await.unwrap();
    assert_eq!(heard(&mut first).await, "console");
    first.send(Message::Binary("ls\n".into())).await.unwrap();
    assert_eq!(heard(&mut first).await, "ls\n");
    let mut second = server.websocket(&console, PLAIN).await.unwrap();
    assert_eq!(heard(&mut second).await, "console");
    assert_eq!(
        heard(&mut first).await,
        "closed 1011 somebody else took the stream over"
    );
    second.send(Message::Binary("exit".into())).await.unwrap();
    assert_eq!(heard(&mut second).await, "closed 1000 ");
    // What is no WebSocket, and what speaks another protocol, is told so.
    assert_eq!(get(&admin, &namespace, "a", "console").await.0, 400);
    let other = server.websocket(&console, "v4.channel.k8s.io").await;
    assert_eq!(other.unwrap_err(), 400);
}

#[tokio::test]
async fn ports_are_reached_by_both_protocols_and_by_the_vm_as_well() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("ports").await;
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &vm("a", "Manual"))
        .await
        .unwrap();
    let devices = json!({ "devices": { "autoattachVSOCK": true } });
    let key = running("ports", &namespace, "a", devices).await;
    machines.start(&key, None);
    for (resource, sub, expected) in [
        (VMIS, "portforward/22", "Tcp 22"),
        (VMIS, "portforward/22/tcp", "Tcp 22"),
        (VMIS, "portforward/53/udp", "Udp 53"),
        ("virtualmachines", "portforward/80", "Tcp 80"),
        (VMIS, "vsock?port=1024&tls=false", "Vsock 1024"),
    ] {
        let path = path(resource, &namespace, "a", sub);
        let mut socket = server.websocket(&path, PLAIN).await.unwrap();
        assert_eq!(heard(&mut socket).await, expected, "{sub}");
        let large = "x".repeat(100_000);
        socket
            .send(Message::Binary(large.clone().into()))
            .await
            .unwrap();
        assert_eq!(heard(&mut socket).await, large, "{sub}");
    }
    let forward = path(VMIS, &namespace, "a", "portforward/23");
    assert_eq!(server.websocket(&forward, PLAIN).await.unwrap_err(), 409);
    let forward = path(VMIS, &namespace, "a", "portforward/0");
    assert_eq!(server.websocket(&forward, PLAIN).await.unwrap_err(), 400);
    let forward = path(VMIS, &namespace, "none", "portforward/1");
    assert_eq!(server.websocket(&forward, PLAIN).await.unwrap_err(), 404);
}

#[tokio::test]
async fn the_guests_agent_is_asked_for_facts() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let machines = serve("facts").await;
    let key = running("facts", &namespace, "a", json!({})).await;
    machines.start(&key, Some(guest()));
    let info = eventually("the agent is connected", async || {
        let (code, info) = get(&admin, &namespace, "a", "guestosinfo").await;
        (code == 200).then_some(info)
    })
    .await;
    assert_eq!(info["guestAgentVersion"], "8.2.0");
    assert_eq!(info["os"]["prettyName"], "Debian GNU/Linux 13 (trixie)");
    let (_, users) = get(&admin, &namespace, "a", "userlist").await;
    assert_eq!(users["items"][0]["userName"], "root");
    let (code, filesystems) = get(&admin, &namespace, "a", "filesystemlist").await;
    assert_eq!((code, &filesystems["items"]), (200, &json!([])));
    let body = r#"{"unfreezeTimeout":"30s"}"#;
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "freeze", body).await,
        202
    );
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "unfreeze", "").await,
        202
    );
    assert_eq!(machines.machine(&key).done, ["freeze 30", "thaw"]);
}

#[tokio::test]
async fn a_node_that_is_not_reached_is_an_error_that_names_it() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    running("nowhere", &namespace, "a", json!({})).await;
    let console = path(VMIS, &namespace, "a", "console");
    assert_eq!(served().websocket(&console, PLAIN).await.unwrap_err(), 500);
    let pause = http::Request::put(path(VMIS, &namespace, "a", "pause"));
    let (code, message) = get_raw(&admin, pause.body(Vec::new()).unwrap()).await;
    assert_eq!(code, 500);
    assert!(message.as_str().unwrap().contains("nowhere"), "{message}");
}

#[tokio::test]
async fn what_there_is_not_is_refused_in_words() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    running("nowhere", &namespace, "a", json!({})).await;
    for sub in [
        "vnc",
        "vnc/screenshot",
        "usbredir",
        "sev/fetchcertchain",
        "vsock?port=1",
    ] {
        assert_eq!(get(&admin, &namespace, "a", sub).await.0, 400, "{sub}");
    }
    for sub in ["addvolume", "removevolume"] {
        assert_eq!(
            put_to(&admin, VMIS, &namespace, "a", sub, "{}").await,
            400,
            "{sub}"
        );
    }
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "b", "pause", "").await,
        404
    );
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "explode", "").await,
        404
    );
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &vm("v", "Halted"))
        .await
        .unwrap();
    for sub in ["addvolume", "removevolume", "memorydump"] {
        let code = put_to(&admin, "virtualmachines", &namespace, "v", sub, "{}").await;
        assert_eq!(code, 400, "{sub}");
    }
}

#[tokio::test]
async fn an_instance_that_does_not_run_has_no_streams() {
    let server = served();
    let admin = server.admin();
    let namespace = support::namespace(&admin).await;
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let memory = json!({ "memory": { "guest": "128Mi" } });
    vmis.create(&PostParams::default(), &vmi("a", memory))
        .await
        .unwrap();
    let console = path(VMIS, &namespace, "a", "console");
    assert_eq!(server.websocket(&console, PLAIN).await.unwrap_err(), 400);
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "pause", "").await,
        409
    );
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "reset", "").await,
        500
    );
    assert_eq!(
        put_to(&admin, VMIS, &namespace, "a", "evacuate/cancel", "").await,
        202
    );
}

#[tokio::test]
async fn clients_are_told_what_the_group_has() {
    let admin = served().admin();
    let get = async |path: &str| {
        let request = http::Request::get(path).body(Vec::new()).unwrap();
        get_raw(&admin, request).await
    };
    for version in api::VERSIONS {
        let base = format!("/apis/{}/{version}", api::GROUP);
        let (_, list) = get(&base).await;
        let resources = list["resources"].as_array().unwrap();
        let has = |name: &str| resources.iter().any(|resource| resource["name"] == name);
        assert!(has("virtualmachineinstances/console") && has("virtualmachines/start"));
        let (_, openapi) = get(&format!("/openapi/v3{base}")).await;
        let console = format!("{base}/namespaces/{{namespace}}/{VMIS}/{{name}}/console");
        assert_eq!(openapi["openapi"], "3.0.0", "{openapi}");
        assert!(openapi["paths"][console]["get"].is_object());
        assert_eq!(get(&format!("{base}/version")).await.0, 200);
        assert_eq!(get(&format!("{base}/healthz")).await.0, 200);
        assert_eq!(get(&format!("{base}/guestfs")).await.0, 404);
    }
}

#[tokio::test]
async fn a_vm_without_an_instance_type_is_expanded_to_itself() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    vms.create(&PostParams::default(), &vm("a", "Halted"))
        .await
        .unwrap();
    let request = http::Request::get(path("virtualmachines", &namespace, "a", "expand-spec"));
    let (code, expanded) = get_raw(&admin, request.body(Vec::new()).unwrap()).await;
    assert_eq!(
        (code, &expanded["spec"]["runStrategy"]),
        (200, &json!("Halted"))
    );
    let path = format!(
        "/apis/{}/v1/namespaces/{namespace}/expand-vm-spec",
        api::GROUP
    );
    let given = serde_json::to_vec(&vm("b", "Manual")).unwrap();
    let request = http::Request::put(path).body(given).unwrap();
    let (code, expanded) = get_raw(&admin, request).await;
    assert_eq!(
        (code, &expanded["spec"]["runStrategy"]),
        (200, &json!("Manual"))
    );
}

#[tokio::test]
async fn a_vm_gets_cpus_and_memory_of_its_instance_type() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let gvk = GroupVersionKind::gvk(
        "instancetype.kubevirt.io",
        "v1beta1",
        "VirtualMachineInstancetype",
    );
    let resource = ApiResource::from_gvk(&gvk);
    let types: Api<DynamicObject> = Api::namespaced_with(admin.clone(), &namespace, &resource);
    let size = json!({ "spec": { "cpu": { "guest": 3 }, "memory": { "guest": "256Mi" } } });
    let size = DynamicObject::new("size", &resource).data(size);
    types.create(&PostParams::default(), &size).await.unwrap();

    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let mut typed = vm("a", "Always");
    let kind = "VirtualMachineInstancetype";
    typed.data["spec"]["instancetype"] = json!({ "name": "size", "kind": kind });
    let refused = vms
        .create(&PostParams::default(), &typed)
        .await
        .unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("spec.template.spec.domain.memory"),
        "{refused}"
    );
    typed.data["spec"]["template"]["spec"]["domain"] = json!({});
    vms.create(&PostParams::default(), &typed).await.unwrap();
    let request = http::Request::get(path("virtualmachines", &namespace, "a", "expand-spec"));
    let (_, expanded) = get_raw(&admin, request.body(Vec::new()).unwrap()).await;
    let domain = &expanded["spec"]["template"]["spec"]["domain"];
    assert_eq!(domain["cpu"]["sockets"], 3);
    assert!(expanded["spec"].get("instancetype").is_none());

    let mut options = controller::Options::default();
    options.namespace = Some(namespace.clone());
    options.lease_namespace = SYSTEM.to_owned();
    options.lease_name = "of-instance-types".to_owned();
    let client = served().service_account(SYSTEM, "podvisor-controller");
    let controller = tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    });
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let made = eventually("the instance is made", async || {
        vmis.get_opt("a").await.unwrap()
    })
    .await;
    controller.abort();
    let domain = &made.data["spec"]["domain"];
    assert_eq!(
        (&domain["cpu"]["sockets"], &domain["memory"]["guest"]),
        (&json!(3), &json!("256Mi"))
    );
    let annotations = made.metadata.annotations.unwrap();
    assert_eq!(annotations["kubevirt.io/instancetype-name"], "size");
}

#[tokio::test]
async fn a_vm_that_does_not_run_gets_a_volume_and_loses_it() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let vms = api_of(&admin, &namespace, "VirtualMachine");
    let params = PostParams::default();
    vms.create(&params, &vm("v", "Halted")).await.unwrap();
    let ask = async |sub: &str, body: Value| {
        let body = body.to_string();
        put_to(&admin, "virtualmachines", &namespace, "v", sub, &body).await
    };
    let source = json!({ "persistentVolumeClaim": { "claimName": "data" } });
    // As virtctl writes it.
    let disk = json!({ "disk": { "bus": "scsi" }, "serial": "data" });
    let mut add = json!({ "name": "data", "disk": disk, "volumeSource": source });
    add["dryRun"] = json!(["All"]);
    assert_eq!(ask("addvolume", add.clone()).await, 202);
    let volumes = async || {
        let vm = vms.get("v").await.unwrap();
        vm.data["spec"]["template"]["spec"]["volumes"].clone()
    };
    assert_eq!(volumes().await, Value::Null);
    add["dryRun"] = json!([]);
    assert_eq!(ask("addvolume", add.clone()).await, 202);
    let added = json!({ "claimName": "data", "hotpluggable": true });
    assert_eq!(volumes().await[0]["persistentVolumeClaim"], added);
    assert_eq!(ask("addvolume", add.clone()).await, 409);
    // A disk that is not supported is refused as in the VM itself.
    add["name"] = json!("other");
    add["volumeSource"]["persistentVolumeClaim"]["claimName"] = json!("other");
    add["disk"] = json!({ "lun": {} });
    assert_eq!(ask("addvolume", add).await, 422);
    assert_eq!(ask("removevolume", json!({ "name": "data" })).await, 202);
    assert_eq!(volumes().await, json!([]));
    assert_eq!(ask("removevolume", json!({ "name": "data" })).await, 409);
}
