//! The daemon is killed in each phase of a pod's life and restarted: afterwards it reports exact
//! states, partial work is finished or undone, and nothing is left in the end.

mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use podvisor_cri_messages::*;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::PATIENCE;
use support::cri::{Daemon, PodClient};
use support::host::is_nobody;
use support::image::Image as TestImage;
use support::pod::eventually;
use support::registry::Registry;
use tonic::{Code, Status};

/// The bridge that this test creates.
const BRIDGE: &str = "br-restart";

/// The uid of its pods.
const POD: &str = "uid-restart";

/// A node whose daemon is killed, with one pod of one image.
struct Node {
    daemon: Daemon,
    client: PodClient,
    image: String,
    /// Names must be unique while their containers exist.
    attempt: u32,
    /// Namespaces that its next pods and their containers share with the guest.
    namespaces: NamespaceOption,
    /// How long after the start of a call the daemon is killed.
    delay: Duration,
}

/// Returns a user namespace as a kubelet assigns it to a pod with `hostUsers: false`.
fn users() -> UserNamespace {
    let ids = vec![IdMapping {
        host_id: 131_072,
        container_id: 0,
        length: 65_536,
    }];
    UserNamespace {
        mode: NamespaceMode::Pod.into(),
        uids: ids.clone(),
        gids: ids,
    }
}

fn pod_config(daemon: &Daemon, attempt: u32, namespaces: NamespaceOption) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "restart".to_owned(),
            uid: POD.to_owned(),
            namespace: "default".to_owned(),
            attempt,
        }),
        hostname: "restart".to_owned(),
        log_directory: daemon.path("logs").to_str().unwrap().to_owned(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

impl Node {
    async fn restart(&mut self) {
        self.daemon.end(Signal::KILL);
        self.daemon.start();
        self.client.runtime = self.daemon.runtime().await;
    }

    /// Makes a call, kills the daemon during the call, and restarts it. The call's answer is
    /// usually lost.
    async fn killed_in<T: Send + 'static>(
        &mut self,
        call: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) {
        let call = tokio::spawn(call);
        tokio::time::sleep(self.delay).await;
        self.daemon.end(Signal::KILL);
        // It ends with the connection, unless it was answered before.
        let _ = call.await.unwrap();
        self.daemon.start();
        self.client.runtime = self.daemon.runtime().await;
    }

    fn run_request(&mut self) -> RunPodSandboxRequest {
        self.attempt += 1;
        RunPodSandboxRequest {
            config: Some(pod_config(
                &self.daemon,
                self.attempt,
                self.namespaces.clone(),
            )),
            runtime_handler: String::new(),
        }
    }

    fn create_request(&mut self, script: &str) -> CreateContainerRequest {
        self.attempt += 1;
        let data = self.daemon.path("data");
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: "main".to_owned(),
                attempt: self.attempt,
            }),
            image: Some(ImageSpec {
                image: self.image.clone(),
                ..ImageSpec::default()
            }),
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            log_path: format!("{}.log", self.attempt),
            mounts: vec![Mount {
                host_path: data.to_str().unwrap().to_owned(),
                container_path: "/data".to_owned(),
                ..Mount::default()
            }],
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: Some(self.namespaces.clone()),
                    ..LinuxContainerSecurityContext::default()
                }),
                ..LinuxContainerConfig::default()
            }),
            ..ContainerConfig::default()
        };
        self.client.create_request(config, None)
    }

    async fn create(&mut self, script: &str) -> String {
        let request = self.create_request(script);
        self.client.create(request).await
    }

    async fn ended(&mut self, id: &str) -> ContainerStatus {
        let begin = Instant::now();
        loop {
            let status = self.client.status(id).await;
            if status.state() == ContainerState::ContainerExited {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "{status:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn pods(&mut self) -> Vec<PodSandbox> {
        let request = ListPodSandboxRequest::default();
        let listed = self.client.runtime.list_pod_sandbox(request).await.unwrap();
        listed.into_inner().items
    }

    async fn containers(&mut self) -> Vec<Container> {
        let request = ListContainersRequest::default();
        let listed = self.client.runtime.list_containers(request).await.unwrap();
        listed.into_inner().containers
    }

    async fn address(&mut self) -> String {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: self.client.pod.clone(),
            verbose: false,
        };
        let answer = self
            .client
            .runtime
            .pod_sandbox_status(request)
            .await
            .unwrap();
        let status = answer.into_inner().status.unwrap();
        assert_eq!(status.state(), PodSandboxState::SandboxReady);
        status.network.unwrap().ip
    }

    async fn exec(&mut self, id: &str, script: &str) -> i32 {
        self.client.exec(id, script, 0).await.unwrap().exit_code
    }

    /// Returns the texts of the lines of a container's log.
    fn log(&self, status: &ContainerStatus) -> Vec<String> {
        let text = fs::read_to_string(&status.log_path).unwrap();
        let text = text.lines().map(|line| line.splitn(4, ' ').last().unwrap());
        text.map(str::to_owned).collect()
    }

    /// The next daemon removes the partial work of a killed one while it serves already.
    async fn becomes_clean(&self) {
        let is_left = |dir: &&str| count(&self.daemon.path(dir)) > 0;
        eventually("a clean node", || {
            !["run/netns", "run/sb", "root/cni"].iter().any(is_left) && sandboxes().is_empty()
        })
        .await;
    }
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

/// Returns processes of sandboxes; guest tests run one after the other.
fn sandboxes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let found = entries.filter_map(|entry| {
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let mut words = line.split(|byte| *byte == 0);
        let is_sandbox =
            words.next()?.ends_with(b"podvisor") && words.next() == Some(b"sandbox".as_slice());
        let pid = entry.file_name().to_str()?.parse().ok()?;
        is_sandbox.then(|| Pid::from_raw(pid)).flatten()
    });
    found.collect()
}

