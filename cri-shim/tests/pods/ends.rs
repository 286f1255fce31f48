//! How pods and their machines end, and what is left then.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use serde_json::json;
use tonic::Code;

use super::support::stand_in::{Node, POD, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_machine_dies_while_it_is_stopped_is_stopped_then() {
    for is_told in [false, true] {
        let mut node = Node::new(2).await;
        let id = node.create("a", None).await;
        node.start(&id).await.unwrap();
        // Nothing else reports that the container has ended.
        fs::write(node.control.join("lose-exits"), "").unwrap();
        let dies = async {
            node.is_stopping(&id).await;
            match is_told {
                true => node.hold("lost"),
                false => node.kill_process(),
            }
        };
        tokio::join!(node.stop(), dies);
        assert!(!node.log().contains("timed out killing containers"));
        let status = node.status(&id).await;
        assert_eq!((status.exit_code, &*status.reason), (137, "Error"));
        let signal = (!is_told).then_some(9);
        assert_eq!(node.process_ended().signal(), signal);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_ended_with_their_machine_have_its_reason_and_others_their_own() {
    for is_away in [false, true] {
        let mut node = Node::new(2).await;
        let [id, earlier] = [node.create("a", None).await, node.create("b", None).await];
        for id in [&id, &earlier] {
            node.start(id).await.unwrap();
        }
        if is_away {
            node.daemon.end(Signal::KILL);
        }
        // As the process records the end of its machine.
        let of = |id: &str, code: i32, of_machine: bool| {
            let exit = json!({
                "code": code, "exited_at_ns": 8, "oom_killed": false, "of_machine": of_machine,
            });
            json!({
                "id": id, "state": "Exited", "pid": 7, "started_at_ns": 7, "exit": exit,
            })
        };
        let containers = [of(&id, 137, true), of(&earlier, 3, false)];
        let record = json!({ "exit": { "Failed": "it burnt" }, "containers": containers });
        fs::write(node.sandbox().join("exit.json"), record.to_string()).unwrap();
        match is_away {
            true => {
                node.kill_process();
                node.process_ended();
                node.daemon.start();
            }
            false => node.hold("lost"),
        }
        let exited = ContainerState::ContainerExited;
        for id in [&id, &earlier] {
            until(async || node.status(id).await.state() == exited).await;
        }
        let status = node.status(&id).await;
        assert_eq!((status.exit_code, &*status.reason), (255, "SandboxGone"));
        assert!(status.message.contains("it burnt"), "{}", status.message);
        let status = node.status(&earlier).await;
        assert_eq!((status.exit_code, &*status.reason), (3, "Error"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_of_a_machine_that_was_killed_for_memory_are_told_as_such() {
    for is_away in [false, true] {
        let mut node = Node::new(2).await;
        let [id, created] = [node.create("a", None).await, node.create("b", None).await];
        node.start(&id).await.unwrap();
        if is_away {
            node.daemon.end(Signal::KILL);
        }
        // As the process records it that observed the end of the machine and its control group.
        let exit = json!({ "OutOfMemory": { "group": "/sys/fs/cgroup/pods/pod" } });
        let record = json!({ "exit": exit, "containers": [] });
        fs::write(node.sandbox().join("exit.json"), record.to_string()).unwrap();
        node.kill_process();
        node.process_ended();
        if is_away {
            node.daemon.start();
        }
        // The pod's end is reported first.
        let exited = ContainerState::ContainerExited;
        until(async || node.status(&id).await.state() == exited).await;
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxNotready);
        // A restarted daemon knows it, too.
        for _ in 0..2 {
            let status = node.status(&id).await;
            assert_eq!((status.exit_code, &*status.reason), (137, "OOMKilled"));
            for words in ["/sys/fs/cgroup/pods/pod", "memory limit", "RuntimeClass"] {
                assert!(status.message.contains(words), "{}", status.message);
            }
            let status = node.status(&created).await;
            assert_eq!(status.state(), ContainerState::ContainerCreated);
            node.daemon.end(Signal::KILL);
            node.daemon.start();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_on_a_full_disk_holds_nothing_once_it_was_stopped_and_is_removed_later() {
    for is_stopped in [true, false] {
        let mut node = Node::on_a_small_disk().await;
        let volume = node.daemon.path("volume");
        fs::create_dir(&volume).unwrap();
        let id = node.create("a", Some(&volume)).await;
        node.start(&id).await.unwrap();
        assert_eq!(node.mounts().len(), 1);
        node.fill();
        if is_stopped {
            node.stop().await;
            assert!(node.process_ended().success());
            assert_eq!(node.mounts(), [""; 0]);
        }
        for _ in 0..2 {
            let refused = node.remove().await.unwrap_err();
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        }
        assert!(node.process_ended().success());
        assert_eq!(node.mounts(), [""; 0]);
        // It counts as stopped, and its container's exit is not lost.
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxNotready);
        let status = node.status(&id).await;
        assert_eq!((status.exit_code, &*status.reason), (137, "Error"));
        fs::remove_file(node.filler()).unwrap();
        node.remove().await.unwrap();
        assert!(!node.sandbox().exists());
        node.daemon.end(Signal::KILL);
        node.daemon.start();
        let request = ListPodSandboxRequest::default();
        let pods = node.runtime().await.list_pod_sandbox(request).await;
        assert_eq!(pods.unwrap().into_inner().items, []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_another_version_is_killed_before_its_pod_is_told_to_have_ended() {
    let mut node = Node::new(999).await;
    assert_eq!(node.pod_state().await, PodSandboxState::SandboxNotready);
    let ended = node.process.try_wait().unwrap();
    assert_eq!(ended.and_then(|status| status.signal()), Some(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn plugins_that_look_at_a_pods_network_are_gone_when_it_is_undone() {
    let mut node = Node::ended(2).await;
    let script = "case $CNI_COMMAND in CHECK) echo $$ >check; exec sleep 99999;; \
                  DEL) ! kill -0 $(cat check);; esac";
    node.daemon.add_made_network(POD, script);
    node.daemon.start();
    let check = node.daemon.path("plugin/check");
    until(async || check.metadata().is_ok_and(|file| file.len() > 0)).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_network_is_undone_while_its_machine_is_taken_apart_and_its_volumes_after() {
    let mut node = Node::ended(2).await;
    let script = "case $CNI_COMMAND in DEL) echo >deleted;; esac";
    node.daemon.add_made_network(POD, script);
    node.daemon.start();
    let volume = node.daemon.path("volume");
    fs::create_dir(&volume).unwrap();
    node.create("a", Some(&volume)).await;
    let deleted = node.daemon.path("plugin/deleted");
    node.hold("linger");
    node.hold("Shutdown");
    let ends = async {
        until(async || node.asked("Shutdown") == 1).await;
        assert!(!deleted.exists());
        node.let_go("Shutdown");
        until(async || deleted.exists()).await;
        assert_eq!(node.mounts().len(), 1);
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxReady);
        node.let_go("linger");
    };
    tokio::join!(node.stop(), ends);
    assert_eq!(node.mounts(), [""; 0]);
    assert_eq!(node.pod_state().await, PodSandboxState::SandboxNotready);
    assert!(node.process_ended().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_that_a_killed_daemon_had_not_noted_are_noted_by_the_next_one() {
    let mut node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    node.kill_while_the_end_is_noted("it burnt");
    node.daemon.start();
    let status = node.status(&id).await;
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!((status.exit_code, &*status.reason), (255, "SandboxGone"));
    assert!(status.message.contains("it burnt"), "{}", status.message);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_record_is_damaged_is_ended_and_keeps_no_daemon_from_starting() {
    let mut node = Node::ended(2).await;
    node.damage_record();
    node.daemon.start();
    let killed = node.process_ended().signal();
    assert_eq!(killed, Some(Signal::KILL.as_raw()));
    let mut runtime = node.runtime().await;
    let pods = runtime.list_pod_sandbox(ListPodSandboxRequest::default());
    assert_eq!(pods.await.unwrap().into_inner().items, []);
    assert!(node.log().contains("is damaged"), "{}", node.log());
    until(async || !node.sandbox().exists()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_record_another_version_wrote_is_left_to_that_version() {
    let mut node = Node::ended(2).await;
    node.replace_record();
    let ended = node.daemon.command().status().unwrap();
    let said = node.log();
    assert!(!ended.success(), "{said}");
    assert!(said.contains("another version wrote it"), "{said}");
    assert_eq!(node.process.try_wait().unwrap(), None);
    assert!(node.sandbox().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_its_socket_is_killed_before_its_pod_has_ended() {
    let mut node = Node::in_a_group().await;
    node.daemon.end(Signal::KILL);
    // As where the directory was removed, or `state` is another one now.
    fs::remove_file(node.sandbox().join("control.sock")).unwrap();
    node.put_in_own_group();
    node.daemon.start();
    let not_ready = PodSandboxState::SandboxNotready;
    until(async || node.pod_state().await == not_ready).await;
    let ended = node.process.try_wait().unwrap();
    assert!(ended.is_some(), "the machine still runs");
    assert!(node.log().contains("without its socket"), "{}", node.log());
}

/// Writes the record of a machine that has ended, and removes its socket.
fn record_end(node: &Node) {
    fs::remove_file(node.sandbox().join("control.sock")).unwrap();
    let record = json!({ "exit": "PoweredOff", "containers": [] });
    fs::write(node.sandbox().join("exit.json"), record.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_recorded_its_end_and_runs_on_is_killed_before_its_pod_has_ended() {
    let mut node = Node::in_a_group().await;
    node.daemon.end(Signal::KILL);
    // As a guest may do that has taken its process over.
    record_end(&node);
    node.put_in_own_group();
    node.daemon.start();
    let not_ready = PodSandboxState::SandboxNotready;
    until(async || node.pod_state().await == not_ready).await;
    let ended = node.process.try_wait().unwrap();
    assert!(ended.is_some(), "the machine still runs");
    let log = node.log();
    assert!(log.contains("had recorded the machine's end"), "{log}");
    assert!(log.contains("the guest powered itself off"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_no_pod_is_killed_before_its_directory_is_removed() {
    let mut node = Node::in_a_group().await;
    node.daemon.end(Signal::KILL);
    record_end(&node);
    node.put_in_own_group();
    let group = format!("/sys/fs/cgroup/kube/pod/{POD}");
    fs::write(node.sandbox().join("cgroup"), group).unwrap();
    node.damage_record();
    node.daemon.start();
    until(async || !node.sandbox().exists()).await;
    let ended = node.process.try_wait().unwrap();
    assert!(ended.is_some(), "the machine still runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_hangs_is_killed_when_a_container_of_it_is_to_end_and_a_busy_one_is_not() {
    let stop = async |node: &Node, id: &str| {
        let request = StopContainerRequest {
            container_id: id.to_owned(),
            timeout: 0,
        };
        node.runtime().await.stop_container(request).await
    };
    let running = async || {
        let node = Node::new(2).await;
        let id = node.create("a", None).await;
        node.start(&id).await.unwrap();
        node.hold("Signal");
        (node, id)
    };
    let ((mut hangs, hung), (busy, waits)) = (running().await, running().await);
    hangs.hold("Stats");
    let (killed, refused) = tokio::join!(stop(&hangs, &hung), stop(&busy, &waits));
    killed.unwrap();
    assert_eq!(hangs.process_ended().signal(), Some(9));
    until(async || hangs.status(&hung).await.state() == ContainerState::ContainerExited).await;
    assert_eq!(hangs.pod_state().await, PodSandboxState::SandboxNotready);
    let refused = refused.unwrap_err();
    assert!(refused.message().contains("does not end"), "{refused}");
    let status = busy.status(&waits).await;
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    busy.let_go("Signal");
}
