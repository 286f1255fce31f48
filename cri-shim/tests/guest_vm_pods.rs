//! Pods that are virtual machines, over the Container Runtime Interface: a small system with
//! Debian's kernel, whose disk has a boot menu as distributions write it.

mod support;

use std::fs;
use std::io::{PipeWriter, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use podvisor_cri::sandbox::{SandboxClient, StdioFds};
use podvisor_cri_messages::*;
use rustix::process::Signal;
use support::cri::{Daemon, PodClient};
use support::host::sandboxes;
use support::pod::log_text;
use support::{PATIENCE, Root};
use tonic::Code;

/// The bridge that this test creates.
const BRIDGE: &str = "br-vm";

/// A node with an image that holds the small system's disk.
struct Node {
    daemon: Daemon,
    client: PodClient,
}

impl Node {
    /// Creates the node and a pod.
    async fn new() -> Self {
        let daemon = Daemon::new(&[], None);
        daemon.add_network(BRIDGE, &["10.96.0.0/24"]);
        // A containerDisk: one file in the directory /disk.
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/small/small.raw");
        let tree = daemon.path("tree");
        fs::create_dir_all(tree.join("disk")).unwrap();
        fs::copy(&small, tree.join("disk/small.raw"))
            .unwrap_or_else(|error| panic!("{}: {error}: `cargo xtask small`", small.display()));
        let root = daemon.path("root").display().to_string();
        let tree = tree.display().to_string();
        let imported = Root::default().output(&["--root", &root, "import", "-q", &tree, "small"]);
        assert_eq!(imported.code, Some(0), "{imported:?}");
        let mut runtime = daemon.runtime().await;
        let request = RunPodSandboxRequest {
            config: Some(pod_config(&daemon)),
            runtime_handler: "podvisor-vm".to_owned(),
        };
        let pod = runtime.run_pod_sandbox(request).await.unwrap();
        let pod = pod.into_inner().pod_sandbox_id;
        let client = PodClient::new(runtime, pod);
        Self { daemon, client }
    }

    async fn create(&mut self, attempt: u32) -> String {
        let request = self.client.create_request(container(attempt), None);
        let id = self.client.create(request).await;
        self.client.start(&id).await.unwrap();
        id
    }

    fn log(&self, attempt: u32) -> String {
        log_text(&self.daemon.path(&format!("logs/vm/{attempt}.log")))
    }

    async fn says(&self, attempt: u32, text: &str) {
        let begin = Instant::now();
        while !self.log(attempt).contains(text) {
            let log = self.log(attempt);
            assert!(begin.elapsed() < PATIENCE, "{text:?} never came:\n{log}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Attaches to the console, and types.
    async fn types(&self, id: &str, line: &str) -> PipeWriter {
        let dir: String = self.client.pod.chars().take(24).collect();
        let dir = self.daemon.path("run/sb").join(dir);
        let sandbox = SandboxClient::connect(&dir).await.unwrap();
        let (stdin, mut typing) = std::io::pipe().unwrap();
        let stdio = StdioFds {
            stdin: Some(stdin.into()),
            ..StdioFds::default()
        };
        sandbox.attach(id, stdio).await.unwrap();
        typing.write_all(line.as_bytes()).unwrap();
        typing
    }

    async fn ended(&mut self, id: &str) -> ContainerStatus {
        loop {
            let status = self.client.status(id).await;
            if status.state == i32::from(ContainerState::ContainerExited) {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn stop(&mut self, id: &str, timeout: i64) {
        let request = StopContainerRequest {
            container_id: id.to_owned(),
            timeout,
        };
        self.client.runtime.stop_container(request).await.unwrap();
    }

    async fn state(&mut self, id: &str) -> i32 {
        self.client.status(id).await.state
    }

    /// The daemon is killed, and another one takes over.
    async fn restart(&mut self) {
        self.daemon.end(Signal::KILL);
        self.daemon.start();
        self.client.runtime = self.daemon.runtime().await;
    }
}

fn pod_config(daemon: &Daemon) -> PodSandboxConfig {
    let annotations = [
        ("VirtletVCPUCount", "2"),
        ("VirtletRootVolumeSize", "100Mi"),
        ("VirtletCloudInitUserData", "package_update: false"),
    ];
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "machine".to_owned(),
            uid: "uid-machine".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: "machine".to_owned(),
        log_directory: daemon.path("logs").to_str().unwrap().to_owned(),
        annotations: annotations
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        linux: Some(LinuxPodSandboxConfig {
            resources: Some(LinuxContainerResources {
                memory_limit_in_bytes: 256 << 20,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..PodSandboxConfig::default()
    }
}

fn container(attempt: u32) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "vm".to_owned(),
            attempt,
        }),
        image: Some(ImageSpec {
            image: "small".to_owned(),
            ..ImageSpec::default()
        }),
        log_path: format!("vm/{attempt}.log"),
        stdin: true,
        tty: true,
        ..ContainerConfig::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_with_its_own_system_lives_the_life_of_a_pod() {
    let mut node = Node::new().await;
    let vm = node.create(0).await;
    let second = node.client.create_request(container(1), None);
    let second = node.client.runtime.create_container(second).await;
    let second = second.unwrap_err();
    assert_eq!(second.code(), Code::InvalidArgument, "{second}");
    assert!(second.message().contains("only container"), "{second}");

    // The loader finds its kernel, its system finds its name and the disk for cloud-init.
    node.says(0, "small: ready").await;
    let log = node.log(0);
    for part in [
        "podvisor-loader: entry",
        "2 CPUs, boot 1",
        "small: seed CIDATA: meta-data network-config user-data",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert!(log.lines().all(|line| line.starts_with("stdout ")), "{log}");

    // Its address is from the pod's DHCP server; cloud-init would take its name from the disk.
    let look = "ip -4 addr show eth0; cat /run/seed/meta-data\n";
    let typing = node.types(&vm, look).await;
    node.says(0, "inet 10.96.0.").await;
    node.says(0, "machine.default").await;
    drop(typing);
    let exec = node.client.exec(&vm, "true", 10).await.unwrap_err();
    assert_eq!(exec.code(), Code::Unimplemented, "{exec}");
    assert!(
        exec.message().contains("without podvisor's agent"),
        "{exec}"
    );
    let request = ContainerStatsRequest {
        container_id: vm.clone(),
    };
    let stats = node.client.runtime.container_stats(request).await.unwrap();
    let memory = stats.into_inner().stats.unwrap().memory.unwrap();
    assert!(memory.working_set_bytes.unwrap().value > 32 << 20);

    // Nothing of this is the daemon's: the guest is reached while there is none.
    node.daemon.end(Signal::KILL);
    let typing = node.types(&vm, "echo $((40 + 2)) typed\n").await;
    node.says(0, "42 typed").await;
    drop(typing);
    node.daemon.start();
    node.client.runtime = node.daemon.runtime().await;
    let running = i32::from(ContainerState::ContainerRunning);
    assert_eq!(node.state(&vm).await, running);

    // Powered off, the container has ended, and its pod has not.
    let _typing = node.types(&vm, "poweroff -f\n").await;
    let ended = node.ended(&vm).await;
    assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));

    // The next attempt has a disk of its own.
    node.restart().await;
    let again = node.create(1).await;
    node.says(1, "small: ready").await;
    assert!(node.log(1).contains("boot 1"));
    node.stop(&again, 300).await;
    let ended = node.ended(&again).await;
    assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));
    assert!(node.log(1).contains("small: power button"));
    let pod_sandbox_id = node.client.pod.clone();
    let request = RemovePodSandboxRequest { pod_sandbox_id };
    node.client
        .runtime
        .remove_pod_sandbox(request)
        .await
        .unwrap();
    assert_eq!(sandboxes(), Vec::<u32>::new());
    let left = fs::read_dir(node.daemon.path("root/volumes"));
    assert_eq!(left.map_or(0, Iterator::count), 0, "disks are left");
}