async fn before_there_is_a_pod(node: &mut Node) {
    let mut runtime = node.client.runtime.clone();
    let request = node.run_request();
    node.killed_in(async move { runtime.run_pod_sandbox(request).await })
        .await;
    // Complete if it was just created, otherwise as if it had never been requested.
    match node.pods().await.pop() {
        Some(pod) => {
            assert_eq!(pod.state(), PodSandboxState::SandboxReady);
            let pod_sandbox_id = pod.id;
            let request = RemovePodSandboxRequest { pod_sandbox_id };
            node.client
                .runtime
                .remove_pod_sandbox(request)
                .await
                .unwrap();
        }
        None => node.becomes_clean().await,
    }
}

async fn with_a_pod(node: &mut Node) {
    let request = node.run_request();
    let made = node.client.runtime.run_pod_sandbox(request).await.unwrap();
    node.client.pod = made.into_inner().pod_sandbox_id;
    let address = node.address().await;
    node.restart().await;
    assert_eq!(node.address().await, address);
}

async fn while_a_container_is_made(node: &mut Node) {
    let mut runtime = node.client.runtime.clone();
    let request = node.create_request("exit 0");
    let again = request.clone();
    node.killed_in(async move { runtime.create_container(request).await })
        .await;
    // Its name is free again, or it is complete.
    let id = match node.containers().await.pop() {
        Some(container) => container.id,
        None => {
            let made = node.client.runtime.create_container(again).await.unwrap();
            made.into_inner().container_id
        }
    };
    let state = node.client.status(&id).await.state();
    assert_eq!(state, ContainerState::ContainerCreated);
    node.client.start(&id).await.unwrap();
    assert_eq!(node.ended(&id).await.exit_code, 0);
    let request = RemoveContainerRequest { container_id: id };
    node.client.runtime.remove_container(request).await.unwrap();
}

async fn before_and_while_a_container_starts(node: &mut Node) {
    let id = node.create("echo started; exit 6").await;
    node.restart().await;
    let state = node.client.status(&id).await.state();
    assert_eq!(state, ContainerState::ContainerCreated);
    let mut runtime = node.client.runtime.clone();
    let container_id = id.clone();
    let request = StartContainerRequest { container_id };
    node.killed_in(async move { runtime.start_container(request).await })
        .await;
    if node.client.status(&id).await.state() == ContainerState::ContainerCreated
        && let Err(error) = node.client.start(&id).await
    {
        // The start of before was carried out meanwhile.
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    }
    let status = node.ended(&id).await;
    assert_eq!(status.exit_code, 6);
    assert!(status.started_at > 0 && status.finished_at >= status.started_at);
    assert_eq!(node.log(&status), ["started"]);
    let request = RemoveContainerRequest { container_id: id };
    node.client.runtime.remove_container(request).await.unwrap();
}

async fn while_a_container_runs_and_ends(node: &mut Node) {
    let go = node.daemon.path("data/go");
    let script = "i=0; while [ ! -e /data/go ]; do echo $i; i=$((i+1)); sleep 0.05; done; exit 9";
    let id = node.create(script).await;
    node.client.start(&id).await.unwrap();
    let mut runtime = node.client.runtime.clone();
    let request = ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["sleep".to_owned(), "1000000".to_owned()],
        timeout: 0,
    };
    node.killed_in(async move { runtime.exec_sync(request).await })
        .await;
    let state = node.client.status(&id).await.state();
    assert_eq!(state, ContainerState::ContainerRunning);
    assert_eq!(node.exec(&id, "exit 3").await, 3);

    // It ends while no daemon runs.
    node.daemon.end(Signal::KILL);
    fs::write(&go, "").unwrap();
    node.daemon.start();
    node.client.runtime = node.daemon.runtime().await;
    let status = node.ended(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (9, "Error"));
    let numbers = node.log(&status);
    let expected: Vec<String> = (0..numbers.len()).map(|n| n.to_string()).collect();
    assert_eq!(numbers, expected);
    fs::remove_file(&go).unwrap();
    node.restart().await;
    assert_eq!(node.client.status(&id).await, status);
    let mut runtime = node.client.runtime.clone();
    let request = RemoveContainerRequest { container_id: id };
    node.killed_in(async move { runtime.remove_container(request).await })
        .await;
    for container in node.containers().await {
        let container_id = container.id;
        let request = RemoveContainerRequest { container_id };
        node.client.runtime.remove_container(request).await.unwrap();
    }
}

