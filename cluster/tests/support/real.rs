//! A node as it is: `podvisor serve` and `podvisor-cluster node`, processes that can be killed. Of
//! a kubelet, the part that asks the one for what the API server has is played.
//!
//! Guests are a few instructions, so that no host with a sound KVM is needed. Each node's daemon
//! has a network namespace of its own.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use podvisor_cri_messages::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatus, ContainerStatusRequest,
    CreateContainerRequest, ImageSpec, LinuxContainerConfig, LinuxContainerSecurityContext, Mount,
    PodSandboxConfig, PodSandboxMetadata, RemovePodSandboxRequest, RunPodSandboxRequest,
    RuntimeServiceClient, StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use podvisor_node_api::NodeClient;
use podvisor_node_api::messages::{ConsoleInput, ConsoleMessage, Vm, VmName, VmPhase};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use super::server::{Server, tied};
use super::{guest, kubelet};

/// How long a process, a node or a guest may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often what has no news of its own is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// A process of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// `podvisor serve`.
    Daemon,
    /// `podvisor-cluster node`.
    Agent,
    /// The machines, which are the pods.
    Machines,
}

/// A node.
pub struct RealNode {
    /// Its name in the cluster.
    pub name: String,
    directory: TempDir,
    kubeconfig: PathBuf,
    namespace: String,
    children: Mutex<[Option<Child>; 2]>,
}

