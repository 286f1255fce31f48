//! A daemon of podvisor with its own directories, and a client of its socket.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use podvisor_cri_messages::{
    ContainerConfig, ContainerStatus, ContainerStatusRequest, CreateContainerRequest,
    ExecSyncRequest, ExecSyncResponse, ImageServiceClient, PodSandboxConfig, RuntimeServiceClient,
    StartContainerRequest, UpdatePodSandboxResourcesRequest,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use super::PATIENCE;

/// A daemon, ended when this is dropped, followed by the removal of its directories.
pub(crate) struct Daemon {
    child: Option<Child>,
    dir: TempDir,
    wrapper: Vec<String>,
    guest_dir: Option<PathBuf>,
    /// Additional arguments, and environment variables.
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(&'static str, PathBuf)>,
}

impl Daemon {
    /// Creates a node with empty directories. `wrapper` is a command that runs the daemon, such as
    /// `unshare -n`; `guest_dir` has kernel and initramfs, otherwise they are podvisor's own.
    pub(crate) fn new(wrapper: &[&str], guest_dir: Option<PathBuf>) -> Self {
        Self::new_in(tempfile::tempdir().unwrap(), wrapper, guest_dir)
    }

    /// Creates a node that maps users of volumes for pods of this uid, which are a kubelet's.
    pub(crate) fn of_kubelet(uid: &str) -> Self {
        fs::create_dir_all(Path::new("/var/lib/kubelet/pods").join(uid)).unwrap();
        // Unlike the directory of temporary files, it maps users in the test host, too.
        let dir = tempfile::tempdir_in("/run").unwrap();
        Self::new_in(dir, &[], None)
    }

