//! A daemon that finds a pod whose machine process is a stand-in (`tests/programs/stand_in.rs`).

mod memory;

use std::ffi::CStr;
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use podvisor_cri_messages::*;
use prost::Message as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::{NamedTempFile, TempDir};
use tonic::transport::Channel;

use super::PATIENCE;
use super::cri::{Daemon, PodClient};
use super::image::Image as TestImage;
use super::registry::Registry;

pub(crate) const POD: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Number of digits of a pod's id in its directory's name.
const DIR_DIGITS: usize = 24;

/// The pod guest's bytes of memory at boot beyond the pod's limit, and the maximum that may be
/// added.
pub(crate) const MEMORY: u64 = 256 << 20;
pub(crate) const GROWTH: u64 = 16 << 30;

/// A daemon that finds a pod when it starts.
pub(crate) struct Node {
    pub(crate) daemon: Daemon,
    pub(crate) control: PathBuf,
    pub(crate) process: Child,
    image: String,
    /// The daemon's log.
    log: NamedTempFile,
    /// The file system of its database, if that is a small one.
    disk: Option<PathBuf>,
    /// Imitated files of control groups, at the place where the daemon looks for them.
    groups: TempDir,
    _registry: Registry,
    _guest: TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        // It fails if a test has ended it already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        if let Some(disk) = &self.disk {
            self.daemon.end(Signal::KILL);
            let _ = unmount(disk, UnmountFlags::DETACH);
        }
    }
}

/// The pod as it was asked for, without what depends on the node.
pub(crate) fn pod_config() -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "pod".to_owned(),
            uid: "uid".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        ..PodSandboxConfig::default()
    }
}

/// Writes a pod into the database while no daemon runs.
fn add_pod(database: &Path, config: &PodSandboxConfig) {
    let own = config.linux.as_ref();
    let own = own.and_then(|linux| linux.resources.as_ref());
    let own = own.map_or(0, |own| own.memory_limit_in_bytes);
    let memory = MEMORY + u64::try_from(own).unwrap();
    let size = json!({ "memory": memory, "growth": GROWTH, "vcpus": 1, "max_vcpus": 1 });
    let config = STANDARD.encode(config.encode_to_vec());
    let record = json!({
        "version": 1, "id": POD, "config": config, "handler": "", "created_at": 1,
        "phase": "Ready", "addresses": [], "size": size, "memory_volumes": [], "extra": 0,
    });
    let pods = redb::TableDefinition::<&str, &[u8]>::new("pods");
    let database = redb::Database::create(database).unwrap();
    let transaction = database.begin_write().unwrap();
    let bytes = record.to_string();
    let mut table = transaction.open_table(pods).unwrap();
    table.insert(POD, bytes.as_bytes()).unwrap();
    drop(table);
    transaction.commit().unwrap();
}

/// Changes the pod's record in the database of a daemon that is not there.
fn change_pod(database: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    rewrite_pod(database, |record| {
        let mut record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        change(&mut record);
        record.to_string().into_bytes()
    });
}

/// As [`change_pod`], but the bytes.
fn rewrite_pod(database: &Path, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    use redb::ReadableTable as _;
    let pods = redb::TableDefinition::<&str, &[u8]>::new("pods");
    let database = redb::Database::open(database).unwrap();
    let transaction = database.begin_write().unwrap();
    let mut table = transaction.open_table(pods).unwrap();
    let record = table.get(POD).unwrap().unwrap().value().to_vec();
    table.insert(POD, change(record).as_slice()).unwrap();
    drop(table);
    transaction.commit().unwrap();
}