impl RealNode {
    /// Starts a node's processes, for a Node that exists. `system` is the components' namespace.
    pub fn start(server: &Server, name: &str, system: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for part in ["net.d", "logs", "run", "empty", "guest"] {
            fs::create_dir(directory.path().join(part)).expect("the directory is new");
        }
        // The guests of these tests have a kernel of their own: the daemon only looks for these.
        for file in ["vmlinux", "initramfs.cpio", "vmlinux-loader", "loader.cpio"] {
            let path = directory.path().join("guest").join(file);
            fs::write(path, "never booted").expect("the directory is ours");
        }
        let node = Self {
            name: name.to_owned(),
            kubeconfig: server.kubeconfig(name),
            namespace: system.to_owned(),
            children: Mutex::new([None, None]),
            directory,
        };
        let list = json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [{
                "type": "bridge", "bridge": "pods", "isGateway": true,
                "ipam": {
                    "type": "host-local", "ranges": [[{ "subnet": "10.96.0.0/24" }]],
                    "dataDir": node.path("ipam"), "routes": [{ "dst": "0.0.0.0/0" }],
                },
            }],
        });
        fs::write(node.path("net.d/10-pods.conflist"), list.to_string()).expect("it is ours");
        // Another daemon finds the bridge of the one that was killed.
        fs::write(node.path("netns"), "").expect("the directory is ours");
        let made = Command::new("unshare")
            .arg(format!("--net={}", node.path("netns").display()))
            .args(["ip", "link", "set", "lo", "up"])
            .status();
        assert!(
            made.expect("unshare starts").success(),
            "no network namespace: run as root"
        );
        guest::write(&node.path("tree"));
        let imported = Command::new(podvisor())
            .arg("--root")
            .arg(node.path("root"))
            .args(["import", "-q"])
            .arg(node.path("tree"))
            .arg(guest::IMAGE)
            .stdout(Stdio::null())
            .status();
        assert!(imported.expect("podvisor starts").success(), "no image");
        node.revive(Process::Daemon);
        node.revive(Process::Agent);
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Where a claim is mounted on the node.
    pub fn claim(&self, name: &str) -> PathBuf {
        self.path("claims").join(name)
    }

    fn children(&self) -> MutexGuard<'_, [Option<Child>; 2]> {
        self.children.lock().expect("no panic")
    }

    /// Starts a process that was killed.
    pub fn revive(&self, process: Process) {
        let (index, mut command, log) = match process {
            Process::Daemon => (0, self.daemon(), "daemon.log"),
            Process::Agent => (1, self.agent(), "agent.log"),
            Process::Machines => return,
        };
        let mut log = File::options()
            .append(true)
            .create(true)
            .open(self.path(log));
        let log = log.as_mut().expect("the directory is ours");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log.try_clone().expect("a file"));
        let child = command.spawn().expect("the process starts");
        self.children()[index] = Some(child);
        let began = Instant::now();
        while process == Process::Daemon && UnixStream::connect(self.path("cri.sock")).is_err() {
            assert!(began.elapsed() < PATIENCE, "no daemon:\n{}", self.logs());
            std::thread::sleep(LOOK);
        }
    }

    fn daemon(&self) -> Command {
        let mut command = tied(Path::new("nsenter"));
        command
            .arg(format!("--net={}", self.path("netns").display()))
            .arg("--")
            .arg(podvisor())
            .arg("--root")
            .arg(self.path("root"))
            .args(["serve", "--log-level", "info", "--boot", "cold"])
            .arg("--listen")
            .arg(format!("unix://{}", self.path("cri.sock").display()))
            .arg("--state")
            .arg(self.path("run"))
            .arg("--cni-conf-dir")
            .arg(self.path("net.d"))
            .arg("--node-api")
            .arg(self.socket())
            .env("PODVISOR_GUEST_DIR", self.path("guest"));
        command
    }

    fn agent(&self) -> Command {
        let mut command = tied(Path::new(env!("CARGO_BIN_EXE_podvisor-cluster")));
        command
            .args(["node", "--listen", "127.0.0.1:0", "--namespace"])
            .arg(&self.namespace)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--socket")
            .arg(self.socket())
            .env("RUST_LOG", "info");
        command
    }

    fn socket(&self) -> PathBuf {
        self.path("node.sock")
    }

    /// Kills processes, which have no time to do anything.
    pub async fn kill(&self, process: Process) {
        let index = match process {
            Process::Daemon => 0,
            Process::Agent => 1,
            Process::Machines => return self.kill_machines(),
        };
        let child = self.children()[index].take();
        if let Some(mut child) = child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The directories of the pods are named by the beginnings of their ids, which their processes
    /// have among their arguments.
    fn kill_machines(&self) {
        let pods: Vec<String> = fs::read_dir(self.path("run/sb"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        let processes = fs::read_dir("/proc").expect("a Linux").flatten();
        for entry in processes {
            let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments);
            let Some(id) = arguments.strip_prefix("podvisor\0sandbox\0") else {
                continue;
            };
            if pods.iter().any(|pod| id.starts_with(pod.as_str())) {
                let pid = entry.file_name().to_string_lossy().into_owned();
                let _ = Command::new("kill").args(["-KILL", &pid]).status();
            }
        }
    }

    /// What its processes have said last.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for log in ["daemon.log", "agent.log"] {
            let all = fs::read_to_string(self.path(log)).unwrap_or_default();
            let lines: Vec<&str> = all.lines().collect();
            let from = lines.len().saturating_sub(40);
            text += &format!(
                "--- {} of {}\n{}\n",
                log,
                self.name,
                lines[from..].join("\n")
            );
        }
        text
    }

    /// A client of its calls about VMs.
    pub fn client(&self) -> NodeClient {
        NodeClient::new(&self.socket()).expect("a path")
    }

    /// All VMs of an instance that it has, if it answers.
    pub async fn vms(&self, vm: &VmName) -> Option<Vec<Vm>> {
        let listed = timeout(PATIENCE, async { self.client().list_vms().await }).await;
        let mut vms = listed.ok()?.ok()?.vms;
        vms.retain(|found| found.vm.as_ref() == Some(vm));
        Some(vms)
    }

    /// Whether a machine of an instance runs here.
    pub async fn runs(&self, vm: &VmName) -> bool {
        let vms = self.vms(vm).await.unwrap_or_default();
        vms.iter().any(|found| found.phase() == VmPhase::Running)
    }

    /// Asks a guest for its next letter, which it gives if all of its memory is right.
    pub async fn letter(&self, vm: &VmName) -> Option<char> {
        let input = |message| ConsoleInput {
            message: Some(message),
        };
        let (typing, typed) = mpsc::channel(4);
        let ask = async {
            typing
                .send(input(ConsoleMessage::Open(vm.clone())))
                .await
                .ok()?;
            let mut console = self
                .client()
                .console(ReceiverStream::new(typed))
                .await
                .ok()?;
            let open = console.message().await.ok()??;
            assert!(open.data.is_empty(), "{open:?}");
            let ask = ConsoleMessage::Data(guest::ASK[..].into());
            typing.send(input(ask)).await.ok()?;
            let said = console.message().await.ok()??;
            said.data.first().map(|byte| char::from(*byte))
        };
        timeout(PATIENCE, ask).await.ok()?
    }

    async fn runtime(&self) -> RuntimeServiceClient<Channel> {
        let address = format!("unix:{}", self.path("cri.sock").display());
        let endpoint = Endpoint::from_shared(address).expect("a path");
        RuntimeServiceClient::new(endpoint.connect_lazy())
    }

    /// Does for a pod what its kubelet does, until it is gone.
    pub async fn keep(&self, pods: Api<Pod>, pod: Pod) {
        let name = pod.metadata.name.clone().expect("a name");
        let kept = Kept {
            node: self,
            runtime: self.runtime().await,
            config: self.config(&pod),
        };
        match kept.run(&pods, &pod).await {
            Ok(()) => {}
            Err(status) => {
                let message = status.message().to_owned();
                eprintln!("{}: pod {name}: {message}", self.name);
                let failed = json!({ "phase": "Failed", "message": message });
                kubelet::set_status(&pods, &name, failed).await;
            }
        }
        kubelet::finish(&pods, &name).await;
    }

    fn config(&self, pod: &Pod) -> PodSandboxConfig {
        let metadata = &pod.metadata;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let map = |map: &Option<std::collections::BTreeMap<String, String>>| {
            map.clone().unwrap_or_default().into_iter().collect()
        };
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: text(&metadata.name),
                uid: text(&metadata.uid),
                namespace: text(&metadata.namespace),
                attempt: 0,
            }),
            hostname: pod
                .spec
                .as_ref()
                .map_or_else(String::new, |spec| text(&spec.hostname)),
            log_directory: self
                .path("logs")
                .join(text(&metadata.uid))
                .display()
                .to_string(),
            annotations: map(&metadata.annotations),
            labels: map(&metadata.labels),
            ..PodSandboxConfig::default()
        }
    }

    fn container(&self, pod: &Pod, container: &Container) -> ContainerConfig {
        let image = |name: &str| {
            Some(ImageSpec {
                image: name.to_owned(),
                ..ImageSpec::default()
            })
        };
        let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
        let mounts = container.volume_mounts.iter().flatten().map(|mount| {
            let mut volumes = volumes.into_iter().flatten();
            let volume = volumes.find(|volume| volume.name == mount.name);
            let source = volume.and_then(|volume| volume.image.as_ref());
            let named = source.and_then(|source| source.reference.as_deref());
            let claim = volume.and_then(|volume| volume.persistent_volume_claim.as_ref());
            let host = match claim {
                Some(claim) => self.claim(&claim.claim_name),
                None => {
                    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
                    let empty = self.path("empty").join(uid);
                    empty.join("kubernetes.io~empty-dir").join(&mount.name)
                }
            };
            if named.is_none() {
                fs::create_dir_all(&host).expect("the directory is ours");
            }
            Mount {
                container_path: mount.mount_path.clone(),
                host_path: match named {
                    Some(_) => String::new(),
                    None => host.display().to_string(),
                },
                readonly: named.is_some(),
                image: named.and_then(image),
                ..Mount::default()
            }
        });
        ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: container.name.clone(),
                attempt: 0,
            }),
            image: container.image.as_deref().and_then(image),
            mounts: mounts.collect(),
            log_path: "compute.log".to_owned(),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    no_new_privs: true,
                    ..LinuxContainerSecurityContext::default()
                }),
                ..LinuxContainerConfig::default()
            }),
            ..ContainerConfig::default()
        }
    }
}

