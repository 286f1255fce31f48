//! Pods that are virtual machines, over the Container Runtime Interface: a small system with
//! Debian's kernel, whose disk has a boot menu as distributions write it.

mod support;

use std::fs;
use std::io::{PipeWriter, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use podvisor_cri::sandbox::guest::{Program, ProgramExit};
use podvisor_cri::sandbox::{RefusalKind, SandboxClient, StdioFds};
use podvisor_cri_messages::*;
use rustix::process::Signal;
use support::cri::{Daemon, PodClient};
use support::host::{command, is_nobody, sandboxes};
use support::pod::{eventually, log_text};
use support::{PATIENCE, Root};
use tonic::Code;

/// The bridge that this test creates.
const BRIDGE: &str = "br-vm";

/// The uid of its pods.
const POD: &str = "uid-machine";

/// A node with an image that holds the small system's disk.
struct Node {
    daemon: Daemon,
    client: PodClient,
}

impl Node {
    /// Creates the node and a pod.
    async fn new() -> Self {
        let daemon = Daemon::of_kubelet(POD);
        fs::create_dir(daemon.path("shared-data")).unwrap();
        fs::write(daemon.path("shared-data/of-host"), "host\n").unwrap();
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
        let client = Self::pod(&daemon, 0).await;
        Self { daemon, client }
    }

    async fn pod(daemon: &Daemon, attempt: u32) -> PodClient {
        let mut runtime = daemon.runtime().await;
        let mut config = pod_config(daemon);
        config.metadata.as_mut().unwrap().attempt = attempt;
        let request = RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: "podvisor-vm".to_owned(),
        };
        let pod = runtime.run_pod_sandbox(request).await.unwrap();
        PodClient::new(runtime, pod.into_inner().pod_sandbox_id)
    }

    /// The pod is removed, and nothing of it is left.
    async fn remove_pod(&mut self) {
        let pod_sandbox_id = self.client.pod.clone();
        let request = RemovePodSandboxRequest { pod_sandbox_id };
        let runtime = &mut self.client.runtime;
        runtime.remove_pod_sandbox(request).await.unwrap();
        assert_eq!(sandboxes(), Vec::<u32>::new());
        let left = fs::read_dir(self.daemon.path("root/volumes"));
        assert_eq!(left.map_or(0, Iterator::count), 0, "disks are left");
    }

    /// A boot, a reboot while the daemon is killed, and a stop.
    async fn lives(&mut self, attempt: u32) {
        let vm = self.create(attempt).await;
        self.says(attempt, "small: ready").await;
        let typing = self.types(&vm, "sync; reboot -f\n").await;
        self.restart().await;
        self.says(attempt, "boot 2").await;
        drop(typing);
        self.has_agent(&vm).await;
        self.stop(&vm, 300).await;
        let ended = self.ended(&vm).await;
        assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));
        let log = self.log(attempt);
        // A reboot goes by the loader, as the guest may have changed its kernel.
        let by_loader = "podvisor-loader: starting the kernel";
        for part in ["boot 1", by_loader, "boot 2", "small: shutdown"] {
            assert_eq!(log.matches(part).count(), 1, "{part}: {log}");
        }
    }

    /// A machine is killed while it boots, and the process of the next one's pod.
    async fn dies(&mut self, attempt: u32) {
        let vm = self.create(attempt).await;
        self.says(attempt, "podvisor: entry").await;
        self.stop(&vm, 0).await;
        let ended = self.ended(&vm).await;
        assert_eq!((ended.exit_code, ended.reason.as_str()), (137, "Error"));

        let vm = self.create(attempt + 1).await;
        self.says(attempt + 1, "podvisor: entry").await;
        for pid in sandboxes() {
            command("kill", &["-9", &pid.to_string()]);
        }
        let ended = self.ended(&vm).await;
        assert_ne!(ended.exit_code, 0, "{ended:?}");
        assert!(!ended.reason.is_empty(), "{ended:?}");
        println!(
            "killed: {} {} {}",
            ended.exit_code, ended.reason, ended.message
        );
    }

    async fn create(&mut self, attempt: u32) -> String {
        self.create_with(container(attempt)).await
    }

    async fn create_with(&mut self, container: ContainerConfig) -> String {
        let request = self.client.create_request(container, None);
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

    /// The pod's process.
    async fn sandbox(&self) -> SandboxClient {
        let dir: String = self.client.pod.chars().take(24).collect();
        let dir = self.daemon.path("run/sb").join(dir);
        SandboxClient::connect(&dir).await.unwrap()
    }

    /// Waits until the guest's agent answers.
    async fn has_agent(&self, id: &str) {
        let sandbox = self.sandbox().await;
        let begin = Instant::now();
        while let Err(error) = sandbox.ping_guest_agent(id).await {
            assert_eq!(error.kind(), Some(RefusalKind::NoAgent), "{error}");
            assert!(begin.elapsed() < PATIENCE, "{error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What Debian's qemu-guest-agent does in the guest.
    async fn asks_the_agent(&mut self, vm: &str) {
        self.has_agent(vm).await;
        let script = "cat /etc/os-release; echo of $0 >&2; exit 3";
        let ran = self.client.exec(vm, script, 60).await.unwrap();
        let stdout = String::from_utf8(ran.stdout).unwrap();
        assert!(stdout.starts_with("ID=small\n"), "{stdout}");
        assert_eq!((ran.exit_code, ran.stderr.as_slice()), (3, &b"of sh\n"[..]));
        // One that takes too long is killed.
        let slow = self.client.exec(vm, "sleep 1000", 1).await.unwrap_err();
        assert_eq!(slow.code(), Code::DeadlineExceeded, "{slow}");
        let sandbox = self.sandbox().await;
        let cat = Program {
            path: "cat".to_owned(),
            input: b"\0\xff".to_vec(),
            ..Program::default()
        };
        let ran = sandbox.run_in_guest(vm, cat, PATIENCE).await.unwrap();
        assert_eq!(
            (ran.exit, ran.stdout.as_slice()),
            (ProgramExit::Code(0), &b"\0\xff"[..])
        );

        let info = sandbox.guest_info(vm).await.unwrap();
        assert_eq!(
            (info.host_name.as_str(), info.os.id.as_str()),
            ("machine", "small")
        );
        let addresses = info.interfaces.iter().flat_map(|card| &card.addresses);
        let mut addresses = addresses.map(|it| it.address.as_str());
        assert!(addresses.any(|it| it.starts_with("10.96.0.")), "{info:?}");
        let root = info.file_systems.iter().find(|it| it.mount_point == "/");
        assert_eq!(root.unwrap().kind, "ext4");

        // Frozen file systems thaw by themselves.
        let frozen = sandbox
            .freeze_guest(vm, Duration::from_secs(10))
            .await
            .unwrap();
        assert!(frozen > 0);
        assert!(sandbox.guest_info(vm).await.unwrap().is_frozen);
        let begin = Instant::now();
        while sandbox.guest_info(vm).await.unwrap().is_frozen {
            assert!(begin.elapsed() < PATIENCE);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(sandbox.thaw_guest(vm).await.unwrap(), 0);

        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me@here".to_owned();
        sandbox.add_guest_keys(vm, "root", vec![key]).await.unwrap();
        let ran = self
            .client
            .exec(vm, "cat /root/.ssh/authorized_keys", 60)
            .await
            .unwrap();
        assert!(ran.stdout.trim_ascii().ends_with(b"me@here"), "{ran:?}");
        sandbox.set_guest_time(vm).await.unwrap();
    }

    /// Attaches to the console, and types.
    async fn types(&self, id: &str, line: &str) -> PipeWriter {
        let sandbox = self.sandbox().await;
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

    /// How a machine was booted, as the container's and the pod's verbose status say.
    async fn boot(&mut self, id: &str) -> serde_json::Value {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: true,
        };
        let status = self.client.runtime.container_status(request).await.unwrap();
        let of_container: serde_json::Value =
            serde_json::from_str(&status.into_inner().info["info"]).unwrap();
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: self.client.pod.clone(),
            verbose: true,
        };
        let status = self
            .client
            .runtime
            .pod_sandbox_status(request)
            .await
            .unwrap();
        let of_pod: serde_json::Value =
            serde_json::from_str(&status.into_inner().info["info"]).unwrap();
        assert_eq!(of_pod["boot"], of_container["boot"]);
        of_pod["boot"].clone()
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
            uid: POD.to_owned(),
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

/// A block device over a file, which is detached in the end.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path, len: u64) -> Self {
        fs::File::create(file).unwrap().set_len(len).unwrap();
        command("modprobe", &["loop"]);
        let file = file.to_str().unwrap();
        Self(
            command("losetup", &["--find", "--show", file])
                .trim()
                .to_owned(),
        )
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        command("losetup", &["--detach", &self.0]);
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

    // Its kernel is that of its image, its system finds its name and the disk for cloud-init.
    node.says(0, "small: ready").await;
    let log = node.log(0);
    for part in [
        "podvisor: entry \"Small system\": starting the kernel that was kept of the image",
        "2 CPUs, boot 1",
        "small: seed CIDATA: meta-data network-config user-data",
        "small: hostname machine",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert!(log.lines().all(|line| line.starts_with("stdout ")), "{log}");

    // Its name is from the disk, and its address from the pod's DHCP server.
    let typing = node.types(&vm, "ip -4 addr show eth0\n").await;
    node.says(0, "inet 10.96.0.").await;
    drop(typing);
    let boot = node.boot(&vm).await;
    let known = (boot["way"].as_str(), boot["entry"].as_str());
    assert_eq!(known, (Some("keptKernel"), Some("Small system")), "{boot}");
    let phases = boot["phases"].to_string();
    for phase in ["machine", "console", "address", "prompt"] {
        assert!(phases.contains(&format!("\"{phase}\"")), "{phase}: {boot}");
    }
    node.asks_the_agent(&vm).await;
    let request = ContainerStatsRequest {
        container_id: vm.clone(),
    };
    let stats = node.client.runtime.container_stats(request).await.unwrap();
    let memory = stats.into_inner().stats.unwrap().memory.unwrap();
    assert!(memory.working_set_bytes.unwrap().value > 32 << 20);

    // Nothing of this is the daemon's: the guest reboots while there is none.
    node.daemon.end(Signal::KILL);
    let typing = "touch /etc/no-agent; sync; reboot -f\n";
    let typing = node.types(&vm, typing).await;
    node.says(0, "boot 2").await;
    drop(typing);
    node.daemon.start();
    node.client.runtime = node.daemon.runtime().await;
    let running = i32::from(ContainerState::ContainerRunning);
    assert_eq!(node.state(&vm).await, running);

    // An agent that is not there is an error that says how to get one, and the power button does.
    eventually("the second boot", || {
        node.log(0).matches("small: ready").count() == 2
    })
    .await;
    let exec = node.client.exec(&vm, "true", 10).await.unwrap_err();
    assert_eq!(exec.code(), Code::Unimplemented, "{exec}");
    assert!(exec.message().contains("qemu-guest-agent"), "{exec}");
    node.stop(&vm, 300).await;
    let ended = node.ended(&vm).await;
    assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));
    assert!(node.log(0).contains("small: power button"));

    // The pod has not ended. The next attempts have a root disk that outlives them, which is not
    // the first one's; they are stopped by their agent. A kubelet keeps each while the next one
    // runs.
    node.restart().await;
    let volume = LoopDevice::new(&node.daemon.path("volume"), 128 << 20);
    for (attempt, boot) in [(1, "boot 1"), (2, "boot 2")] {
        let mut again = container(attempt);
        again.devices.push(Device {
            container_path: "/".to_owned(),
            host_path: volume.0.clone(),
            permissions: "rwm".to_owned(),
        });
        let shared = node.daemon.path("shared-data");
        again.mounts.push(Mount {
            container_path: "/srv/data".to_owned(),
            host_path: shared.to_str().unwrap().to_owned(),
            ..Mount::default()
        });
        let again = node.create_with(again).await;
        node.says(attempt, "small: ready").await;
        let log = node.log(attempt);
        assert!(log.contains(boot), "{log}");
        node.has_agent(&again).await;
        // A directory of the node, which cloud-init mounts where there is one.
        let script = "grep -q virtiofs /run/seed/user-data && mount -t virtiofs data /mnt && \
                      cat /mnt/of-host && echo guest >/mnt/of-guest && sync";
        let ran = node.client.exec(&again, script, 60).await.unwrap();
        assert_eq!(
            (ran.exit_code, ran.stdout.as_slice()),
            (0, &b"host\n"[..]),
            "{ran:?}"
        );
        let of_guest = fs::read_to_string(shared.join("of-guest")).unwrap();
        assert_eq!(of_guest, "guest\n");
        fs::remove_file(shared.join("of-guest")).unwrap();
        assert!(is_nobody(sandboxes()[0]));
        node.stop(&again, 300).await;
        let ended = node.ended(&again).await;
        assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));
        let log = node.log(attempt);
        assert!(log.contains("small: shutdown"), "{log}");
    }
    node.dies(3).await;
    node.remove_pod().await;
    for round in 1..rounds() {
        let attempt = u32::try_from(round * 10).unwrap();
        node.client = Node::pod(&node.daemon, attempt).await;
        node.lives(attempt).await;
        node.dies(attempt + 1).await;
        node.remove_pod().await;
        println!("round {round}");
    }
    assert!(node.daemon.path("shared-data/of-host").exists());
}

/// How often machines live and die.
fn rounds() -> usize {
    let rounds = std::env::var("PODVISOR_VM_ROUNDS").ok();
    rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}
