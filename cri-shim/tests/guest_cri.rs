//! The life of a pod: a daemon, CNI's bridge, two containers of two images, one guest.

mod support;

use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use serde_json::json;
use support::PATIENCE;
use support::cri::{Daemon, PodClient};
use support::host::sandboxes;
use support::image::Image as TestImage;
use support::pod::eventually;
use support::registry::Registry;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

/// The bridge that this test creates.
const BRIDGE: &str = "br-story";

/// The pod's control group, as created by the kubelet.
const GROUP: &str = "/sys/fs/cgroup/story/pod-uid";

/// A server that answers each connection with one line.
const WEB: &str = "cat /config/greeting; echo complaint >&2; \
                   while true; do echo hello from web | busybox nc -l -p 8080; done";

/// A program that ends: it may write to one path and not to another.
const JOB: &str = "echo made by $FROM > /data/out; echo x > /config/greeting || echo refused; \
                   printf 'no newline'; exit 3";

fn pod_config(daemon: &Daemon) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "story".to_owned(),
            uid: "uid-story".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: "story".to_owned(),
        log_directory: daemon.path("logs").to_str().unwrap().to_owned(),
        dns_config: Some(DnsConfig {
            servers: vec!["10.96.0.10".to_owned()],
            ..DnsConfig::default()
        }),
        labels: [("app".to_owned(), "story".to_owned())].into(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: "/story/pod-uid".to_owned(),
            resources: Some(LinuxContainerResources {
                cpu_shares: 512,
                ..LinuxContainerResources::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

fn container(name: &str, image: &str, script: &str, mounts: Vec<Mount>) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: name.to_owned(),
            attempt: 0,
        }),
        image: Some(ImageSpec {
            image: image.to_owned(),
            ..ImageSpec::default()
        }),
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: format!("{name}/0.log"),
        mounts,
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                run_as_user: Some(Int64Value { value: 0 }),
                namespace_options: Some(NamespaceOption {
                    pid: NamespaceMode::Container.into(),
                    ..NamespaceOption::default()
                }),
                seccomp: Some(SecurityProfile::default()),
                ..LinuxContainerSecurityContext::default()
            }),
            resources: Some(LinuxContainerResources {
                memory_limit_in_bytes: 64 << 20,
                oom_score_adj: 700,
                ..LinuxContainerResources::default()
            }),
        }),
        ..ContainerConfig::default()
    }
}

fn mount(host: &Path, container: &str, readonly: bool) -> Mount {
    Mount {
        host_path: host.to_str().unwrap().to_owned(),
        container_path: container.to_owned(),
        readonly,
        ..Mount::default()
    }
}

/// Creates the pod's control group as the kubelet does: with controllers, here without limits.
fn make_group() {
    let group = Path::new(GROUP);
    fs::create_dir_all(group.parent().unwrap()).unwrap();
    for above in ["/sys/fs/cgroup", "/sys/fs/cgroup/story"] {
        let children = Path::new(above).join("cgroup.subtree_control");
        fs::write(children, "+cpu +memory +pids").unwrap();
    }
    fs::create_dir_all(group).unwrap();
}