impl Drop for RealNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        self.kill_machines();
        for child in self.children().iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Files that are mounted cannot be removed with the directory.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts
            .lines()
            .rev()
            .filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(self.directory.path())) {
            let _ = Command::new("umount").args(["--lazy", point]).status();
        }
    }
}

/// The scheduler, and both nodes' kubelets, of a namespace; they end when this is dropped.
pub struct RealKubelets(tokio::task::JoinHandle<()>);

impl RealKubelets {
    /// Begins to play.
    pub fn play(client: Client, namespace: &str, nodes: Vec<Arc<RealNode>>) -> Self {
        let pods = Api::<Pod>::namespaced(client, namespace);
        let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
        Self(tokio::spawn(async move {
            let mut seen = HashSet::new();
            let mut kept = JoinSet::new();
            let stream = watcher(pods.clone(), watcher::Config::default())
                .default_backoff()
                .applied_objects();
            let mut stream = pin!(stream);
            while let Ok(Some(pod)) = stream.try_next().await {
                while kept.try_join_next().is_some() {}
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                let node = kubelet::node_of(&pod);
                let node = node.and_then(|on| nodes.iter().find(|node| node.name == on));
                if let Some(node) = node {
                    if seen.insert(uid) {
                        let (node, pods) = (Arc::clone(node), pods.clone());
                        kept.spawn(async move { node.keep(pods, pod).await });
                    }
                } else if pod.metadata.deletion_timestamp.is_none() {
                    kubelet::schedule(&pods, &pod, &names).await;
                } else {
                    kubelet::finish(&pods, pod.metadata.name.as_deref().expect("a name")).await;
                }
            }
        }))
    }
}

