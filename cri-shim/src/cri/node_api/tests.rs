//! The calls of a node without guests.

use std::sync::Arc;

use podvisor_cri_messages::{ContainerEventType, PodSandboxMetadata};
use podvisor_node_api::messages::{StopRequest, VmChange, VmName, VmPhase};
use podvisor_node_api::{NodeClient, NodeServer};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::iter;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;
use tonic::transport::Server;

use super::*;
use crate::cri::VM_HANDLER;
use crate::cri::node::{Container, Pod, TestNode};
use crate::cri::state::{
    ContainerExit, ContainerPhase, PodPhase, PodRecord, container_record, pod_record,
};
use crate::sandbox::{MigrationDirection, MigrationInfo, MigrationState};

/// A pod that is a VM; `instance` is the name and unique id of the object that it was made of.
fn record(id: &str, pod: &str, instance: Option<(&str, &str)>) -> PodRecord {
    let mut record = pod_record(id);
    record.handler = VM_HANDLER.to_owned();
    record.config.metadata = Some(PodSandboxMetadata {
        name: pod.to_owned(),
        uid: format!("uid-{pod}"),
        namespace: "tenant".to_owned(),
        attempt: 0,
    });
    if let Some((name, uid)) = instance {
        let metadata = json!({"name": name, "namespace": "tenant", "uid": uid});
        let text = json!({ "metadata": metadata }).to_string();
        let annotation = ("podvisor.io/vmi".to_owned(), text);
        record.config.annotations = [annotation].into();
    }
    record
}

fn add(node: &TestNode, record: PodRecord) -> Arc<Pod> {
    let pod = Pod::new(record);
    node.add_pod(&pod).unwrap();
    pod
}

fn exited(code: i32) -> ContainerPhase {
    ContainerPhase::Exited(ContainerExit {
        started_at: 8,
        finished_at: 9,
        code,
        reason: "Error".to_owned(),
        message: "the guest panicked".to_owned(),
    })
}

fn web() -> VmName {
    VmName::new("tenant", "web", "")
}

#[tokio::test]
async fn vms_are_named_by_their_objects_and_other_pods_are_none() {
    let node = TestNode::new();
    add(
        &node,
        record("a", "virt-launcher-web-1", Some(("web", "7c0e"))),
    );
    add(&node, record("b", "debian", None));
    add(&node, pod_record("c"));
    let vms = node.vms().await;
    let names: Vec<VmName> = vms.iter().filter_map(|vm| vm.vm.clone()).collect();
    assert_eq!(
        names,
        [
            VmName::new("tenant", "debian", "uid-debian"),
            VmName::new("tenant", "web", "7c0e"),
        ]
    );
    assert_eq!(vms[1].pod_name, "virt-launcher-web-1");
    assert_eq!(vms[1].pod_uid, "uid-virt-launcher-web-1");
    assert_eq!(vms[1].phase(), VmPhase::Starting);
    assert_eq!(vms[1].addresses, ["10.0.0.2"]);
}

#[tokio::test]
async fn a_vm_is_what_its_container_is() {
    let node = TestNode::new();
    let pod = add(&node, record("a", "pod", Some(("web", "7c0e"))));
    let mut made = container_record("c", "a");
    made.phase = exited(1);
    let container = Container::new(made, Arc::clone(&pod));
    node.add_container(&container).unwrap();
    let vms = node.vms().await;
    assert_eq!(vms[0].phase(), VmPhase::Ended);
    assert_eq!((vms[0].since_ns, vms[0].container_id.as_str()), (9, "c"));
    let exit = vms[0].exit.clone().unwrap();
    assert_eq!(
        (exit.code, exit.message.as_str()),
        (1, "the guest panicked")
    );
    // Its sandbox is not there to say that it is paused.
    node.note_container(&container, |record| {
        record.phase = ContainerPhase::Running { started_at: 8 };
    });
    let vm = node.vms().await.remove(0);
    assert_eq!((vm.phase(), vm.since_ns), (VmPhase::Running, 8));
    node.vms.note_pause("c", Some(10));
    let vm = node.vms().await.remove(0);
    assert_eq!((vm.phase(), vm.since_ns), (VmPhase::Paused, 10));
}