/// Starts a process that listens, and acts on the files in `control`.
pub(crate) fn stand_in(socket: &Path, control: &Path, version: u32) -> Child {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(Path::parent).unwrap();
    let mut process = Command::new(target.join("examples/stand_in"))
        .args([socket, control])
        .arg(version.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example `stand_in` is built with the tests");
    let mut line = String::new();
    let mut lines = BufReader::new(process.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "listening\n");
    process
}

impl Node {
    /// Starts a daemon that finds its pod's process, which speaks this version.
    pub(crate) async fn new(version: u32) -> Self {
        let mut node = Self::ended(version).await;
        node.daemon.start();
        node
    }

    /// Like [`Self::new`], before the daemon is started.
    pub(crate) async fn ended(version: u32) -> Self {
        Self::with(version, pod_config(), None)
    }

    /// Starts a daemon with a small disk, and a pod whose record is so large that it cannot be
    /// written when the disk is full.
    pub(crate) async fn on_a_small_disk() -> Self {
        let mut config = pod_config();
        let large = "x".repeat(2 << 20);
        config.annotations.insert("large".to_owned(), large);
        let mut node = Self::with(2, config, Some(c"size=32m"));
        node.daemon.start();
        node
    }

    fn with(version: u32, mut config: PodSandboxConfig, disk: Option<&CStr>) -> Self {
        let log = NamedTempFile::new().unwrap();
        let groups = tempfile::tempdir().unwrap();
        let to_log = format!("exec \"$@\" 2>>{}", log.path().display());
        let in_groups = format!(
            "mount --bind {} {CGROUP_ROOT} && {to_log}",
            groups.path().display()
        );
        let wrapper: &[&str] = match config.linux {
            None => &["sh", "-c", &to_log, "sh"],
            Some(_) => &["unshare", "-m", "sh", "-c", &in_groups, "sh"],
        };
        let (mut daemon, guest) = Daemon::without_guests(wrapper);
        daemon.end(Signal::TERM);
        let disk = disk.map(|options| {
            let root = daemon.path("root");
            mount("tmpfs", &root, "tmpfs", MountFlags::empty(), options).unwrap();
            root
        });
        config.log_directory = daemon.path("logs").display().to_string();
        add_pod(&daemon.path("root/cri.redb"), &config);
        let control = daemon.path("control");
        fs::create_dir(&control).unwrap();
        let sandbox = daemon.path("run/sb").join(&POD[..DIR_DIGITS]);
        fs::create_dir_all(sandbox.join("shared")).unwrap();
        let process = stand_in(&sandbox.join("control.sock"), &control, version);
        let image = TestImage::busybox(json!({ "Cmd": ["true"] }));
        let registry = Registry::serve(&[("test/busybox", image)]);
        Self {
            image: registry.name("test/busybox"),
            daemon,
            control,
            process,
            log,
            disk,
            groups,
            _registry: registry,
            _guest: guest,
        }
    }

    pub(crate) async fn runtime(&self) -> RuntimeServiceClient<Channel> {
        self.daemon.runtime().await
    }

    async fn client(&self) -> PodClient {
        PodClient::new(self.runtime().await, POD)
    }

    /// Blocks a call from now on.
    pub(crate) fn hold(&self, call: &str) {
        fs::write(self.control.join(call), "").unwrap();
    }

    pub(crate) fn let_go(&self, call: &str) {
        fs::remove_file(self.control.join(call)).unwrap();
    }

    /// Returns how often the process got this call.
    pub(crate) fn asked(&self, call: &str) -> usize {
        let calls = fs::read_to_string(self.control.join("calls")).unwrap_or_default();
        calls.lines().filter(|line| *line == call).count()
    }

    /// Returns how often the process got this call for any container.
    pub(crate) fn asked_to(&self, call: &str) -> usize {
        let calls = fs::read_to_string(self.control.join("calls")).unwrap_or_default();
        let of_call = |line: &&str| line.split(' ').next() == Some(call);
        calls.lines().filter(of_call).count()
    }

    /// Returns what the process was asked to create a container from.
    pub(crate) fn created(&self, id: &str) -> serde_json::Value {
        let created = fs::read(self.control.join(format!("created-{id}"))).unwrap();
        serde_json::from_slice(&created).unwrap()
    }

    /// Creates a container without limits.
    pub(crate) async fn create(&self, name: &str, volume: Option<&Path>) -> String {
        let created = match volume {
            Some(volume) => self.create_with(name, volume).await,
            None => self.try_create(name, ContainerConfig::default()).await,
        };
        created.unwrap()
    }

    /// Creates a container with a volume.
    pub(crate) async fn create_with(
        &self,
        name: &str,
        volume: &Path,
    ) -> Result<String, tonic::Status> {
        let mount = Mount {
            container_path: "/data".to_owned(),
            host_path: volume.to_str().unwrap().to_owned(),
            ..Mount::default()
        };
        let config = ContainerConfig {
            mounts: vec![mount],
            ..ContainerConfig::default()
        };
        self.try_create(name, config).await
    }

    /// Creates a container with this memory limit in bytes.
    pub(crate) async fn create_within(&self, name: &str, limit: u64) -> String {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: limit.try_into().unwrap(),
            ..LinuxContainerResources::default()
        };
        let config = ContainerConfig {
            linux: Some(LinuxContainerConfig {
                resources: Some(resources),
                security_context: None,
            }),
            ..ContainerConfig::default()
        };
        self.try_create(name, config).await.unwrap()
    }

    /// Creates a container with the log `NAME.log`.
    pub(crate) async fn try_create(
        &self,
        name: &str,
        config: ContainerConfig,
    ) -> Result<String, tonic::Status> {
        self.pull().await;
        self.try_create_pulled(name, config).await
    }

    /// Like [`Self::try_create`], with an image that was pulled before.
    pub(crate) async fn try_create_pulled(
        &self,
        name: &str,
        config: ContainerConfig,
    ) -> Result<String, tonic::Status> {
        let request = self.create_request(name, config).await;
        let created = self.runtime().await.create_container(request).await;
        created.map(|created| created.into_inner().container_id)
    }

    /// Returns the request for a container of the node's image, with the log `NAME.log`.
    pub(crate) async fn create_request(
        &self,
        name: &str,
        config: ContainerConfig,
    ) -> CreateContainerRequest {
        let image = Some(ImageSpec {
            image: self.image.clone(),
            ..ImageSpec::default()
        });
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: name.to_owned(),
                attempt: 0,
            }),
            image,
            log_path: format!("{name}.log"),
            ..config
        };
        let client = self.client().await;
        client.create_request(config, Some(pod_config()))
    }

    /// Pulls the image of all containers; returns its name, and its reference.
    pub(crate) async fn pull(&self) -> (String, String) {
        let image = ImageSpec {
            image: self.image.clone(),
            ..ImageSpec::default()
        };
        let pull = PullImageRequest {
            image: Some(image),
            ..PullImageRequest::default()
        };
        let mut images = self.daemon.images().await;
        let pulled = images.pull_image(pull).await.unwrap();
        (self.image.clone(), pulled.into_inner().image_ref)
    }

    /// Returns whether a container's log exists.
    pub(crate) fn has_log(&self, name: &str) -> bool {
        self.daemon
            .path("logs")
            .join(format!("{name}.log"))
            .exists()
    }

    pub(crate) async fn start(&self, id: &str) -> Result<(), tonic::Status> {
        self.client().await.start(id).await
    }

    pub(crate) async fn status(&self, id: &str) -> ContainerStatus {
        self.client().await.status(id).await
    }

    /// Runs a command in a container, with a timeout in seconds.
    pub(crate) async fn exec(
        &self,
        id: &str,
        seconds: i64,
    ) -> Result<ExecSyncResponse, tonic::Status> {
        self.client().await.exec(id, "sleep 1000", seconds).await
    }

    /// Waits until the pod is being stopped, by the signal to this container, which runs.
    pub(crate) async fn is_stopping(&self, container: &str) {
        until(async || self.asked(&format!("Signal {container}")) == 1).await;
    }

    pub(crate) async fn stop(&self) {
        let request = StopPodSandboxRequest {
            pod_sandbox_id: POD.to_owned(),
        };
        self.runtime()
            .await
            .stop_pod_sandbox(request)
            .await
            .unwrap();
    }

    pub(crate) async fn remove_container(&self, id: &str) {
        let request = RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        let removed = self.runtime().await.remove_container(request).await;
        removed.unwrap();
    }

    /// Returns the states of all containers.
    pub(crate) async fn listed(&self) -> Vec<ContainerState> {
        let request = ListContainersRequest::default();
        let listed = self.runtime().await.list_containers(request).await;
        let listed = listed.unwrap().into_inner().containers;
        listed.iter().map(Container::state).collect()
    }

    pub(crate) async fn remove(&self) -> Result<(), tonic::Status> {
        let request = RemovePodSandboxRequest {
            pod_sandbox_id: POD.to_owned(),
        };
        let removed = self.runtime().await.remove_pod_sandbox(request).await;
        removed.map(|_| ())
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap()
    }

    pub(crate) fn kill_process(&self) {
        kill_process(Pid::from_child(&self.process), Signal::KILL).unwrap();
    }

    /// Kills the daemon and the pod's process as if the process had ended, and the daemon had
    /// recorded that for the pod, but not for its containers.
    pub(crate) fn kill_while_the_end_is_noted(&mut self, reason: &str) {
        self.daemon.end(Signal::KILL);
        self.kill_process();
        change_pod(&self.daemon.path("root/cri.redb"), |record| {
            record["phase"] = json!({ "Stopped": { "reason": reason } });
        });
    }

    /// Cuts the record of the pod off, for a daemon that begins after this.
    pub(crate) fn damage_record(&self) {
        rewrite_pod(&self.daemon.path("root/cri.redb"), |mut record| {
            record.truncate(record.len() / 2);
            record
        });
    }

    /// Gives the pod a state of another version, for a daemon that begins after this.
    pub(crate) fn replace_record(&self) {
        change_pod(&self.daemon.path("root/cri.redb"), |record| {
            record["phase"] = json!("Hibernated");
        });
    }

    /// Returns the directory of the pod's process.
    pub(crate) fn sandbox(&self) -> PathBuf {
        self.daemon.path("run/sb").join(&POD[..DIR_DIGITS])
    }

    /// Fills a small disk.
    pub(crate) fn fill(&self) {
        let full = fs::write(self.filler(), vec![0; 64 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    pub(crate) fn filler(&self) -> PathBuf {
        self.disk.as_ref().unwrap().join("filler")
    }

    pub(crate) async fn pod_state(&self) -> PodSandboxState {
        let request = ListPodSandboxRequest::default();
        let listed = self.runtime().await.list_pod_sandbox(request).await;
        listed.unwrap().into_inner().items[0].state()
    }

    /// Returns the mounts of the pod's directory that the daemon sees.
    pub(crate) fn mounts(&self) -> Vec<String> {
        let shared = self.sandbox();
        let table = format!("/proc/{}/mountinfo", self.daemon.pid());
        let table = fs::read_to_string(table).unwrap();
        let points = table.lines().filter_map(|line| line.split(' ').nth(4));
        let below = points.filter(|point| Path::new(point).starts_with(&shared));
        below.map(str::to_owned).collect()
    }

    pub(crate) fn process_ended(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

pub(crate) async fn until(condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("it did not come to that");
}