    fn new_in(dir: TempDir, wrapper: &[&str], guest_dir: Option<PathBuf>) -> Self {
        for name in ["net.d", "logs", "run"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let mut daemon = Self {
            child: None,
            dir,
            wrapper: wrapper.iter().map(|word| (*word).to_owned()).collect(),
            guest_dir,
            arguments: Vec::new(),
            environment: Vec::new(),
        };
        daemon.start();
        daemon
    }

    /// Creates a node with invalid guest files.
    pub(crate) fn without_guests(wrapper: &[&str]) -> (Self, TempDir) {
        let guest = tempfile::tempdir().unwrap();
        fs::write(guest.path().join("vmlinux"), "no kernel").unwrap();
        fs::write(guest.path().join("initramfs.cpio"), "no initramfs").unwrap();
        let daemon = Self::new(wrapper, Some(guest.path().to_owned()));
        (daemon, guest)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command line of a daemon on this node.
    pub(crate) fn command(&self) -> Command {
        let podvisor = env!("CARGO_BIN_EXE_podvisor").to_owned();
        let mut words = self.wrapper.iter().cloned().chain([podvisor]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg("serve");
        command
            .args(["--log-level", "info", "--listen"])
            .arg(format!("unix://{}", self.path("s").display()))
            .arg("--root")
            .arg(self.path("root"))
            .arg("--state")
            .arg(self.path("run"))
            .arg("--cni-conf-dir")
            .arg(self.path("net.d"))
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env("PODVISOR_BOOT_TIMEOUT", "900")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(dir) = &self.guest_dir {
            command.env("PODVISOR_GUEST_DIR", dir);
        }
        command
    }

    pub(crate) fn start(&mut self) {
        let mut command = self.command();
        self.child = Some(command.spawn().unwrap());
        let begin = Instant::now();
        while std::os::unix::net::UnixStream::connect(self.path("s")).is_err() {
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended: {ended:?}");
            assert!(begin.elapsed() < PATIENCE, "the daemon does not answer");
            std::thread::yield_now();
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Sends a signal and waits for the daemon's end.
    pub(crate) fn end(&mut self, signal: Signal) {
        if let Some(mut child) = self.child.take() {
            // It fails if a test has ended it already.
            let _ = kill_process(Pid::from_child(&child), signal);
            child.wait().unwrap();
        }
    }

    /// Adds a CNI list of Debian's bridge with `subnets`.
    pub(crate) fn add_network(&self, bridge: &str, subnets: &[&str]) {
        let ranges: Vec<_> = subnets
            .iter()
            .map(|s| serde_json::json!([{"subnet": s}]))
            .collect();
        let list = serde_json::json!({
            "cniVersion": "1.0.0",
            "name": bridge,
            "plugins": [
                {
                    "type": "bridge", "bridge": bridge, "isGateway": true,
                    "ipam": {
                        "type": "host-local", "ranges": ranges,
                        "dataDir": self.path("ipam"),
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        });
        fs::write(self.path("net.d/10-test.conflist"), list.to_string()).unwrap();
    }

    /// Adds a daemon's record of a pod's network that a plugin has created, which is a shell script
    /// in the directory `plugin`; for a daemon that is started after this.
    pub(crate) fn add_made_network(&mut self, pod: &str, script: &str) {
        let dir = self.path("plugin");
        fs::create_dir(&dir).unwrap();
        let program = format!("#!/bin/sh\ncd {} || exit 1\n{script}\n", dir.display());
        fs::write(dir.join("script"), program).unwrap();
        fs::set_permissions(dir.join("script"), fs::Permissions::from_mode(0o755)).unwrap();
        self.arguments = vec!["--cni-bin-dir".to_owned(), dir.display().to_string()];
        let plugin = serde_json::json!({ "kind": "script", "config": { "type": "script" } });
        let record = serde_json::json!({
            "version": 1,
            "pod": { "id": pod, "name": "pod", "namespace": "default", "uid": "uid" },
            "list": { "name": "test", "version": "1.0.0", "disable_check": false,
                "plugins": [plugin] },
            "netns": self.path("run/netns").join(pod),
            "capabilities": {},
            "result": { "cniVersion": "1.0.0" },
        });
        let file = self.path("root/cni").join(format!("{pod}.json"));
        fs::write(file, record.to_string()).unwrap();
    }

    async fn channel(&self) -> Channel {
        let address = format!("unix://{}", self.path("s").display());
        Endpoint::from_shared(address)
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    pub(crate) async fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel().await)
    }

    /// UpdatePodSandboxResources.
    pub(crate) async fn update_pod(
        &self,
        request: UpdatePodSandboxResourcesRequest,
    ) -> Result<(), tonic::Status> {
        let mut runtime = self.runtime().await;
        runtime
            .update_pod_sandbox_resources(request)
            .await
            .map(drop)
    }

    /// Calls a method with custom message types.
    pub(crate) async fn raw<Q, A>(&self, call: &'static str, request: Q) -> Result<A, tonic::Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut client = tonic::client::Grpc::new(self.channel().await);
        client.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::default();
        let request = tonic::Request::new(request);
        let answer = client.unary(request, call.parse().unwrap(), codec).await?;
        Ok(answer.into_inner())
    }

    pub(crate) async fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel().await)
    }
}

/// A client of a pod's containers.
pub(crate) struct PodClient {
    pub(crate) runtime: RuntimeServiceClient<Channel>,
    pub(crate) pod: String,
}

impl PodClient {
    pub(crate) fn new(runtime: RuntimeServiceClient<Channel>, pod: impl Into<String>) -> Self {
        let pod = pod.into();
        Self { runtime, pod }
    }

    pub(crate) fn create_request(
        &self,
        config: ContainerConfig,
        sandbox_config: Option<PodSandboxConfig>,
    ) -> CreateContainerRequest {
        CreateContainerRequest {
            pod_sandbox_id: self.pod.clone(),
            config: Some(config),
            sandbox_config,
        }
    }

    /// Creates a container; returns its id.
    pub(crate) async fn create(&mut self, request: CreateContainerRequest) -> String {
        let made = self.runtime.create_container(request).await.unwrap();
        made.into_inner().container_id
    }

    pub(crate) async fn start(&mut self, id: &str) -> Result<(), tonic::Status> {
        let container_id = id.to_owned();
        let request = StartContainerRequest { container_id };
        self.runtime.start_container(request).await.map(drop)
    }

    pub(crate) async fn status(&mut self, id: &str) -> ContainerStatus {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: false,
        };
        let answer = self.runtime.container_status(request).await.unwrap();
        answer.into_inner().status.unwrap()
    }

    /// Runs a script with a timeout in seconds; 0 for none.
    pub(crate) async fn exec(
        &mut self,
        id: &str,
        script: &str,
        timeout: i64,
    ) -> Result<ExecSyncResponse, tonic::Status> {
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: ["sh", "-c", script].map(str::to_owned).to_vec(),
            timeout,
        };
        Ok(self.runtime.exec_sync(request).await?.into_inner())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end(Signal::KILL);
        // Files that the daemon keeps mounted must not be removed with the directory.
        let run = self.path("run");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for point in mounts
            .lines()
            .rev()
            .filter_map(|line| line.split(' ').nth(4))
        {
            if std::path::Path::new(point).starts_with(&run) {
                let _ = Command::new("umount").args(["--lazy", point]).status();
            }
        }
    }
}