#[tokio::test]
async fn of_two_pods_of_one_vm_the_later_is_reported() {
    let node = TestNode::new();
    let mut first = record("a", "pod", Some(("web", "7c0e")));
    first.phase = PodPhase::stopped(Some("the node was rebooted".to_owned()));
    let mut second = record("b", "pod", Some(("web", "7c0e")));
    second.created_at = 8;
    if let Some(metadata) = &mut second.config.metadata {
        metadata.attempt = 1;
    }
    add(&node, second);
    add(&node, first);
    let vms = node.vms().await;
    assert_eq!(vms.len(), 1);
    assert_eq!(
        (vms[0].sandbox_id.as_str(), vms[0].phase()),
        ("b", VmPhase::Starting)
    );
}

/// A container of a pod, whose machine comes if there is a migration.
fn running(node: &TestNode, id: &str, pod: &Arc<Pod>, migration: Option<&str>) {
    let mut made = container_record(id, &pod.id);
    made.phase = ContainerPhase::Running { started_at: 8 };
    let vm = json!({
        "uuid": vec![0; 16], "vcpus": 1, "memory": 1 << 20, "incoming": migration,
    });
    made.vm = Some(serde_json::from_value(vm).unwrap());
    let container = Container::new(made, Arc::clone(pod));
    node.add_container(&container).unwrap();
}

/// What a sandbox's process says of a migration.
fn told(direction: MigrationDirection, state: MigrationState) -> MigrationInfo {
    MigrationInfo {
        version: 1,
        migration: "m-1".to_owned(),
        direction,
        state,
        reason: String::new(),
        bytes_total: 4096,
        bytes_left: 0,
        round: 0,
        downtime_ns: 0,
        started_at_ns: 7,
        ended_at_ns: 0,
    }
}

#[tokio::test]
async fn a_pod_that_waits_for_a_machine_is_the_vm_unless_another_one_runs_it() {
    let node = TestNode::new();
    let first = add(&node, record("a", "source", Some(("web", "7c0e"))));
    running(&node, "c", &first, None);
    let mut second = record("b", "target", Some(("web", "7c0e")));
    second.created_at = 8;
    let second = add(&node, second);
    running(&node, "d", &second, Some("m-1"));
    let shown = async || {
        let vm = node.vms().await.remove(0);
        (vm.pod_name.clone(), vm.phase())
    };
    assert_eq!(shown().await, ("source".to_owned(), VmPhase::Running));
    // It has gone elsewhere, and comes back.
    let container = node.container("c").unwrap();
    node.note_container(&container, |record| record.phase = exited(0));
    assert_eq!(shown().await, ("target".to_owned(), VmPhase::Incoming));
    let receiving = told(MigrationDirection::In, MigrationState::Receiving);
    node.vms.note_migration("d", receiving);
    let vm = node.vms().await.remove(0);
    assert_eq!(vm.phase(), VmPhase::Incoming);
    let migration = vm.migration.unwrap();
    assert_eq!(
        (migration.migration.as_str(), migration.bytes_total),
        ("m-1", 4096)
    );
    let done = told(MigrationDirection::In, MigrationState::Done);
    node.vms.note_migration("d", done);
    assert_eq!(shown().await, ("target".to_owned(), VmPhase::Running));
    // One that was given away, and of which nobody knows, stands still.
    let doubt = told(MigrationDirection::Out, MigrationState::InDoubt);
    node.vms.note_migration("d", doubt);
    assert_eq!(shown().await, ("target".to_owned(), VmPhase::Paused));
}

#[tokio::test]
async fn a_pod_that_ended_without_a_machine_says_why() {
    let node = TestNode::new();
    let mut stopped = record("a", "pod", Some(("web", "7c0e")));
    stopped.phase = PodPhase::stopped(Some("its process died".to_owned()));
    add(&node, stopped);
    let vm = node.vms().await.remove(0);
    assert_eq!(vm.phase(), VmPhase::Ended);
    assert_eq!(vm.exit.unwrap().message, "its process died");
    assert!(vm.addresses.is_empty());
}

