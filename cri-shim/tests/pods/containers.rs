//! Containers that are created, started, stopped and removed, and commands in them.

use std::cell::Cell;
use std::fs;
use std::time::Duration;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use tonic::Code;

use super::support::stand_in::{Node, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_stopped_while_a_container_starts_kills_it_when_it_runs() {
    let mut node = Node::new(2).await;
    let [id, other] = [node.create("a", None).await, node.create("b", None).await];
    node.start(&other).await.unwrap();
    node.hold("Start");
    let stopped = async {
        until(async || node.asked(&format!("Start {id}")) == 1).await;
        let stop = node.stop();
        let let_go = async {
            node.is_stopping(&other).await;
            assert_eq!(node.asked(&format!("Signal {id}")), 0);
            assert_eq!(node.asked("Shutdown"), 0);
            node.let_go("Start");
        };
        tokio::join!(stop, let_go);
    };
    let (started, ()) = tokio::join!(node.start(&id), stopped);
    started.unwrap();
    assert_eq!(node.asked(&format!("Signal {id}")), 1);
    let status = node.status(&id).await;
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!((status.exit_code, &*status.reason), (137, "Error"));
    assert!(node.process_ended().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_start_fails_with_its_pods_end_stays_created() {
    let node = Node::new(2).await;
    let [id, late] = [node.create("a", None).await, node.create("b", None).await];
    let other = node.create("c", None).await;
    node.start(&other).await.unwrap();
    node.hold("Start");
    let stopped = async {
        until(async || node.asked(&format!("Start {id}")) == 1).await;
        let stop = node.stop();
        let others = async {
            node.is_stopping(&other).await;
            // A start that is requested while the pod ends is refused.
            let refused = node.start(&late).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            fs::write(node.control.join("refuse-Start"), "the guest is not there").unwrap();
            node.let_go("Start");
        };
        tokio::join!(stop, others);
    };
    let (started, ()) = tokio::join!(node.start(&id), stopped);
    started.unwrap_err();
    for id in [id, late] {
        let status = node.status(&id).await;
        assert_eq!(
            status.state(),
            ContainerState::ContainerCreated,
            "{status:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_exit_is_lost_was_killed_where_that_was_asked_for() {
    let mut node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    fs::write(node.control.join("lose-exits"), "").unwrap();
    node.stop().await;
    let status = node.status(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (137, "Error"));
    assert!(node.process_ended().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_machine_ends_while_it_is_removed_is_removed() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    let mut runtime = node.runtime().await;
    let mut remove = async || {
        let container_id = id.clone();
        let request = RemoveContainerRequest { container_id };
        runtime.remove_container(request).await.map(drop)
    };
    let refusal = node.control.join("refuse-Delete");
    fs::write(refusal, "the guest powered itself off").unwrap();
    let refused = remove().await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    fs::write(node.control.join("ended"), "").unwrap();
    remove().await.unwrap();
    assert_eq!(node.asked(&format!("Delete {id}")), 2);
    let request = ContainerStatusRequest {
        container_id: id.clone(),
        verbose: false,
    };
    let unknown = node.runtime().await.container_status(request).await;
    assert_eq!(unknown.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_is_shown_as_it_ended_until_it_is_removed() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let mut runtime = node.runtime().await;
    let request = StopContainerRequest {
        container_id: id.clone(),
        timeout: 0,
    };
    runtime.stop_container(request).await.unwrap();
    let ended = node.status(&id).await;
    assert_eq!(ended.state(), ContainerState::ContainerExited, "{ended:?}");
    let refusal = node.control.join("refuse-Delete");
    fs::write(&refusal, "no such luck").unwrap();
    let request = RemoveContainerRequest {
        container_id: id.clone(),
    };
    let refused = runtime.remove_container(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert_eq!(node.status(&id).await, ended);
    let filter = ContainerFilter {
        state: Some(ContainerStateValue {
            state: ContainerState::ContainerExited.into(),
        }),
        ..ContainerFilter::default()
    };
    let request = ListContainersRequest {
        filter: Some(filter),
    };
    let listed = runtime.list_containers(request).await.unwrap();
    assert_eq!(listed.into_inner().containers.len(), 1);
    fs::remove_file(refusal).unwrap();
    node.remove_container(&id).await;
    let listed = runtime.list_containers(ListContainersRequest::default());
    assert_eq!(listed.await.unwrap().into_inner().containers, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_leaves_nothing_in_the_guest_and_is_told_to_all_who_ask() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    fs::write(node.control.join("refuse-Start"), "no such luck").unwrap();
    node.hold("Start");
    let both = async {
        until(async || node.asked(&format!("Start {id}")) == 1).await;
        let mut runtime = node.runtime().await;
        let (mut again, request) = (
            runtime.clone(),
            StartContainerRequest {
                container_id: id.clone(),
            },
        );
        let let_go = async {
            // It is sent after the other call, over the same connection.
            tokio::time::sleep(Duration::from_millis(300)).await;
            runtime.version(VersionRequest::default()).await.unwrap();
            node.let_go("Start");
        };
        let (again, ()) = tokio::join!(again.start_container(request), let_go);
        again.map(|_| ())
    };
    let (first, second) = tokio::join!(node.start(&id), both);
    for failed in [first, second] {
        let failed = failed.unwrap_err();
        assert!(failed.message().contains("no such luck"), "{failed}");
    }
    assert_eq!(node.asked(&format!("Start {id}")), 1);
    assert_eq!(node.asked(&format!("Delete {id}")), 1);
    let status = node.status(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (128, "StartError"));
    // A failed start is permanent.
    let refused = node.start(&id).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_cannot_be_forgotten_is_shown_and_removed() {
    let node = Node::on_a_small_disk().await;
    let annotations = [("large".to_owned(), "x".repeat(2 << 20))];
    let config = ContainerConfig {
        annotations: annotations.into(),
        ..ContainerConfig::default()
    };
    node.pull().await;
    node.fill();
    let refused = node.try_create_pulled("a", config).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    fs::remove_file(node.filler()).unwrap();
    let request = ListContainersRequest::default();
    let listed = node.runtime().await.list_containers(request).await;
    for container in listed.unwrap().into_inner().containers {
        assert_eq!(container.state(), ContainerState::ContainerCreated);
        node.remove_container(&container.id).await;
    }
    node.create("a", None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_process_cannot_be_made_fails_when_it_is_to_start() {
    let node = Node::new(2).await;
    let refuse = |kind: &str| {
        fs::write(node.control.join("kind-Create"), kind).unwrap();
        fs::write(node.control.join("refuse-Create"), "not a directory").unwrap();
    };
    for kind in ["UnknownUser", "InvalidArgument", "Image", "Internal"] {
        refuse(kind);
        let refused = node.try_create("a", ContainerConfig::default()).await;
        assert!(refused.unwrap_err().message().contains("not a directory"));
    }
    for kind in ["LaunchFailed", "CommandNotFound"] {
        refuse(kind);
        let id = node.create(kind, None).await;
        let status = node.status(&id).await;
        assert_eq!(status.state(), ContainerState::ContainerCreated);
        let failed = node.start(&id).await.unwrap_err();
        assert!(failed.message().contains("not a directory"), "{failed}");
        let status = node.status(&id).await;
        assert_eq!((status.exit_code, &*status.reason), (128, "StartError"));
        assert_eq!(status.message, "not a directory");
        // As for one that has run.
        assert!(node.has_log(kind));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_creation_nobody_waits_for_is_removed_when_it_is_made() {
    let node = Node::new(2).await;
    let config = |annotation: &str| ContainerConfig {
        annotations: [("of".to_owned(), annotation.to_owned())].into(),
        ..ContainerConfig::default()
    };
    node.hold("Create");
    {
        let create = node.try_create("a", config("first"));
        let begins = until(async || node.asked_to("Create") == 1);
        let mut create = std::pin::pin!(create);
        tokio::select! {
            created = &mut create => panic!("{created:?}"),
            () = begins => {}
        }
        // Its deadline has expired: it is not waited for.
    }
    let early = node.try_create("a", config("second")).await.unwrap_err();
    assert_eq!(early.code(), Code::AlreadyExists, "{early}");
    node.let_go("Create");
    // A kubelet retries with a different request.
    let created = Cell::new(None);
    until(async || {
        let again = node.try_create("a", config("second")).await;
        let is_made = again.is_ok();
        created.set(again.ok());
        is_made
    })
    .await;
    let request = ListContainersRequest::default();
    let listed = node.runtime().await.list_containers(request).await;
    let listed = listed.unwrap().into_inner().containers;
    let ids: Vec<&String> = listed.iter().map(|container| &container.id).collect();
    assert_eq!(ids, [&created.into_inner().unwrap()]);
    assert_eq!((node.asked_to("Create"), node.asked_to("Delete")), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_a_killed_daemon_was_creating_is_not_listed_while_it_is_removed() {
    let mut node = Node::new(2).await;
    node.pull().await;
    node.hold("Create");
    {
        let create = node.try_create_pulled("a", ContainerConfig::default());
        let begins = until(async || node.asked_to("Create") == 1);
        let mut create = std::pin::pin!(create);
        tokio::select! {
            created = &mut create => panic!("{created:?}"),
            () = begins => {}
        }
    }
    node.hold("Delete");
    node.daemon.end(Signal::KILL);
    node.let_go("Create");
    node.daemon.start();
    until(async || node.asked_to("Delete") == 1).await;
    assert_eq!(node.listed().await, []);
    node.let_go("Delete");
    node.create("a", None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_never_ran_is_not_told_to_be_unknown_while_it_is_removed() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.hold("Delete");
    let removed = node.remove_container(&id);
    let mut removed = std::pin::pin!(removed);
    tokio::select! {
        () = &mut removed => panic!("it is held"),
        () = until(async || node.asked_to("Delete") == 1) => {}
    }
    assert_eq!(node.listed().await, [ContainerState::ContainerCreated]);
    node.let_go("Delete");
    removed.await;
    assert_eq!(node.listed().await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_takes_too_long_has_ended_when_that_is_told() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let late = node.exec(&id, 1).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    assert_eq!(node.asked(&format!("Signal {id} exec")), 1);
    // Once for its timeout, and once for its end.
    assert_eq!(node.asked(&format!("Wait {id} exec")), 2);
    let status = node.status(&id).await;
    assert_eq!(status.state(), ContainerState::ContainerRunning);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_be_killed_does_not_hold_the_answer_up() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    node.hold("Signal");
    let late = node.exec(&id, 1).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    // It is retried, though no caller waits for it.
    until(async || node.asked(&format!("Signal {id} exec")) == 2).await;
    node.let_go("Signal");
}