async fn while_a_container_is_stopped(node: &mut Node) {
    let id = node.create("sleep 1000000").await;
    node.client.start(&id).await.unwrap();
    let stop = || StopContainerRequest {
        container_id: id.clone(),
        timeout: 1000,
    };
    let mut runtime = node.client.runtime.clone();
    let request = stop();
    node.killed_in(async move { runtime.stop_container(request).await })
        .await;
    let request = StopContainerRequest {
        timeout: 0,
        ..stop()
    };
    node.client.runtime.stop_container(request).await.unwrap();
    assert_eq!(node.client.status(&id).await.exit_code, 137);
}

/// The pod's own process keeps the deadline of a stop: nobody stops these a second time.
async fn while_containers_have_their_grace_period(node: &mut Node) {
    let goes_on = "while :; do sleep 0.1; done";
    let flushes = format!(
        "trap ': > /data/flushing; until [ -e /data/go ]; do sleep 0.1; done; \
         echo whole > /data/flushed; exit 4' TERM; : > /data/flushes; {goes_on}"
    );
    let flushes = node.create(&flushes).await;
    let deaf = format!("trap ': > /data/heard' TERM; : > /data/deaf; {goes_on}");
    let deaf = node.create(&deaf).await;
    let data = node.daemon.path("data");
    let there = |name: &'static str| {
        let path = data.join(name);
        async move { eventually(name, || path.exists()).await }
    };
    let mut calls = Vec::new();
    for (id, begun, asked, timeout) in [
        (&flushes, "flushes", "flushing", 300),
        (&deaf, "deaf", "heard", 5),
    ] {
        node.client.start(id).await.unwrap();
        there(begun).await;
        let mut runtime = node.client.runtime.clone();
        let container_id = id.clone();
        calls.push(tokio::spawn(async move {
            let request = StopContainerRequest {
                container_id,
                timeout,
            };
            runtime.stop_container(request).await
        }));
        there(asked).await;
    }
    node.restart().await;
    for call in calls {
        // It ends with the connection.
        let _ = call.await.unwrap();
    }
    assert_eq!(node.ended(&deaf).await.exit_code, 137);
    let state = node.client.status(&flushes).await.state();
    assert_eq!(state, ContainerState::ContainerRunning);
    fs::write(data.join("go"), "").unwrap();
    assert_eq!(node.ended(&flushes).await.exit_code, 4);
    let flushed = fs::read_to_string(data.join("flushed")).unwrap();
    assert_eq!(flushed, "whole\n");
    // The next round begins without its files.
    for name in ["flushes", "flushing", "deaf", "heard", "go", "flushed"] {
        fs::remove_file(data.join(name)).unwrap();
    }
}

async fn while_the_pod_is_stopped_and_removed(node: &mut Node) {
    let pod = node.client.pod.clone();
    let stop = StopPodSandboxRequest {
        pod_sandbox_id: pod.clone(),
    };
    let (mut runtime, request) = (node.client.runtime.clone(), stop.clone());
    node.killed_in(async move { runtime.stop_pod_sandbox(request).await })
        .await;
    node.client.runtime.stop_pod_sandbox(stop).await.unwrap();
    let state = node.pods().await[0].state();
    assert_eq!(state, PodSandboxState::SandboxNotready);
    let remove = RemovePodSandboxRequest {
        pod_sandbox_id: pod,
    };
    let (mut runtime, request) = (node.client.runtime.clone(), remove.clone());
    node.killed_in(async move { runtime.remove_pod_sandbox(request).await })
        .await;
    node.client
        .runtime
        .remove_pod_sandbox(remove)
        .await
        .unwrap();
    assert!(node.pods().await.is_empty() && node.containers().await.is_empty());
    node.becomes_clean().await;
}