/// Creates a volume as the kubelet does for configMaps: a link to a link that it swaps.
fn config_map(dir: &Path, version: &str, greeting: &str) {
    fs::create_dir_all(dir.join(version)).unwrap();
    fs::write(dir.join(version).join("greeting"), greeting).unwrap();
    symlink(version, dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    if !dir.join("greeting").exists() {
        symlink("..data/greeting", dir.join("greeting")).unwrap();
    }
}

struct Memory {
    guest_kib: u64,
    /// In bytes.
    host_limit: u64,
}

struct Story {
    daemon: Daemon,
    client: PodClient,
}

impl Story {
    async fn create(&mut self, config: ContainerConfig) -> String {
        let sandbox_config = Some(pod_config(&self.daemon));
        let request = self.client.create_request(config, sandbox_config);
        self.client.create(request).await
    }

    async fn stdout(&mut self, id: &str, script: &str) -> String {
        let ran = self.client.exec(id, script, 0).await.unwrap();
        assert_eq!(ran.exit_code, 0, "{ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    }

    /// Changes the pod's limits, in MiB and thousandths of a CPU.
    async fn limit(&mut self, mib: i64, milli_cpus: i64) {
        let request = UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: self.client.pod.clone(),
            resources: Some(LinuxContainerResources {
                memory_limit_in_bytes: mib << 20,
                cpu_quota: milli_cpus * 100,
                cpu_period: 100_000,
                ..LinuxContainerResources::default()
            }),
            ..UpdatePodSandboxResourcesRequest::default()
        };
        self.daemon.update_pod(request).await.unwrap();
    }

    /// Waits until the guest's memory in KiB fulfils a condition of `test`.
    async fn until_memory(&mut self, id: &str, condition: &str) {
        let total = "$(awk '/MemTotal/ { print $2 }' /proc/meminfo)";
        let script = format!("until [ {total} {condition} ]; do sleep 0.1; done");
        let waited = self.client.exec(id, &script, 300).await.unwrap();
        assert_eq!(waited.exit_code, 0, "{waited:?}");
    }

    /// Returns the CPUs that a container sees, and the CPU limit of the guest's process on the
    /// host.
    async fn cpus(&mut self, id: &str) -> (String, String) {
        let found = self.stdout(id, "nproc").await;
        let group = Path::new(GROUP).join(&self.client.pod);
        let limit = fs::read_to_string(group.join("cpu.max")).unwrap();
        (found.trim().to_owned(), limit.trim().to_owned())
    }

    /// Returns the OOM scores of the processes in the guest's group, and its share of CPU time.
    fn importance(&self) -> (Vec<String>, String) {
        let group = Path::new(GROUP).join(&self.client.pod);
        let read = |path: PathBuf| fs::read_to_string(path).unwrap().trim().to_owned();
        let processes = read(group.join("machine/cgroup.procs"));
        let values = processes.lines().filter_map(|process| {
            let process = Path::new("/proc").join(process);
            // KVM's own thread is a kernel thread, which is never killed.
            let is_program = !read(process.join("cmdline")).is_empty();
            is_program.then(|| read(process.join("oom_score_adj")))
        });
        (values.collect(), read(group.join("cpu.weight")))
    }

    /// Returns the guest's memory, and the limit of its process on the host.
    async fn memory(&mut self, id: &str) -> Memory {
        let guest = self
            .stdout(id, "awk '/MemTotal/ { print $2 }' /proc/meminfo")
            .await;
        let group = Path::new(GROUP).join(&self.client.pod);
        let limit = fs::read_to_string(group.join("memory.max")).unwrap();
        Memory {
            guest_kib: guest.trim().parse().unwrap(),
            host_limit: limit.trim().parse().unwrap(),
        }
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.daemon.path(&format!("logs/{name}/0.log"))).unwrap()
    }
}

/// Waits for the end of a container.
async fn stopped(events: &mut Streaming<ContainerEventResponse>, id: &str) {
    loop {
        let event = events
            .message()
            .await
            .unwrap()
            .expect("the stream of events ended");
        let kind = ContainerEventType::ContainerStoppedEvent;
        if event.container_id == id && event.container_event_type == i32::from(kind) {
            return;
        }
    }
}

/// Returns the entries of a log without timestamps.
fn entries(log: &str) -> Vec<String> {
    let entry = |line: &str| {
        let (time, rest) = line.split_once(' ').unwrap();
        assert!(time.contains('T') && time.len() >= 20, "{line}");
        rest.to_owned()
    };
    let mut entries: Vec<String> = log.lines().map(entry).collect();
    entries.sort();
    entries
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

fn interfaces(prefix: &str) -> usize {
    let entries = fs::read_dir("/sys/class/net").unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(prefix)).count()
}

/// Returns the log of the only sandbox's process.
fn sandbox_log(daemon: &Daemon) -> String {
    let mut sandboxes = fs::read_dir(daemon.path("run/sb")).unwrap().flatten();
    let dir = sandboxes.next().unwrap().path();
    fs::read_to_string(dir.join("sandbox.log")).unwrap()
}

/// Runs and removes a pod, and waits for its template.
async fn first_pod(daemon: &Daemon, runtime: &mut RuntimeServiceClient<Channel>) {
    let request = RunPodSandboxRequest {
        config: Some(pod_config(daemon)),
        runtime_handler: "podvisor".to_owned(),
    };
    let pod_sandbox_id = runtime.run_pod_sandbox(request).await.unwrap();
    let pod_sandbox_id = pod_sandbox_id.into_inner().pod_sandbox_id;
    assert!(sandbox_log(daemon).contains("is_clone=false"));
    let request = RemovePodSandboxRequest { pod_sandbox_id };
    runtime.remove_pod_sandbox(request).await.unwrap();
    let is_template = |entry: fs::DirEntry| {
        let path = entry.path();
        path.join("state").exists() && path.extension().is_none()
    };
    let templates = daemon.path("root/templates");
    let made = || fs::read_dir(&templates).is_ok_and(|all| all.flatten().any(is_template));
    eventually("a template", made).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_lives_the_story_of_a_pod() {
    let daemon = Daemon::new(&[], None);
    daemon.add_network(BRIDGE, &["10.91.0.0/24"]);
    let veths = interfaces("veth");

    let registry = Registry::serve(&[
        ("test/web", TestImage::busybox(json!({"Env": ["FROM=web"]}))),
        ("test/job", TestImage::busybox(json!({"Env": ["FROM=job"]}))),
    ]);
    let images = ["test/web", "test/job"].map(|repository| registry.name(repository));
    for image in &images {
        let request = PullImageRequest {
            image: Some(ImageSpec {
                image: image.clone(),
                ..ImageSpec::default()
            }),
            ..PullImageRequest::default()
        };
        daemon.images().await.pull_image(request).await.unwrap();
    }

    // The node's first pod boots; in parallel, a template is created, of which all others are
    // clones.
    let mut runtime = daemon.runtime().await;
    make_group();
    first_pod(&daemon, &mut runtime).await;

    // The sandbox, requested twice at the same time, as by a kubelet that lost an answer.
    let events = runtime.get_container_events(GetEventsRequest {}).await;
    let mut events = events.unwrap().into_inner();
    let request = || RunPodSandboxRequest {
        config: Some(pod_config(&daemon)),
        runtime_handler: "podvisor".to_owned(),
    };
    let mut other = runtime.clone();
    let (one, two) = tokio::join!(
        runtime.run_pod_sandbox(request()),
        other.run_pod_sandbox(request())
    );
    let pod = one.unwrap().into_inner().pod_sandbox_id;
    assert_eq!(two.unwrap().into_inner().pod_sandbox_id, pod);
    let taken = runtime.run_pod_sandbox(request()).await.unwrap_err();
    assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");

    let request = PodSandboxStatusRequest {
        pod_sandbox_id: pod.clone(),
        verbose: true,
    };
    let status = runtime
        .pod_sandbox_status(request)
        .await
        .unwrap()
        .into_inner();
    let status = status.status.unwrap();
    assert_eq!(status.state, i32::from(PodSandboxState::SandboxReady));
    let address = status.network.unwrap().ip;
    assert_eq!(address, "10.91.0.3");
    let log = sandbox_log(&daemon);
    let ready = log.lines().find(|line| line.contains("is_clone=true"));
    assert!(
        ready.is_some_and(|line| line.contains("call{number=")),
        "{log}"
    );
    let mut story = Story {
        daemon,
        client: PodClient::new(runtime, pod),
    };
    assert_eq!(sandboxes().len(), 1);

    // Two containers, a configMap that neither may write and an emptyDir for both.
    let config = story.daemon.path("config");
    config_map(&config, "..1", "good morning\n");
    let data = story.daemon.path("data");
    fs::create_dir(&data).unwrap();
    let mounts = || {
        vec![
            mount(&config, "/config", true),
            mount(&data, "/data", false),
        ]
    };
    let web = story
        .create(container("web", &images[0], WEB, mounts()))
        .await;
    let job = story
        .create(container("job", &images[1], JOB, mounts()))
        .await;
    assert_eq!(
        story.client.status(&web).await.state,
        i32::from(ContainerState::ContainerCreated)
    );
    story.client.start(&web).await.unwrap();
    story.client.start(&job).await.unwrap();
    stopped(&mut events, &job).await;

    // The job's end, its output and the file that it wrote.
    let ended = story.client.status(&job).await;
    assert_eq!(ended.state, i32::from(ContainerState::ContainerExited));
    assert_eq!((ended.exit_code, ended.reason.as_str()), (3, "Error"));
    assert!(ended.finished_at >= ended.started_at && ended.started_at > 0);
    let log = story.log("job");
    let said = entries(&log);
    assert!(said.contains(&"stdout F refused".to_owned()), "{log}");
    assert!(
        said.iter()
            .any(|entry| entry.starts_with("stdout P no newline")),
        "{log}"
    );
    assert_eq!(
        fs::read_to_string(data.join("out")).unwrap(),
        "made by job\n"
    );
    assert_eq!(
        fs::read_to_string(config.join("greeting")).unwrap(),
        "good morning\n"
    );

    // Another program in the running container.
    assert_eq!(
        story.stdout(&web, "cat /data/out; hostname").await,
        "made by job\nstory\n"
    );
    let ran = story
        .client
        .exec(&web, "echo out; echo err >&2; exit 5", 300)
        .await
        .unwrap();
    assert_eq!((ran.exit_code, ran.stdout.as_slice()), (5, &b"out\n"[..]));
    assert_eq!(ran.stderr, b"err\n");
    let late = story.client.exec(&web, "sleep 1000", 1).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    let gone = story.client.exec(&job, "true", 0).await.unwrap_err();
    assert_eq!(gone.code(), Code::FailedPrecondition, "{gone}");
    assert_eq!(
        story.stdout(&web, "cat /etc/resolv.conf").await,
        "nameserver 10.96.0.10\n"
    );
    assert_eq!(
        entries(&story.log("web")),
        ["stderr F complaint", "stdout F good morning"]
    );

    // The pod's address, from this machine.
    let mut ping = Command::new("busybox");
    ping.args(["ping", "-c", "1", "-W", "300", &address]);
    let ping = ping.output().unwrap();
    assert!(ping.status.success(), "{ping:?}");
    let mut answer = String::new();
    // It may just be about to listen again.
    let answered = || {
        let connected = TcpStream::connect((address.as_str(), 8080));
        connected.is_ok_and(|mut stream| stream.read_to_string(&mut answer).is_ok())
    };
    eventually("the web server's answer", answered).await;
    assert_eq!(answer, "hello from web\n");

    // The kubelet swaps the configMap.
    config_map(&config, "..2", "good evening\n");
    assert_eq!(
        story.stdout(&web, "cat /config/greeting").await,
        "good evening\n"
    );

    // The kubelet rotates the log.
    let log = story.daemon.path("logs/web/0.log");
    fs::rename(&log, story.daemon.path("logs/web/0.log.old")).unwrap();
    let request = ReopenContainerLogRequest {
        container_id: web.clone(),
    };
    story
        .client
        .runtime
        .reopen_container_log(request)
        .await
        .unwrap();
    story.stdout(&web, "echo rotated > /proc/1/fd/1").await;
    let stats = story.client.runtime.container_stats(ContainerStatsRequest {
        container_id: web.clone(),
    });
    let stats = stats.await.unwrap().into_inner().stats.unwrap();
    assert!(stats.memory.unwrap().usage_bytes.unwrap().value > 0);
    assert!(stats.cpu.unwrap().usage_core_nano_seconds.unwrap().value > 0);

    // The daemon is killed: the pod keeps running, and its containers' exits are recorded.
    drop(events);
    story.daemon.end(Signal::KILL);
    story.daemon.start();
    story.client.runtime = story.daemon.runtime().await;
    let events = story
        .client
        .runtime
        .get_container_events(GetEventsRequest {})
        .await;
    let mut events = events.unwrap().into_inner();
    assert_eq!(story.client.status(&job).await.exit_code, 3);
    assert_eq!(story.stdout(&web, "cat /data/out").await, "made by job\n");

    // One container is left, with half a CPU.
    let (values, weight) = story.importance();
    assert!(
        !values.is_empty() && values.iter().all(|value| value == "700"),
        "{values:?}"
    );
    assert_eq!(weight, "20");

    // The kubelet raises the pod's limits, and lowers them again. There was memory for both
    // containers at first, of which one has ended.
    let before = story.memory(&web).await;
    let cpus = |found: &str, limit: &str| (found.to_owned(), limit.to_owned());
    assert_eq!(story.cpus(&web).await, cpus("1", "150000 100000"));
    story.limit(512, 2500).await;
    assert_eq!(story.cpus(&web).await, cpus("3", "350000 100000"));
    // The last of it is plugged in and about to be onlined.
    let grown = before.guest_kib + (384 << 10);
    story.until_memory(&web, &format!("-eq {grown}")).await;
    let limit = story.memory(&web).await.host_limit;
    assert_eq!(limit, before.host_limit + (384 << 20));
    story.limit(64, 0).await;
    assert_eq!(story.cpus(&web).await, cpus("1", "150000 100000"));
    let shrunk = before.guest_kib + (64 << 10);
    story.until_memory(&web, &format!("-lt {shrunk}")).await;
    // The limit on the host follows at the latest when the kubelet asks again.
    let follows = async {
        while story.memory(&web).await.host_limit >= before.host_limit + (64 << 20) {
            story.limit(64, 0).await;
        }
    };
    tokio::time::timeout(PATIENCE, follows).await.unwrap();

    // Its end: a shell that is PID 1 ignores SIGTERM.
    let request = StopContainerRequest {
        container_id: web.clone(),
        timeout: 1,
    };
    story.client.runtime.stop_container(request).await.unwrap();
    stopped(&mut events, &web).await;
    assert_eq!(story.client.status(&web).await.exit_code, 137);
    assert_eq!(entries(&story.log("web")), ["stdout F rotated"]);
    let request = RemoveContainerRequest { container_id: job };
    story
        .client
        .runtime
        .remove_container(request)
        .await
        .unwrap();
    for _ in 0..2 {
        let request = StopPodSandboxRequest {
            pod_sandbox_id: story.client.pod.clone(),
        };
        story
            .client
            .runtime
            .stop_pod_sandbox(request)
            .await
            .unwrap();
    }
    let filter = PodSandboxFilter {
        id: story.client.pod.clone(),
        ..PodSandboxFilter::default()
    };
    let request = ListPodSandboxRequest {
        filter: Some(filter),
    };
    let pods = story
        .client
        .runtime
        .list_pod_sandbox(request)
        .await
        .unwrap()
        .into_inner()
        .items;
    assert_eq!(pods[0].state, i32::from(PodSandboxState::SandboxNotready));
    for _ in 0..2 {
        let request = RemovePodSandboxRequest {
            pod_sandbox_id: story.client.pod.clone(),
        };
        story
            .client
            .runtime
            .remove_pod_sandbox(request)
            .await
            .unwrap();
    }

    // Nothing is left.
    assert!(sandboxes().is_empty());
    fs::remove_dir(GROUP).unwrap();
    for dir in ["run/netns", "run/sb", "root/cni"] {
        assert_eq!(count(&story.daemon.path(dir)), 0, "{dir}");
    }
    assert_eq!(interfaces("veth"), veths);
    let run = story.daemon.path("run").to_str().unwrap().to_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let left: Vec<&str> = mounts.lines().filter(|line| line.contains(&run)).collect();
    // The directory of sandboxes itself stays mounted until the next boot.
    assert!(
        left.iter().all(|line| line.contains(&format!("{run}/sb "))),
        "{left:?}"
    );
    let containers = story
        .client
        .runtime
        .list_containers(ListContainersRequest::default())
        .await;
    assert!(containers.unwrap().into_inner().containers.is_empty());
    fs::remove_file(&log).unwrap();
}
