//! Pods of VirtualMachineInstances, over the Container Runtime Interface: a pod as the cluster's
//! controller makes it, with the small system in its container disk. It moves to another daemon,
//! which is another node as far as both know.

#[path = "guest_vmi_pods/changes.rs"]
mod changes;
mod support;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use podvisor_cri::sandbox::{SandboxClient, StdioFds};
use podvisor_cri_messages::*;
use podvisor_node_api::NodeClient;
use podvisor_node_api::messages::{
    ConsoleInput, ConsoleMessage, Data, MigrationState, PortForwardInput, PortForwardMessage,
    PortForwardOpen, PortProtocol, ReceiveMigrationInput, ReceiveMigrationMessage,
    ReceiveMigrationOpen, SendMigrationInput, SendMigrationMessage, SendMigrationOpen, Vm,
    VmChange, VmName, VmPhase, VsockInput, VsockMessage, VsockOpen,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use support::cri::{Daemon, PodClient};
use support::host::sandboxes;
use support::pod::log_text;
use support::{PATIENCE, Root};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::iter;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// The bridges that this test creates, one per node, and the beginnings of their addresses.
const NETWORKS: [(&str, &str); 2] = [("br-vmi", "10.97.0."), ("br-vmi2", "10.98.0.")];

/// The annotation of a pod whose machine comes from another node, and what it says.
const MIGRATION: (&str, &str) = ("podvisor.io/migration", "m-1");

const UUID: &str = "5d307ca9-b3ef-428c-8861-06e72d69f223";

/// The object, as the controller writes it.
fn instance() -> String {
    let disks = json!([
        {"name": "root", "disk": {"bus": "virtio"}},
        {"name": "seed", "disk": {"bus": "virtio"}},
        {"name": "scratch", "disk": {"bus": "virtio"}, "serial": "SCRATCH-1"},
    ]);
    json!({
        "metadata": {"name": "web", "namespace": "tenant", "uid": "7c0e"},
        "spec": {
            "domain": {
                "cpu": {"cores": 1, "maxSockets": 2},
                "memory": {"guest": "224Mi", "maxGuest": "352Mi"},
                "firmware": {"uuid": UUID, "serial": "SN-1"},
                "devices": {
                    "disks": disks,
                    "interfaces": [
                        {"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:aa"},
                    ],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [
                {"name": "root", "containerDisk": {"image": "small"}},
                {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config\nx: told\n"}},
                {"name": "scratch", "emptyDisk": {"capacity": "8Mi"}},
            ],
        },
    })
    .to_string()
}

fn pod_config(daemon: &Daemon) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "virt-launcher-web".to_owned(),
            uid: "uid-web".to_owned(),
            namespace: "tenant".to_owned(),
            attempt: 0,
        }),
        hostname: "web".to_owned(),
        log_directory: daemon.path("logs").to_str().unwrap().to_owned(),
        annotations: [("podvisor.io/vmi".to_owned(), instance())].into(),
        ..PodSandboxConfig::default()
    }
}

/// What the kubelet makes of the controller's container.
fn container(daemon: &Daemon) -> ContainerConfig {
    let mount = |path: &str, host: &Path| Mount {
        container_path: path.to_owned(),
        host_path: host.display().to_string(),
        ..Mount::default()
    };
    let empty = daemon.path("pods/volumes/kubernetes.io~empty-dir/scratch");
    fs::create_dir_all(&empty).unwrap();
    let hosts = daemon.path("pods/etc-hosts");
    fs::write(&hosts, "127.0.0.1 localhost").unwrap();
    let security = LinuxContainerSecurityContext {
        run_as_user: Some(Int64Value { value: 107 }),
        no_new_privs: true,
        capabilities: Some(Capability {
            drop_capabilities: vec!["ALL".to_owned()],
            ..Capability::default()
        }),
        ..LinuxContainerSecurityContext::default()
    };
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "compute".to_owned(),
            attempt: 0,
        }),
        image: Some(ImageSpec {
            image: "small".to_owned(),
            ..ImageSpec::default()
        }),
        envs: vec![KeyValue::new("KUBERNETES_PORT", "tcp://10.96.0.1:443")],
        mounts: vec![
            mount("/etc/hosts", &hosts),
            mount("/podvisor/volumes/scratch", &empty),
        ],
        log_path: "compute/0.log".to_owned(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    }
}

struct Guest {
    daemon: Daemon,
    client: PodClient,
    id: String,
}

