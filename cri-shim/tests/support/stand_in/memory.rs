//! The memory of the pod's guest, and the control groups of its machine.

use std::fs;
use std::path::Path;
use std::time::Duration;

use podvisor_cri_messages::*;
use rustix::process::{Pid, Signal, kill_process};

use super::{CGROUP_ROOT, MEMORY, Node, POD, pod_config, until};

/// The kubelet's control group of the pod, and that of its machine, relative to the root.
const POD_GROUP: &str = "kube/pod";
const MACHINE_GROUP: &str = "kube/pod/machine";

impl Node {
    /// Starts a daemon that finds the pod's machine in a control group below the kubelet's, in its
    /// own mount namespace.
    pub(crate) async fn in_a_group() -> Self {
        Self::in_a_group_with(0).await
    }

    /// Like [`Self::in_a_group`], for a pod that was made with this memory limit, in bytes.
    pub(crate) async fn in_a_group_with(limit: u64) -> Self {
        let mut config = pod_config();
        let resources = (limit > 0).then(|| LinuxContainerResources {
            memory_limit_in_bytes: limit.try_into().unwrap(),
            ..LinuxContainerResources::default()
        });
        config.linux = Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("/{POD_GROUP}"),
            resources,
            ..LinuxPodSandboxConfig::default()
        });
        let mut node = Self::with(2, config, None);
        for group in [POD_GROUP, MACHINE_GROUP] {
            let group = node.groups.path().join(group);
            fs::create_dir_all(&group).unwrap();
            for name in ["memory.max", "memory.swap.max"] {
                fs::write(group.join(name), "max\n").unwrap();
            }
        }
        node.set_in_group("memory.current", MEMORY);
        let group = Path::new(CGROUP_ROOT).join(MACHINE_GROUP);
        fs::write(node.sandbox().join("cgroup"), group.to_str().unwrap()).unwrap();
        node.daemon.start();
        node
    }

    /// Sets the pod's memory limit, in bytes.
    pub(crate) async fn limit(&self, limit: u64) -> Result<(), tonic::Status> {
        let request = UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: POD.to_owned(),
            resources: Some(LinuxContainerResources {
                memory_limit_in_bytes: limit.try_into().unwrap(),
                ..LinuxContainerResources::default()
            }),
            ..UpdatePodSandboxResourcesRequest::default()
        };
        self.daemon.update_pod(request).await
    }

    /// Gives a container another limit of memory, in bytes.
    pub(crate) async fn limit_container(&self, id: &str, limit: u64) -> Result<(), tonic::Status> {
        let request = UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(LinuxContainerResources {
                memory_limit_in_bytes: limit.try_into().unwrap(),
                ..LinuxContainerResources::default()
            }),
            ..UpdateContainerResourcesRequest::default()
        };
        let mut runtime = self.runtime().await;
        runtime.update_container_resources(request).await.map(drop)
    }

    /// From now on the guest has so many bytes beyond its first memory, whatever it is asked for;
    /// none: what it is asked for.
    pub(crate) fn set_grown(&self, bytes: Option<u64>) {
        let file = self.control.join("grown");
        match bytes {
            Some(bytes) => {
                // Replaced atomically, as it may be read at any time.
                let new = self.control.join("grown.new");
                fs::write(&new, bytes.to_string()).unwrap();
                fs::rename(new, file).unwrap();
            }
            None => fs::remove_file(file).unwrap(),
        }
    }

    /// Makes the guest run short of memory, and the daemon notice it.
    pub(crate) async fn is_short(&self) {
        let file = self.control.join("short");
        fs::write(&file, "").unwrap();
        until(async || !file.exists()).await;
    }

    /// Returns how often the guest was asked to have this many bytes beyond its memory at boot.
    pub(crate) fn asked_to_grow(&self, bytes: u64) -> usize {
        let calls = fs::read_to_string(self.control.join("calls")).unwrap_or_default();
        let asked = format!("Grow {bytes} within ");
        calls
            .lines()
            .filter(|line| line.starts_with(&asked))
            .count()
    }

    /// Returns a number of the control group of the pod's machine; `None` for no limit.
    pub(crate) fn in_group(&self, name: &str) -> Option<u64> {
        let file = self.groups.path().join(MACHINE_GROUP).join(name);
        fs::read_to_string(file).unwrap().trim().parse().ok()
    }

    pub(crate) fn set_in_group(&self, name: &str, value: u64) {
        let file = self.groups.path().join(MACHINE_GROUP).join(name);
        fs::write(file, format!("{value}\n")).unwrap();
    }

    /// Gives the kubelet's control group of the pod this limit of memory, in bytes.
    pub(crate) fn set_pod_limit(&self, bytes: u64) {
        let file = self.groups.path().join(POD_GROUP).join("memory.max");
        fs::write(file, format!("{bytes}\n")).unwrap();
    }

    /// Has the control group that podvisor makes for the pod's machine have its process, which is
    /// killed as the kernel does it.
    pub(crate) fn put_in_own_group(&self) {
        let group = self.groups.path().join(POD_GROUP).join(POD);
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cgroup.events"), "populated 1\n").unwrap();
        let pid = Pid::from_child(&self.process);
        let stat = format!("/proc/{}/stat", self.process.id());
        let lives = move || fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        std::thread::spawn(move || {
            // Until the test is over, where nobody does.
            while lives() {
                if fs::read_to_string(group.join("cgroup.kill")).is_ok_and(|text| text == "1") {
                    let _ = kill_process(pid, Signal::KILL);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = fs::write(group.join("cgroup.events"), "populated 0\n");
        });
    }
}
