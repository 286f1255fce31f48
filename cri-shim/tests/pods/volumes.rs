//! Volumes that hang, or stay mounted.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::time::Duration;

use podvisor_cri_messages::*;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use rustix::process::Signal;
use tonic::Code;

use super::support::stand_in::{Node, until};

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
