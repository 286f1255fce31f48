//! Pods of a daemon whose machine processes are stand-ins (`tests/programs/stand_in.rs`), which
//! reliably do what those of guests rarely do: this needs no guest.

mod support;

use std::cell::Cell;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use k8s_cri::v1::*;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use rustix::process::Signal;
use serde_json::json;
use support::stand_in::{Node, POD, until};
use tonic::Code;

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

/// A directory in which every lookup blocks forever: this test serves its file system and never
/// answers.
struct Hang {
    dir: PathBuf,
    _server: File,
}

impl Hang {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let mut options = File::options();
        let server = options.read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            server.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        mount("hang", &dir, "fuse", MountFlags::empty(), &*options).unwrap();
        Self {
            dir,
            _server: server,
        }
    }
}

impl Drop for Hang {
    fn drop(&mut self) {
        let _ = unmount(&self.dir, UnmountFlags::DETACH);
    }
}

/// Waits until the daemon checks a volume.
async fn looks_at_a_volume(node: &Node) {
    let tasks = format!("/proc/{}/task", node.daemon.pid());
    until(async || {
        let threads = fs::read_dir(&tasks).unwrap().flatten();
        let mut names = threads.map(|thread| fs::read_to_string(thread.path().join("comm")));
        names.any(|name| name.is_ok_and(|name| name == "volumes\n"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_can_be_stopped_while_a_volume_hangs() {
    let mut node = Node::new(2).await;
    let hang = Hang::new(node.daemon.path("hang"));
    let volume = hang.dir.join("volume");
    let stops = async {
        looks_at_a_volume(&node).await;
        // Other calls continue meanwhile.
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxReady);
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, node.stop())
            .await
            .expect("the pod is not stopped");
    };
    let (created, ()) = tokio::join!(node.create_with("a", &volume), stops);
    let refused = created.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(node.process_ended().success());
    node.remove().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machines_end_is_noted_while_a_volume_hangs() {
    let mut node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let hang = Hang::new(node.daemon.path("hang"));
    let volume = hang.dir.join("volume");
    let dies = async {
        looks_at_a_volume(&node).await;
        node.kill_process();
        let not_ready = PodSandboxState::SandboxNotready;
        until(async || node.pod_state().await == not_ready).await;
        let exited = ContainerState::ContainerExited;
        until(async || node.status(&id).await.state() == exited).await;
    };
    let (created, ()) = tokio::join!(node.create_with("b", &volume), dies);
    let refused = created.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    node.process_ended();
    node.remove().await.unwrap();
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
        assert_eq!(container.state(), ContainerState::ContainerUnknown);
        node.remove_container(&container.id).await;
    }
    node.create("a", None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_has_ended_has_no_volumes_mounted() {
    for is_stopped in [true, false] {
        let mut node = Node::new(2).await;
        let volume = node.daemon.path("volume");
        fs::create_dir(&volume).unwrap();
        let id = node.create("a", Some(&volume)).await;
        node.create("b", Some(&volume)).await;
        node.start(&id).await.unwrap();
        assert_eq!(node.mounts().len(), 1);
        if is_stopped {
            node.stop().await;
        } else {
            node.process.kill().unwrap();
            node.process_ended();
            let not_ready = PodSandboxState::SandboxNotready;
            until(async || node.pod_state().await == not_ready).await;
            until(async || node.mounts().is_empty()).await;
            let status = node.status(&id).await;
            assert_eq!((status.exit_code, &*status.reason), (255, "SandboxGone"));
        }
        assert_eq!(node.mounts(), [""; 0]);
        node.remove().await.unwrap();
        assert!(volume.exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_no_container_is_known_to_have_is_unmounted() {
    let mut node = Node::new(2).await;
    let volume = node.daemon.path("volume");
    fs::create_dir(&volume).unwrap();
    node.create("a", Some(&volume)).await;
    let [known] = <[String; 1]>::try_from(node.mounts()).unwrap();
    // As by a daemon that was killed before it recorded its mount.
    let point = node.sandbox().join("shared/b-0");
    let mount_one = || {
        fs::create_dir(&point).unwrap();
        mount_bind(&volume, &point).unwrap();
    };
    node.daemon.end(Signal::KILL);
    mount_one();
    node.daemon.start();
    until(async || !point.exists()).await;
    assert_eq!(node.mounts(), [known]);
    mount_one();
    node.stop().await;
    assert_eq!(node.mounts(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_machine_dies_while_it_is_stopped_is_stopped_then() {
    let mut node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    // Nothing else reports that the container has ended.
    fs::write(node.control.join("lose-exits"), "").unwrap();
    let dies = async {
        node.is_stopping(&id).await;
        node.kill_process();
    };
    tokio::join!(node.stop(), dies);
    assert!(!node.log().contains("timed out killing containers"));
    let status = node.status(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (137, "Error"));
    assert_eq!(node.process_ended().signal(), Some(9));
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
async fn what_a_kubelet_asks_for_often_is_asked_of_guests_in_brief() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let mut runtime = node.runtime().await;
    let list = runtime.list_container_stats(ListContainerStatsRequest::default());
    list.await.unwrap();
    assert_eq!(node.asked(&format!("Stats {id} in brief")), 1);
    let list = runtime.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default());
    list.await.unwrap();
    assert_eq!(node.asked(&format!("Stats {id}")), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_told_of_a_pod_before_its_machine_was_asked() {
    let mut node = Node::ended(2).await;
    node.hold("List");
    // It serves after some time, and continues to wait for this pod.
    node.daemon.start();
    let containers = async {
        let mut runtime = node.runtime().await;
        let told = runtime.list_containers(ListContainersRequest::default());
        assert_eq!(told.await.unwrap().into_inner().containers, []);
    };
    let status = async {
        let mut runtime = node.runtime().await;
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: POD.to_owned(),
            verbose: true,
        };
        let status = runtime.pod_sandbox_status(request).await.unwrap();
        let info = &status.get_ref().info["info"];
        let pid = format!("\"pid\":{}", node.process.id());
        assert!(info.contains(&pid), "{info}");
    };
    let pods = async {
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxReady);
    };
    let stats = async {
        let mut runtime = node.runtime().await;
        let told = runtime.list_container_stats(ListContainerStatsRequest::default());
        assert_eq!(told.await.unwrap().into_inner().stats, []);
    };
    let mut calls: [Pin<Box<dyn Future<Output = ()>>>; 4] = [
        Box::pin(containers),
        Box::pin(status),
        Box::pin(pods),
        Box::pin(stats),
    ];
    // None of them is answered.
    let first = futures_util::future::select_all(&mut calls);
    let early = tokio::time::timeout(Duration::from_millis(500), first).await;
    assert!(early.is_err());
    node.let_go("List");
    futures_util::future::join_all(calls).await;
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
async fn a_container_has_a_log_once_it_is_to_run_and_not_before() {
    let mut node = Node::new(2).await;
    let failed = |node: &Node| node.control.join("refuse-Create");
    fs::write(failed(&node), "no such luck").unwrap();
    node.try_create("a", ContainerConfig::default())
        .await
        .unwrap_err();
    // As by a daemon that was killed while it created the container, which the next one undoes.
    fs::remove_file(failed(&node)).unwrap();
    node.hold("Create");
    {
        let create = node.try_create("b", ContainerConfig::default());
        let begins = until(async || node.asked_to("Create") == 2);
        let mut create = std::pin::pin!(create);
        tokio::select! {
            created = &mut create => panic!("{created:?}"),
            () = begins => {}
        }
    }
    node.daemon.end(Signal::KILL);
    node.let_go("Create");
    node.daemon.start();
    let id = node.create("c", None).await;
    assert!(["a", "b", "c"].iter().all(|name| !node.has_log(name)));
    node.start(&id).await.unwrap();
    assert!(node.has_log("c"));
    assert_eq!(node.asked(&format!("ReopenLog {id}")), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_changed_is_not_made() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let log = node.daemon.path("logs/a.log");
    fs::write(node.control.join("refuse-ReopenLog"), "no such luck").unwrap();
    let reopen = async || {
        let request = ReopenContainerLogRequest {
            container_id: id.clone(),
        };
        let mut runtime = node.runtime().await;
        runtime.reopen_container_log(request).await.unwrap_err();
    };
    reopen().await;
    assert!(log.exists());
    fs::rename(&log, log.with_extension("rotated")).unwrap();
    reopen().await;
    assert!(!log.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_log_cannot_be_opened_has_failed_to_start() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    fs::create_dir(node.daemon.path("logs/a.log")).unwrap();
    let failed = node.start(&id).await.unwrap_err();
    assert!(failed.message().contains("Is a directory"), "{failed}");
    let status = node.status(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (128, "StartError"));
    assert_eq!(status.message, failed.message());
    assert_eq!(node.asked(&format!("Start {id}")), 0);
    assert_eq!(node.asked(&format!("Delete {id}")), 1);
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
async fn a_pods_newest_containers_come_first_in_its_status() {
    let node = Node::new(2).await;
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        ids.push(node.create(name, None).await);
    }
    ids.reverse();
    let request = PodSandboxStatusRequest {
        pod_sandbox_id: POD.to_owned(),
        verbose: false,
    };
    let status = node.runtime().await.pod_sandbox_status(request).await;
    let shown = status.unwrap().into_inner().containers_statuses;
    let shown: Vec<String> = shown.into_iter().map(|status| status.id).collect();
    assert_eq!(shown, ids);
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

/// The mounts of a container's status, as newer clients decode them.
#[derive(Clone, PartialEq, prost::Message)]
struct MountsResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<Mounts>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Mounts {
    #[prost(message, repeated, tag = "14")]
    mounts: Vec<NewerMount>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerMount {
    #[prost(string, tag = "1")]
    container_path: String,
    #[prost(message, optional, tag = "9")]
    image: Option<NewerImage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerImage {
    #[prost(string, tag = "1")]
    image: String,
    #[prost(string, tag = "20")]
    image_ref: String,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_tells_which_image_is_mounted_also_after_a_restart() {
    const CALL: &str = "/runtime.v1.RuntimeService/ContainerStatus";
    let mut node = Node::new(2).await;
    let (name, image_ref) = node.pull().await;
    // The image of the container's root, too.
    let mount = Mount {
        container_path: "/model".to_owned(),
        image: Some(ImageSpec {
            image: name.clone(),
            ..ImageSpec::default()
        }),
        ..Mount::default()
    };
    let config = ContainerConfig {
        mounts: vec![mount],
        ..ContainerConfig::default()
    };
    let id = node.try_create("a", config).await.unwrap();
    let expected = NewerMount {
        container_path: "/model".to_owned(),
        image: Some(NewerImage {
            image: name,
            image_ref,
        }),
    };
    for restarts in 0..2 {
        if restarts > 0 {
            node.daemon.end(Signal::KILL);
            node.daemon.start();
        }
        let request = ContainerStatusRequest {
            container_id: id.clone(),
            verbose: false,
        };
        let told: MountsResponse = node.daemon.raw(CALL, request).await.unwrap();
        assert_eq!(told.status.unwrap().mounts, std::slice::from_ref(&expected));
    }
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