impl Drop for RealKubelets {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A pod of a node.
struct Kept<'a> {
    node: &'a RealNode,
    runtime: RuntimeServiceClient<Channel>,
    config: PodSandboxConfig,
}

impl Kept<'_> {
    async fn run(mut self, pods: &Api<Pod>, pod: &Pod) -> Result<(), tonic::Status> {
        let name = pod.metadata.name.as_deref().expect("a name");
        let spec = pod.spec.as_ref().expect("a specification");
        let request = RunPodSandboxRequest {
            config: Some(self.config.clone()),
            runtime_handler: spec.runtime_class_name.clone().unwrap_or_default(),
        };
        let sandbox = self.runtime.run_pod_sandbox(request).await?;
        let sandbox = sandbox.into_inner().pod_sandbox_id;
        let ran = self.container(pods, name, pod, &sandbox).await;
        let pod_sandbox_id = sandbox.clone();
        // A daemon that is just killed is asked again, as a kubelet does.
        loop {
            let pod_sandbox_id = pod_sandbox_id.clone();
            let request = StopPodSandboxRequest { pod_sandbox_id };
            if self.runtime.stop_pod_sandbox(request).await.is_ok() {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        let _ = self
            .runtime
            .remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id })
            .await;
        ran
    }

    async fn container(
        &mut self,
        pods: &Api<Pod>,
        name: &str,
        pod: &Pod,
        sandbox: &str,
    ) -> Result<(), tonic::Status> {
        let spec = pod.spec.as_ref().expect("a specification");
        let config = self.node.container(pod, &spec.containers[0]);
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(self.config.clone()),
        };
        let container_id = self.runtime.create_container(request).await?;
        let container_id = container_id.into_inner().container_id;
        let request = StartContainerRequest {
            container_id: container_id.clone(),
        };
        self.runtime.start_container(request).await?;
        kubelet::run(pods, name).await;
        let mut is_reported = false;
        loop {
            let request = ContainerStatusRequest {
                container_id: container_id.clone(),
                verbose: false,
            };
            let answer = self.runtime.container_status(request).await;
            let status = answer.ok().and_then(|answer| answer.into_inner().status);
            if let Some(status) = status.filter(|status| has_ended(status) && !is_reported) {
                kubelet::exit_because(pods, name, status.exit_code, &status.reason).await;
                is_reported = true;
            }
            let known = pods.get_opt(name).await;
            match known {
                Ok(Some(known)) if known.metadata.deletion_timestamp.is_none() => {}
                // It is not known now; the next look may say.
                Err(_) => {}
                Ok(_) => break,
            }
            tokio::time::sleep(LOOK).await;
        }
        let request = StopContainerRequest {
            container_id,
            timeout: 0,
        };
        let _ = self.runtime.stop_container(request).await;
        Ok(())
    }
}

fn has_ended(status: &ContainerStatus) -> bool {
    status.state() == ContainerState::ContainerExited
}

/// The program, which is of another package.
fn podvisor() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_podvisor-cluster")).with_file_name("podvisor");
    assert!(
        path.is_file(),
        "{} is missing: `cargo build -p podvisor-cri`",
        path.display()
    );
    path
}

/// The specification of an instance with this guest.
pub fn specification() -> Value {
    json!({
        "domain": {
            "memory": { "guest": "64Mi" },
            "firmware": { "kernelBoot": { "container": {
                "image": guest::IMAGE,
                "kernelPath": guest::KERNEL,
                "imagePullPolicy": "Never",
            } } },
            "devices": {
                "disks": [{ "name": "scratch", "disk": { "bus": "virtio" } }],
                "interfaces": [{ "name": "default", "masquerade": {} }],
            },
        },
        "networks": [{ "name": "default", "pod": {} }],
        "volumes": [{ "name": "scratch", "emptyDisk": { "capacity": "2Mi" } }],
        "terminationGracePeriodSeconds": 5,
    })
}