async fn with_a_container_in_a_user_namespace(node: &mut Node) {
    let id = node.create("sleep 1000000").await;
    node.client.start(&id).await.unwrap();
    fs::write(node.daemon.path("data/before"), "").unwrap();
    let check = "read -r first host count < /proc/self/uid_map; [ $(id -u) = 0 ] \
                 && [ \"$first $host $count\" = '0 131072 65536' ] \
                 && [ $(busybox stat -c %u /data/before) = 0 ]";
    assert_eq!(node.exec(&id, check).await, 0);
    node.restart().await;
    let state = node.client.status(&id).await.state();
    assert_eq!(state, ContainerState::ContainerRunning);
    assert_eq!(node.exec(&id, check).await, 0);
    // Containers of the new daemon are in the same namespace.
    let other = node.create(check).await;
    node.client.start(&other).await.unwrap();
    assert_eq!(node.ended(&other).await.exit_code, 0);
    for container_id in [id, other] {
        let request = RemoveContainerRequest { container_id };
        node.client.runtime.remove_container(request).await.unwrap();
    }
}

/// The pod's own process is killed, not the daemon.
async fn a_sandbox_dies(node: &mut Node) {
    let id = node.create("sleep 1000000").await;
    node.client.start(&id).await.unwrap();
    let [sandbox] = sandboxes()[..] else {
        panic!("{:?}", sandboxes());
    };
    // Its volumes were mounted by a daemon that has not launched it.
    assert!(is_nobody(sandbox.as_raw_pid().cast_unsigned()));
    kill_process(sandbox, Signal::KILL).unwrap();
    let status = node.ended(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (255, "SandboxGone"));
    let state = node.pods().await[0].state();
    assert_eq!(state, PodSandboxState::SandboxNotready);
    let container_id = id.clone();
    let request = StartContainerRequest { container_id };
    let refused = node
        .client
        .runtime
        .start_container(request)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    node.restart().await;
    assert_eq!(node.client.status(&id).await, status);
}

/// A kubelet's pods are not made anew as the host's root where the settings require mapped users.
async fn a_pod_stays_without_what_needs_the_hosts_root(node: &mut Node) {
    node.namespaces.userns_options = None;
    let settings = node.daemon.path("config.toml");
    fs::write(&settings, "require = [\"mapped-users\"]\n").unwrap();
    node.daemon.arguments = vec!["--config".to_owned(), settings.display().to_string()];
    with_a_pod(node).await;
    let mut request = node.create_request("true");
    let config = request.config.as_mut().unwrap();
    // No mounts of it have mapped users.
    config.mounts[0].host_path = "/proc/sys/kernel".to_owned();
    let runtime = &mut node.client.runtime;
    let refused = runtime.create_container(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("mapped-users"), "{refused}");
    let id = node.create("echo kept >/data/kept").await;
    node.client.start(&id).await.unwrap();
    assert_eq!(node.ended(&id).await.exit_code, 0);
    assert_eq!(node.pods().await[0].state(), PodSandboxState::SandboxReady);
    while_the_pod_is_stopped_and_removed(node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_long_a_daemon_that_was_killed_finds_everything_as_it_was() {
    let daemon = Daemon::of_kubelet(POD);
    daemon.add_network(BRIDGE, &["10.91.4.0/24"]);
    let registry = Registry::serve(&[(
        "test/main",
        TestImage::busybox(json!({ "Env": ["PATH=/bin"] })),
    )]);
    let image = registry.name("test/main");
    let request = PullImageRequest {
        image: Some(ImageSpec {
            image: image.clone(),
            ..ImageSpec::default()
        }),
        ..PullImageRequest::default()
    };
    daemon.images().await.pull_image(request).await.unwrap();
    fs::create_dir(daemon.path("data")).unwrap();
    let mut node = Node {
        client: PodClient::new(daemon.runtime().await, String::new()),
        daemon,
        image,
        attempt: 0,
        namespaces: NamespaceOption {
            pid: NamespaceMode::Container.into(),
            ..NamespaceOption::default()
        },
        delay: Duration::ZERO,
    };
    // More of them, for a manual long run: each at a different moment of the calls.
    let rounds = std::env::var("PODVISOR_RESTART_ROUNDS").ok();
    let rounds: u64 = rounds.and_then(|text| text.parse().ok()).unwrap_or(1);
    for round in 0..rounds {
        node.delay = Duration::from_millis(40 + round * 67 % 1500);
        before_there_is_a_pod(&mut node).await;
        with_a_pod(&mut node).await;
        while_a_container_is_made(&mut node).await;
        before_and_while_a_container_starts(&mut node).await;
        while_a_container_runs_and_ends(&mut node).await;
        while_a_container_is_stopped(&mut node).await;
        while_containers_have_their_grace_period(&mut node).await;
        while_the_pod_is_stopped_and_removed(&mut node).await;
    }
    node.namespaces.userns_options = Some(users());
    with_a_pod(&mut node).await;
    with_a_container_in_a_user_namespace(&mut node).await;
    a_sandbox_dies(&mut node).await;
    while_the_pod_is_stopped_and_removed(&mut node).await;
    a_pod_stays_without_what_needs_the_hosts_root(&mut node).await;
}