/// Serves a node on a socket.
fn client(node: &TestNode) -> (NodeClient, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("n");
    let listener = UnixListener::bind(&socket).unwrap();
    let service = NodeServer::new(Arc::new(VmCalls(Arc::clone(node))));
    tokio::spawn(async move {
        let server = Server::builder().add_service(service);
        let incoming = UnixListenerStream::new(listener);
        server.serve_with_incoming(incoming).await.unwrap();
    });
    (NodeClient::new(&socket).unwrap(), dir)
}

#[tokio::test]
async fn what_is_not_there_or_does_not_run_is_refused_in_words() {
    let node = TestNode::new();
    add(&node, record("a", "pod", Some(("web", "7c0e"))));
    let (mut client, _dir) = client(&node);
    let unknown = client.pause(VmName::new("tenant", "other", "")).await;
    let unknown = unknown.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(unknown.message().contains("tenant/other"), "{unknown}");
    let replaced = client.pause(VmName::new("tenant", "web", "older")).await;
    assert_eq!(replaced.unwrap_err().code(), Code::NotFound);
    let nameless = client.pause(VmName::new("", "web", "")).await;
    assert_eq!(nameless.unwrap_err().code(), Code::InvalidArgument);
    for refused in [
        client.pause(web()).await,
        client.unpause(web()).await,
        client.stop(web(), 30).await,
        client.cancel_migration(web(), "m-1").await,
        client.resolve_migration(web(), "m-1", true).await,
    ] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("does not run"), "{refused}");
    }
    let calls = VmCalls(Arc::clone(&node));
    let without = calls.stop(StopRequest::default()).await;
    assert_eq!(without.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn streams_that_do_not_open_anything_are_refused() {
    let node = TestNode::new();
    let (mut client, _dir) = client(&node);
    let closed = client.console(iter([])).await.unwrap_err();
    assert_eq!(closed.code(), Code::InvalidArgument);
    let empty = client.console(iter([ConsoleInput::default()])).await;
    assert_eq!(empty.unwrap_err().code(), Code::InvalidArgument);
    let empty = client
        .port_forward(iter([PortForwardInput::default()]))
        .await;
    assert_eq!(empty.unwrap_err().code(), Code::InvalidArgument);
    let empty = client.send_migration(iter([SendMigrationInput::default()]));
    assert_eq!(empty.await.unwrap_err().code(), Code::InvalidArgument);
    let empty = client.receive_migration(iter([ReceiveMigrationInput::default()]));
    assert_eq!(empty.await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_watcher_is_told_all_and_then_each_change() {
    let node = TestNode::new();
    let pod = add(&node, record("a", "pod", Some(("web", "7c0e"))));
    let (mut client, _dir) = client(&node);
    let mut events = client.watch_vms().await.unwrap();
    let mut next = async || events.message().await.unwrap().unwrap().change.unwrap();
    let VmChange::All(all) = next().await else {
        panic!("not all of them");
    };
    assert_eq!(all.vms.len(), 1);

    let container = Container::new(container_record("c", "a"), Arc::clone(&pod));
    node.add_container(&container).unwrap();
    node.note_container(&container, |record| record.phase = exited(0));
    let event = ContainerEventType::ContainerStoppedEvent;
    node.emit(&container, event);
    let VmChange::Changed(vm) = next().await else {
        panic!("not a change");
    };
    assert_eq!(vm.phase(), VmPhase::Ended);

    node.forget_container(&container).unwrap();
    node.forget_pod(&pod).unwrap();
    // What lies between two looks comes as one.
    loop {
        match next().await {
            VmChange::Removed(name) => break assert_eq!(name.name, "web"),
            VmChange::Changed(_) => {}
            VmChange::All(_) => panic!("all of them again"),
        }
    }
}
