//! A node with containerd beside podvisor: a pod in the node's network, and one in a guest, of one
//! socket.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use podvisor_cri_messages::*;
use rustix::process::Signal;
use serde_json::json;
use support::cri::{Daemon, PodClient};
use support::image::Image as TestImage;
use support::registry::Registry;
use tempfile::TempDir;
use tonic::Code;

/// A containerd, ended when this is dropped.
struct Containerd {
    child: Child,
    socket: PathBuf,
    dir: TempDir,
}

impl Containerd {
    /// Starts it with the CNI configuration of a daemon, and waits until it listens.
    fn start(net: &Path, pause: &str) -> Self {
        let dir = tempfile::Builder::new().tempdir_in("/run").unwrap();
        let plugins = Path::new("/usr/lib/cni");
        let made = support::containerd::containerd(dir.path(), net, plugins, pause);
        let (mut command, socket) = made;
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = child.spawn().expect("containerd is installed");
        support::until("containerd's socket", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Self { child, socket, dir }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log"));
            eprintln!("{}", log.unwrap_or_default());
        }
    }
}

fn pod_config(name: &str, network: NamespaceMode, logs: &Path) -> PodSandboxConfig {
    let options = NamespaceOption {
        network: network.into(),
        pid: NamespaceMode::Container.into(),
        ..NamespaceOption::default()
    };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        log_directory: logs.to_str().unwrap().to_owned(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

/// A pod with one container that runs.
struct Running {
    client: PodClient,
    container: String,
}

impl Running {
    /// Runs a pod like a kubelet does, which pulls an image only if ImageStatus does not know it.
    async fn start(daemon: &Daemon, name: &str, network: NamespaceMode, image: &str) -> Self {
        let config = pod_config(name, network, &daemon.path("logs"));
        let mut runtime = daemon.runtime().await;
        let request = RunPodSandboxRequest {
            config: Some(config.clone()),
            ..RunPodSandboxRequest::default()
        };
        let pod = runtime.run_pod_sandbox(request).await.unwrap();
        let mut images = daemon.images().await;
        let spec = ImageSpec {
            image: image.to_owned(),
            ..ImageSpec::default()
        };
        let status = ImageStatusRequest {
            image: Some(spec.clone()),
            verbose: false,
        };
        let found = images.image_status(status).await.unwrap().into_inner();
        let id = match found.image {
            Some(found) => found.id,
            None => {
                let pull = PullImageRequest {
                    image: Some(spec),
                    sandbox_config: Some(config.clone()),
                    ..PullImageRequest::default()
                };
                images
                    .pull_image(pull)
                    .await
                    .unwrap()
                    .into_inner()
                    .image_ref
            }
        };
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: "main".to_owned(),
                attempt: 0,
            }),
            image: Some(ImageSpec {
                image: id,
                user_specified_image: image.to_owned(),
                ..ImageSpec::default()
            }),
            command: ["sh", "-c", "echo started; exec sleep 1000000"]
                .map(str::to_owned)
                .to_vec(),
            log_path: format!("{name}.log"),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: config
                        .linux
                        .as_ref()
                        .and_then(|linux| linux.security_context.as_ref())
                        .and_then(|security| security.namespace_options.clone()),
                    ..LinuxContainerSecurityContext::default()
                }),
                ..LinuxContainerConfig::default()
            }),
            ..ContainerConfig::default()
        };
        let mut client = PodClient::new(runtime, pod.into_inner().pod_sandbox_id);
        let request = client.create_request(container, Some(config));
        let container = client.create(request).await;
        client.start(&container).await.unwrap();
        Self { client, container }
    }

    /// Returns the first line of a script's output.
    async fn line(&mut self, script: &str) -> String {
        let ran = self.client.exec(&self.container, script, 0).await.unwrap();
        assert_eq!(ran.exit_code, 0, "{ran:?}");
        let stdout = String::from_utf8(ran.stdout).unwrap();
        stdout.lines().next().unwrap_or_default().to_owned()
    }

    async fn remove(mut self) {
        let pod_sandbox_id = self.client.pod.clone();
        let stop = StopPodSandboxRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
        };
        self.client.runtime.stop_pod_sandbox(stop).await.unwrap();
        let remove = RemovePodSandboxRequest { pod_sandbox_id };
        self.client
            .runtime
            .remove_pod_sandbox(remove)
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_beside_a_pod_in_the_nodes_network() {
    let config = json!({ "Env": ["PATH=/bin"], "Cmd": ["sleep", "1000000"] });
    let pause = json!({ "Env": ["PATH=/bin"], "Cmd": ["sleep", "1000001"] });
    let registry = Registry::serve(&[
        ("test/busybox", TestImage::busybox(config)),
        ("test/pause", TestImage::busybox(pause)),
    ]);
    let mut daemon = Daemon::new(&[], None);
    daemon.end(Signal::TERM);
    daemon.add_network("br-host", &["10.213.77.0/24"]);
    let containerd = Containerd::start(&daemon.path("net.d"), &registry.name("test/pause"));
    let socket = format!("unix://{}", containerd.socket.display());
    daemon.arguments = vec!["--host-runtime".to_owned(), socket];
    daemon.start();

    let image = registry.name("test/busybox");
    let mut host = Running::start(&daemon, "host", NamespaceMode::Node, &image).await;
    // ImageStatus knows the image, which is not in podvisor's store.
    let mut guest = Running::start(&daemon, "guest", NamespaceMode::Pod, &image).await;

    // The node's own network, and the node's kernel; a guest has another one.
    let nodes = fs::read_link("/proc/self/ns/net").unwrap();
    let network = "readlink /proc/self/ns/net";
    assert_eq!(host.line(network).await, nodes.to_str().unwrap());
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let kernel = "cat /proc/sys/kernel/random/boot_id";
    assert_eq!(host.line(kernel).await, boot_id.trim());
    assert_ne!(guest.line(kernel).await, boot_id.trim());

    for name in ["host", "guest"] {
        let log = daemon.path("logs").join(format!("{name}.log"));
        support::until("its first line", || {
            fs::read_to_string(&log).is_ok_and(|log| log.contains(" F started"))
        });
    }
    let mut runtime = daemon.runtime().await;
    let pods = runtime.list_pod_sandbox(ListPodSandboxRequest::default());
    assert_eq!(pods.await.unwrap().into_inner().items.len(), 2);
    let stats = runtime.list_container_stats(ListContainerStatsRequest::default());
    let stats = stats.await.unwrap().into_inner().stats;
    assert_eq!(stats.len(), 2);
    assert!(
        stats.iter().all(|stats| stats.memory.is_some()),
        "{stats:?}"
    );
    let status = runtime.status(StatusRequest::default()).await.unwrap();
    let conditions = status.into_inner().status.unwrap().conditions;
    assert!(
        conditions.iter().all(|condition| condition.status),
        "{conditions:?}"
    );

    // Each goes by itself, and the other stays.
    let of_host = host.client.pod.clone();
    host.remove().await;
    let request = PodSandboxStatusRequest {
        pod_sandbox_id: of_host,
        verbose: false,
    };
    let gone = runtime.pod_sandbox_status(request).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    assert_ne!(guest.line(kernel).await, boot_id.trim());
    guest.remove().await;
    let pods = runtime.list_pod_sandbox(ListPodSandboxRequest::default());
    assert!(pods.await.unwrap().into_inner().items.is_empty());
}