impl Guest {
    /// Starts the pod on a node of its own: its machine boots, or comes from elsewhere.
    async fn new((bridge, network): (&str, &str), is_incoming: bool) -> Self {
        let daemon = Daemon::new(&[], None);
        daemon.add_network(bridge, &[&format!("{network}0/24")]);
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
        let mut config = pod_config(&daemon);
        if is_incoming {
            let (annotation, migration) = MIGRATION;
            let annotations = &mut config.annotations;
            annotations.insert(annotation.to_owned(), migration.to_owned());
        }
        let request = RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: "podvisor-vm".to_owned(),
        };
        let pod = runtime.run_pod_sandbox(request).await.unwrap();
        let pod = pod.into_inner().pod_sandbox_id;
        let mut client = PodClient::new(runtime, pod);
        let id = client
            .create(client.create_request(container(&daemon), None))
            .await;
        client.start(&id).await.unwrap();
        Self { daemon, client, id }
    }

    fn log(&self) -> String {
        log_text(&self.daemon.path("logs/compute/0.log"))
    }

    async fn says(&self, text: &str) {
        let begin = Instant::now();
        while !self.log().contains(text) {
            let log = self.log();
            assert!(begin.elapsed() < PATIENCE, "{text:?} never came:\n{log}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Attaches to the console, types a line, and waits for a part of what comes.
    async fn answers(&self, line: &str, expected: &[&str]) {
        let dir: String = self.client.pod.chars().take(24).collect();
        let sandbox = SandboxClient::connect(&self.daemon.path("run/sb").join(dir)).await;
        let (stdin, mut typing) = std::io::pipe().unwrap();
        let stdio = StdioFds {
            stdin: Some(stdin.into()),
            ..StdioFds::default()
        };
        sandbox.unwrap().attach(&self.id, stdio).await.unwrap();
        typing.write_all(format!("{line}\n").as_bytes()).unwrap();
        for part in expected {
            self.says(part).await;
        }
    }
}

/// Returns how far the guest has counted.
fn counted(log: &str) -> u32 {
    let mut counts = log.lines().filter_map(|line| {
        let (_, rest) = line.split_once("count ")?;
        rest.split_once(" over")?.0.parse().ok()
    });
    counts.next_back().unwrap()
}

/// What a client types on a console.
fn typed(line: &'static str) -> ConsoleInput {
    ConsoleInput {
        message: Some(ConsoleMessage::Data(line.as_bytes().into())),
    }
}

/// Reads until what comes contains a text.
async fn reads(stream: &mut Streaming<Data>, text: &str) -> Result<(), Status> {
    let mut read = String::new();
    while !read.contains(text) {
        let message = timeout(PATIENCE, stream.message()).await;
        let data = message.expect("nothing comes")?;
        let data = data.unwrap_or_else(|| panic!("{text:?} never came: {read}"));
        read += &String::from_utf8_lossy(&data.data);
    }
    Ok(())
}

impl Guest {
    fn node(&self) -> NodeClient {
        NodeClient::new(&self.daemon.path("run/node.sock")).unwrap()
    }

    async fn vm(&self) -> Vm {
        let mut vms = self.node().list_vms().await.unwrap().vms;
        assert_eq!(vms.len(), 1);
        let vm = vms.remove(0);
        assert_eq!(vm.vm, Some(VmName::new("tenant", "web", "7c0e")));
        vm
    }

    async fn phase(&self) -> VmPhase {
        let vm = self.vm().await;
        assert!(vm.addresses[0].starts_with(NETWORKS[0].1), "{vm:?}");
        vm.phase()
    }

    /// Waits until it is in a phase, and until its migration is done if it is to be.
    async fn becomes(&self, phase: VmPhase) -> Vm {
        let wait = async {
            // A daemon that was just started serves the CRI first.
            let mut events = loop {
                match self.node().watch_vms().await {
                    Ok(events) => break events,
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            };
            loop {
                let vm = self.vm().await;
                let state = vm.migration.as_ref().map(|migration| migration.state());
                let failed = [MigrationState::Failed, MigrationState::Cancelled];
                assert!(
                    !state.is_some_and(|state| failed.contains(&state)),
                    "{vm:?}"
                );
                let is_over = state == Some(MigrationState::Done) || phase == VmPhase::Incoming;
                if vm.phase() == phase && is_over {
                    return vm;
                }
                events.message().await.unwrap();
            }
        };
        timeout(PATIENCE, wait).await.unwrap()
    }

    /// Moves to another node, as its cluster does it.
    async fn moves(self) -> Self {
        let write = "echo kept | tee /tmp/memory >/var/disk; printf 'written there' >/dev/vdc; \
                     sync; echo $((70 + 7)) noted";
        self.answers(write, &["77 noted"]).await;
        let count = "(while true; do i=$((i + 1)); echo count $i over; sleep 1; done) &";
        self.answers(count, &["count 2 over"]).await;
        let there = Self::new(NETWORKS[1], true).await;
        there.becomes(VmPhase::Incoming).await;
        let vm = || Some(VmName::new("tenant", "web", ""));
        let migration = || MIGRATION.1.to_owned();
        let (source, input) = mpsc::channel(16);
        let open = SendMigrationMessage::Open(SendMigrationOpen {
            vm: vm(),
            migration: migration(),
            downtime_ms: 2000,
            ..SendMigrationOpen::default()
        });
        let send = |message| SendMigrationInput {
            message: Some(message),
        };
        source.send(send(open)).await.unwrap();
        let source_input = ReceiverStream::new(input);
        let (target, input) = mpsc::channel(16);
        let open = ReceiveMigrationMessage::Open(ReceiveMigrationOpen {
            vm: vm(),
            migration: migration(),
        });
        let receive = |message| ReceiveMigrationInput {
            message: Some(message),
        };
        target.send(receive(open)).await.unwrap();
        let target_input = ReceiverStream::new(input);
        let came = there.node().receive_migration(target_input).await;
        let left = self.node().send_migration(source_input).await;
        let (mut came, mut left) = (came.unwrap(), left.unwrap());
        tokio::spawn(async move {
            while let Ok(Some(Data { data })) = left.message().await {
                let message = ReceiveMigrationMessage::Data(data);
                if target.send(receive(message)).await.is_err() {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            while let Ok(Some(Data { data })) = came.message().await {
                let message = SendMigrationMessage::Data(data);
                if source.send(send(message)).await.is_err() {
                    return;
                }
            }
        });
        let left = self.becomes(VmPhase::Ended).await;
        let exit = left.exit.unwrap();
        assert_eq!((exit.code, exit.reason.as_str()), (0, "Moved"));
        let migration = left.migration.unwrap();
        assert_eq!(migration.migration, MIGRATION.1);
        println!(
            "it stood still for {} ms",
            migration.downtime_ns / 1_000_000
        );
        let came = there.becomes(VmPhase::Running).await;
        assert!(came.addresses[0].starts_with(NETWORKS[1].1), "{came:?}");
        let counted = counted(&self.log());
        there.remove_pod_of(self).await;
        there.says(&format!("count {} over", counted + 3)).await;
        assert!(!there.log().contains("count 1 over"), "{}", there.log());
        there
    }

    /// Removes the pod of a node, whose daemon ends.
    async fn remove_pod_of(&self, mut other: Self) {
        let status = other.client.status(&other.id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (0, "Moved"));
        let pod_sandbox_id = other.client.pod.clone();
        let request = RemovePodSandboxRequest { pod_sandbox_id };
        other
            .client
            .runtime
            .remove_pod_sandbox(request)
            .await
            .unwrap();
    }

    /// What it knew is there, in memory and on its disks, and its network is.
    async fn is_the_same(&mut self) {
        self.daemon.end(Signal::KILL);
        self.daemon.start();
        self.client.runtime = self.daemon.runtime().await;
        self.becomes(VmPhase::Running).await;
        let look =
            "echo 3 >/proc/sys/vm/drop_caches; cat /tmp/memory /var/disk; head -c 13 /dev/vdc";
        self.answers(look, &["kept", "written there"]).await;
        self.answers(changes::GROWN, &["22 CPUs, large"]).await;
        let open = PortForwardMessage::Open(PortForwardOpen {
            vm: Some(VmName::new("tenant", "web", "")),
            port: 80,
            protocol: PortProtocol::Tcp.into(),
        });
        let get = PortForwardMessage::Data(b"GET /hostname HTTP/1.0\r\n\r\n"[..].into());
        let input = iter([open, get].map(|message| PortForwardInput {
            message: Some(message),
        }));
        let mut page = self.node().port_forward(input).await.unwrap();
        reads(&mut page, "200 OK").await.unwrap();
    }

    /// It gets the claim of another pod while it runs, by ACPI, and gives it back.
    async fn gets_a_claim(&self) {
        let directory = self.daemon.path("claims/data");
        fs::create_dir_all(&directory).unwrap();
        let mut disk = b"plugged in".to_vec();
        disk.resize(4 << 20, 0);
        fs::write(directory.join("disk.img"), disk).unwrap();
        let kept = json!({"instance": "7c0e", "volume": "data", "serial": "DATA-1"});
        let keeper = self.keeps(&directory, "data", &kept).await;
        let (mut node, vm) = (self.node(), VmName::new("tenant", "web", "7c0e"));
        node.plug_disk(vm.clone(), "uid-keeper").await.unwrap();
        let look = "until [ -b /dev/vdd ]; do sleep 0.1; done; cat /sys/block/vdd/serial; \
                    head -c 10 /dev/vdd; echo; printf written >/dev/vdd; sync; \
                    echo $((80 + 8)) plugged";
        self.answers(look, &["DATA-1", "plugged in", "88 plugged"])
            .await;
        let is_forced = node.unplug_disk(vm, "DATA-1", 60).await.unwrap();
        assert!(!is_forced, "{}", self.log());
        let look = "[ -b /dev/vdd ] || echo $((90 + 9)) unplugged";
        self.answers(look, &["99 unplugged"]).await;
        let disk = fs::read(directory.join("disk.img")).unwrap();
        assert_eq!(&disk[..10], b"written in");
        self.keeps_no_more(keeper).await;
    }

    /// Makes a pod that keeps a claim for it, which is in a directory of the host.
    async fn keeps(&self, directory: &Path, volume: &str, kept: &Value) -> String {
        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "hp-volume-web".to_owned(),
                uid: "uid-keeper".to_owned(),
                namespace: "tenant".to_owned(),
                attempt: 0,
            }),
            log_directory: self.daemon.path("logs").to_str().unwrap().to_owned(),
            annotations: [("podvisor.io/attachment".to_owned(), kept.to_string())].into(),
            ..PodSandboxConfig::default()
        };
        let mut runtime = self.daemon.runtime().await;
        let request = RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: "podvisor-vm".to_owned(),
        };
        let pod = runtime.run_pod_sandbox(request).await.unwrap().into_inner();
        let pod_sandbox_id = pod.pod_sandbox_id.clone();
        let mut client = PodClient::new(runtime, pod.pod_sandbox_id);
        let keeper = ContainerConfig {
            image: Some(ImageSpec {
                image: "podvisor.io/boot-from-volume:v1".to_owned(),
                ..ImageSpec::default()
            }),
            mounts: vec![Mount {
                container_path: format!("/podvisor/volumes/{volume}"),
                host_path: directory.display().to_string(),
                ..Mount::default()
            }],
            log_path: "keeper.log".to_owned(),
            ..container(&self.daemon)
        };
        let id = client.create(client.create_request(keeper, None)).await;
        client.start(&id).await.unwrap();
        pod_sandbox_id
    }

    /// Removes a pod that keeps a claim.
    async fn keeps_no_more(&self, pod_sandbox_id: String) {
        let mut runtime = self.daemon.runtime().await;
        let request = StopPodSandboxRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
        };
        runtime.stop_pod_sandbox(request).await.unwrap();
        let request = RemovePodSandboxRequest { pod_sandbox_id };
        runtime.remove_pod_sandbox(request).await.unwrap();
    }

    /// The calls of the node about it.
    async fn is_controlled(&mut self) {
        let mut node = self.node();
        let vm = || VmName::new("tenant", "web", "");
        assert_eq!(self.phase().await, VmPhase::Running);
        let mut events = node.watch_vms().await.unwrap();
        let all = events.message().await.unwrap().unwrap().change;
        assert!(matches!(all, Some(VmChange::All(_))), "{all:?}");
        node.pause(vm()).await.unwrap();
        let Some(VmChange::Changed(paused)) = events.message().await.unwrap().unwrap().change
        else {
            panic!("no change");
        };
        assert_eq!(paused.phase(), VmPhase::Paused);
        let again = node.pause(vm()).await.unwrap_err();
        assert_eq!(again.code(), Code::FailedPrecondition, "{again}");

        // Another daemon finds it paused.
        self.daemon.end(Signal::KILL);
        self.daemon.start();
        self.client.runtime = self.daemon.runtime().await;
        assert_eq!(self.phase().await, VmPhase::Paused);
        let mut node = self.node();
        node.unpause(vm()).await.unwrap();
        assert_eq!(self.phase().await, VmPhase::Running);

        let open = |vm| ConsoleInput {
            message: Some(ConsoleMessage::Open(vm)),
        };
        let (typing, input) = mpsc::channel(4);
        typing.send(open(vm())).await.unwrap();
        let mut console = node.console(ReceiverStream::new(input)).await.unwrap();
        typing
            .send(typed("echo $((40 + 2)) typed\n"))
            .await
            .unwrap();
        reads(&mut console, "42 typed").await.unwrap();
        let (second, input) = mpsc::channel(4);
        second.send(open(vm())).await.unwrap();
        let mut taken = node.console(ReceiverStream::new(input)).await.unwrap();
        let lost = reads(&mut console, "nothing more").await.unwrap_err();
        assert_eq!(lost.code(), Code::Aborted, "{lost}");
        second
            .send(typed("echo $((50 + 5)) typed\n"))
            .await
            .unwrap();
        reads(&mut taken, "55 typed").await.unwrap();
        drop(second);

        let connect = |port| {
            PortForwardMessage::Open(PortForwardOpen {
                vm: Some(vm()),
                port,
                protocol: PortProtocol::Tcp.into(),
            })
        };
        let get = PortForwardMessage::Data(b"GET /hostname HTTP/1.0\r\n\r\n"[..].into());
        let input = |messages: Vec<PortForwardMessage>| {
            iter(messages.into_iter().map(|message| PortForwardInput {
                message: Some(message),
            }))
        };
        let mut page = node
            .port_forward(input(vec![connect(80), get]))
            .await
            .unwrap();
        reads(&mut page, "200 OK").await.unwrap();
        let closed = node
            .port_forward(input(vec![connect(81)]))
            .await
            .unwrap_err();
        assert_eq!(closed.code(), Code::Unavailable, "{closed}");

        // Who listens there, and whether, is the guest's matter.
        let vsock = VsockInput {
            message: Some(VsockMessage::Open(VsockOpen {
                vm: Some(vm()),
                port: 4000,
            })),
        };
        let mut connection = node.vsock(iter([vsock])).await.unwrap();
        let first = connection.message().await.unwrap().unwrap();
        assert!(first.data.is_empty());

        let used = node.vm_usage().await.unwrap().vms;
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].vm, Some(VmName::new("tenant", "web", "7c0e")));
        assert!(used[0].cpu_ns > 0 && used[0].resident_bytes > 0, "{used:?}");
        assert_eq!(used[0].memory_bytes, 224 << 20);
        assert!(
            used[0].disk_read_bytes > 0 && used[0].disk_reads > 0,
            "{used:?}"
        );
        let received = used[0].cards[0].received.unwrap();
        assert!(received.bytes > 0 && received.packets > 0, "{used:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_of_an_instance_is_what_the_object_says() {
    let mut guest = Guest::new(NETWORKS[0], false).await;
    guest.says("small: ready").await;
    let log = guest.log();
    for part in ["1 CPUs, boot 1", "small: seed CIDATA: meta-data user-data"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let look = "cat /run/seed/user-data /run/seed/meta-data";
    guest.answers(look, &["x: told", "web.tenant"]).await;
    let look = "cat /sys/class/dmi/id/product_uuid /sys/class/dmi/id/product_serial";
    guest.answers(look, &[UUID, "SN-1"]).await;
    let look = "cat /sys/block/vdc/serial; echo $(cat /sys/block/vdc/size) sectors";
    guest.answers(look, &["SCRATCH-1", "16384 sectors"]).await;
    let look = "ip addr show eth0; echo $((6 * 7)) looked";
    let card = ["02:00:00:00:00:aa", "inet 10.0.2.2", "42 looked"];
    guest.answers(look, &card).await;

    let request = PodSandboxStatsRequest {
        pod_sandbox_id: guest.client.pod.clone(),
    };
    let stats = guest.client.runtime.pod_sandbox_stats(request).await;
    assert!(stats.unwrap().into_inner().stats.unwrap().linux.is_some());
    guest.is_controlled().await;
    guest.grows().await;
    guest.loses_its_link().await;
    let mut guest = guest.moves().await;
    guest.is_the_same().await;
    guest.gets_a_claim().await;
    guest.is_dumped().await;
    let request = StopContainerRequest {
        container_id: guest.id.clone(),
        timeout: 300,
    };
    guest.client.runtime.stop_container(request).await.unwrap();
    let status = guest.client.status(&guest.id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    let pod_sandbox_id = guest.client.pod.clone();
    let request = RemovePodSandboxRequest { pod_sandbox_id };
    let removed = guest.client.runtime.remove_pod_sandbox(request).await;
    removed.unwrap();
    assert_eq!(sandboxes(), Vec::<u32>::new());
}
