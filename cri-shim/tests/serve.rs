//! `podvisor serve` over its socket, as far as that needs no guest.

mod support;

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use serde_json::json;
use support::OVERLAY_ON_RUN;
use support::cri::Daemon;
use support::image::Image as TestImage;
use support::pod::eventually;
use support::registry::Registry;
use tonic::Code;
use tonic::transport::Channel;

fn pod(name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        ..PodSandboxConfig::default()
    }
}

fn run(config: PodSandboxConfig) -> RunPodSandboxRequest {
    RunPodSandboxRequest {
        config: Some(config),
        runtime_handler: String::new(),
    }
}

fn spec(image: &str) -> Option<ImageSpec> {
    Some(ImageSpec {
        image: image.to_owned(),
        ..ImageSpec::default()
    })
}

fn namespaces(options: NamespaceOption) -> PodSandboxConfig {
    PodSandboxConfig {
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..pod("refused")
    }
}

#[tokio::test]
async fn it_tells_who_it_is_and_what_it_waits_for() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let mut runtime = daemon.runtime().await;
    let version = runtime
        .version(VersionRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(version.runtime_name, "podvisor");
    assert_eq!(version.runtime_api_version, "v1");

    let status = runtime
        .status(StatusRequest { verbose: true })
        .await
        .unwrap()
        .into_inner();
    let conditions = status.status.unwrap().conditions;
    let network = conditions
        .iter()
        .find(|c| c.r#type == "NetworkReady")
        .unwrap();
    assert!(!network.status);
    assert_eq!(network.reason, "NetworkPluginNotReady");
    assert!(
        network.message.contains("no CNI configuration"),
        "{}",
        network.message
    );
    assert!(status.info["config"].contains("cniConfigDir"));
    let handlers: Vec<&str> = status
        .runtime_handlers
        .iter()
        .map(|h| h.name.as_str())
        .collect();
    assert_eq!(handlers, ["", "podvisor"]);

    daemon.add_network("br-serve0", &["10.90.1.0/24"]);
    let status = runtime
        .status(StatusRequest::default())
        .await
        .unwrap()
        .into_inner();
    let conditions = status.status.unwrap().conditions;
    let network = conditions
        .iter()
        .find(|c| c.r#type == "NetworkReady")
        .unwrap();
    assert!(network.status, "{}", network.message);

    let config = runtime
        .runtime_config(RuntimeConfigRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(config.linux.is_some());
    let update = UpdateRuntimeConfigRequest {
        runtime_config: None,
    };
    runtime.update_runtime_config(update).await.unwrap();
}

/// This needs root.
#[tokio::test]
async fn a_node_that_maps_no_users_says_where_in_its_status() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "cd '{}' && {OVERLAY_ON_RUN} && exec \"$@\"",
        dir.path().display()
    );
    let (daemon, _guest) =
        Daemon::without_guests(&["unshare", "--mount", "sh", "-c", &script, "sh"]);
    let mut runtime = daemon.runtime().await;
    let status = runtime.status(StatusRequest { verbose: true }).await;
    let status = status.unwrap().into_inner();
    let jail: serde_json::Value = serde_json::from_str(&status.info["jail"]).unwrap();
    let told = jail["noMappedUsers"].as_str().unwrap();
    assert!(
        told.starts_with("no mounts with mapped users of /"),
        "{told}"
    );
    assert_eq!(jail["podsMissingLayers"], json!({}));
}

fn http_get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test]
async fn a_settings_file_adds_handlers_and_health_and_metrics_are_served() {
    let (mut daemon, guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    // Outside of the range of ephemeral ports, which other tests use.
    let ports = 20_000..30_000;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let first = u16::try_from(std::process::id() % 10_000).unwrap();
    let port = ports.cycle().skip(first.into()).find(is_free).unwrap();
    let file = daemon.path("config.toml");
    let text = format!("metrics = \"127.0.0.1:{port}\"\n[handlers.large]\ncpus = 4\n");
    fs::write(&file, text).unwrap();
    let systemd = UnixDatagram::bind(daemon.path("notify")).unwrap();
    daemon.arguments = vec!["--config".to_owned(), file.display().to_string()];
    daemon.environment = vec![("NOTIFY_SOCKET", daemon.path("notify"))];
    daemon.start();
    let mut told = [0; 64];
    let count = systemd.recv(&mut told).unwrap();
    assert_eq!(&told[..count], b"READY=1");

    let mut runtime = daemon.runtime().await;
    let status = runtime.status(StatusRequest::default()).await.unwrap();
    let handlers = status.into_inner().runtime_handlers.into_iter();
    let handlers: Vec<String> = handlers.map(|handler| handler.name).collect();
    assert_eq!(handlers, ["", "podvisor", "large"]);
    let mut unknown = run(pod("other"));
    unknown.runtime_handler = "small".to_owned();
    let refused = runtime.run_pod_sandbox(unknown).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("podvisor, large"), "{refused}");

    let metrics = http_get(port, "/metrics");
    for line in [
        "podvisor_network_ready 0\n",
        "podvisor_call_duration_seconds_count{method=\"Status\",code=\"0\"} 1\n",
        "podvisor_call_duration_seconds_count{method=\"RunPodSandbox\",code=\"3\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    assert!(http_get(port, "/other").starts_with("HTTP/1.1 404"));
    fs::remove_file(guest.path().join("vmlinux")).unwrap();
    let health = http_get(port, "/healthz");
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    assert!(health.contains("vmlinux is missing"), "{health}");
    daemon.end(Signal::TERM);
    let count = systemd.recv(&mut told).unwrap();
    assert_eq!(&told[..count], b"STOPPING=1");
}

#[tokio::test]
async fn a_handler_without_its_kernel_is_left_out_and_the_others_are_ready() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    let (file, kernel) = (daemon.path("config.toml"), daemon.path("vmlinux-other"));
    let text = format!(
        "[handlers.other]\nkernel = {:?}\n",
        kernel.display().to_string()
    );
    fs::write(&file, text).unwrap();
    daemon.arguments = vec!["--config".to_owned(), file.display().to_string()];
    daemon.start();
    let mut runtime = daemon.runtime().await;
    let mut status = async || {
        let status = runtime.status(StatusRequest::default()).await.unwrap();
        let status = status.into_inner();
        let mut conditions = status.status.unwrap().conditions.into_iter();
        let ready = conditions.find(|c| c.r#type == "RuntimeReady");
        let handlers = status.runtime_handlers.into_iter().map(|h| h.name);
        (ready.unwrap().message, handlers.collect::<Vec<_>>())
    };
    // On a machine without KVM, it reports that.
    let (fault, handlers) = status().await;
    assert!(!fault.contains("vmlinux-other"), "{fault}");
    assert_eq!(handlers, ["", "podvisor"]);
    let mut request = run(pod("other"));
    request.runtime_handler = "other".to_owned();
    let mut other = daemon.runtime().await;
    let refused = other.run_pod_sandbox(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for part in ["\"other\"", kernel.to_str().unwrap(), "is missing"] {
        assert!(refused.message().contains(part), "{refused}");
    }
    fs::write(&kernel, "a kernel").unwrap();
    assert_eq!(status().await.1, ["", "podvisor", "other"]);
}

#[tokio::test]
async fn it_may_open_as_many_files_as_the_node_allows() {
    let (daemon, _guest) = Daemon::without_guests(&["prlimit", "--nofile=512:2048"]);
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let words: Vec<_> = files.unwrap().split_whitespace().collect();
    assert_eq!(words[3..5], ["2048", "2048"]);
}

#[tokio::test]
async fn what_is_gone_can_be_stopped_and_removed_and_nothing_else() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let mut runtime = daemon.runtime().await;
    let id = || "0123456789abcdef".to_owned();
    let stop = StopPodSandboxRequest {
        pod_sandbox_id: id(),
    };
    runtime.stop_pod_sandbox(stop).await.unwrap();
    let remove = RemovePodSandboxRequest {
        pod_sandbox_id: id(),
    };
    runtime.remove_pod_sandbox(remove).await.unwrap();
    let stop = StopContainerRequest {
        container_id: id(),
        timeout: 1,
    };
    runtime.stop_container(stop).await.unwrap();
    runtime
        .remove_container(RemoveContainerRequest { container_id: id() })
        .await
        .unwrap();

    let request = PodSandboxStatusRequest {
        pod_sandbox_id: id(),
        verbose: false,
    };
    let status = runtime.pod_sandbox_status(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let request = StartContainerRequest { container_id: id() };
    assert_eq!(
        runtime.start_container(request).await.unwrap_err().code(),
        Code::NotFound
    );
    let request = ExecSyncRequest {
        container_id: id(),
        cmd: vec!["x".into()],
        timeout: 0,
    };
    assert_eq!(
        runtime.exec_sync(request).await.unwrap_err().code(),
        Code::NotFound
    );
    let request = ContainerStatusRequest {
        container_id: String::new(),
        verbose: false,
    };
    let status = runtime.container_status(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let request = CreateContainerRequest {
        pod_sandbox_id: id(),
        ..CreateContainerRequest::default()
    };
    assert_eq!(
        runtime.create_container(request).await.unwrap_err().code(),
        Code::NotFound
    );

    let pods = runtime
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await
        .unwrap();
    assert!(pods.into_inner().items.is_empty());
    let containers = runtime
        .list_containers(ListContainersRequest::default())
        .await
        .unwrap();
    assert!(containers.into_inner().containers.is_empty());
}

#[tokio::test]
async fn pods_that_no_virtual_machine_can_be_are_refused_by_the_fields_name() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let mut runtime = daemon.runtime().await;
    let node = i32::from(NamespaceMode::Node);
    let host_network = NamespaceOption {
        network: node,
        ..NamespaceOption::default()
    };
    let host_ipc = NamespaceOption {
        ipc: node,
        ..NamespaceOption::default()
    };
    let mut nameless = pod("x");
    nameless.metadata = None;
    let mut hostname = pod("x");
    hostname.hostname = "not a name".to_owned();
    for (config, word) in [
        (namespaces(host_network), "hostNetwork"),
        (namespaces(host_ipc), "hostIPC"),
        (nameless, "metadata"),
        (hostname, "hostname"),
    ] {
        let status = runtime.run_pod_sandbox(run(config)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(word), "{status}");
    }
    let mut request = run(pod("x"));
    request.runtime_handler = "runc".to_owned();
    let status = runtime.run_pod_sandbox(request).await.unwrap_err();
    assert!(status.message().contains("runtime_handler"), "{status}");
    let status = runtime.run_pod_sandbox(run(pod("x"))).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(
        status.message().contains("no CNI configuration"),
        "{status}"
    );
}

#[tokio::test]
async fn what_is_not_there_yet_says_so_by_name() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let mut runtime = daemon.runtime().await;
    let status = runtime
        .checkpoint_container(CheckpointContainerRequest::default())
        .await;
    let status = status.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(status.message().contains("CheckpointContainer"), "{status}");
    for (call, expected) in [
        (
            "/runtime.v1.RuntimeService/CheckpointPod",
            "unknown method CheckpointPod for service runtime.v1.RuntimeService",
        ),
        (
            "/runtime.v1.ImageService/StreamImages",
            "unknown method StreamImages for service runtime.v1.ImageService",
        ),
        (
            "/runtime.v1alpha2.RuntimeService/Version",
            "unknown service runtime.v1alpha2.RuntimeService",
        ),
    ] {
        let refused = daemon.raw::<(), ()>(call, ()).await.unwrap_err();
        let found = (refused.code(), refused.message());
        assert_eq!(found, (Code::Unimplemented, expected));
    }
    let update = UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: "nobody".to_owned(),
        ..UpdatePodSandboxResourcesRequest::default()
    };
    let status = daemon.update_pod(update).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    assert!(status.message().contains("nobody"), "{status}");
}

/// Returns the number of network namespaces of the daemon.
fn links(daemon: &Daemon) -> usize {
    fs::read_dir(daemon.path("run/netns")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn a_pod_whose_guest_does_not_boot_leaves_nothing_behind() {
    // In its own network namespace, so that the bridge is not created on this machine.
    let (mut daemon, _guest) = Daemon::without_guests(&["unshare", "-n"]);
    daemon.add_network("br-serve1", &["10.90.2.0/24"]);
    let mut runtime = daemon.runtime().await;
    for _ in 0..2 {
        let status = runtime
            .run_pod_sandbox(run(pod("broken")))
            .await
            .unwrap_err();
        assert_ne!(status.code(), Code::AlreadyExists, "{status}");
    }
    let pods = runtime
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await
        .unwrap();
    assert!(pods.into_inner().items.is_empty());
    let is_clean = |daemon: &Daemon| {
        assert_eq!(links(daemon), 0);
        assert_eq!(fs::read_dir(daemon.path("run/sb")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(daemon.path("root/cni")).unwrap().count(), 0);
        for lease in fs::read_dir(daemon.path("ipam/br-serve1")).unwrap() {
            let name = lease.unwrap().file_name().into_string().unwrap();
            assert!(name.parse::<std::net::IpAddr>().is_err(), "{name}");
        }
    };
    is_clean(&daemon);
    daemon.end(Signal::KILL);
    daemon.start();
    is_clean(&daemon);
}

#[tokio::test]
async fn a_pod_whose_network_gives_it_no_address_is_not_made() {
    let (daemon, _guest) = Daemon::without_guests(&["unshare", "-n"]);
    let bridge = json!({ "type": "bridge", "bridge": "br-serve2" });
    let list = json!({ "cniVersion": "1.0.0", "name": "bare", "plugins": [bridge] });
    fs::write(daemon.path("net.d/10-bare.conflist"), list.to_string()).unwrap();
    let mut runtime = daemon.runtime().await;
    let refused = runtime.run_pod_sandbox(run(pod("bare"))).await.unwrap_err();
    assert!(refused.message().contains("no address"), "{refused}");
    let pods = runtime.list_pod_sandbox(ListPodSandboxRequest::default());
    assert_eq!(pods.await.unwrap().into_inner().items, []);
    assert_eq!(links(&daemon), 0);
}

/// Adds a CNI plugin that acts on files in its directory: ADD waits until the daemon is gone, DEL
/// until there is `release`, and fails while there is `deny`.
fn add_plugin(daemon: &Daemon) {
    let dir = daemon.path("plugin");
    fs::create_dir(&dir).unwrap();
    let script = format!(
        "#!/bin/sh\n\
         cd {} || exit 1\n\
         cat > /dev/null\n\
         : > $CNI_COMMAND\n\
         case $CNI_COMMAND in\n\
         ADD) while [ ! -e gone ]; do sleep 0.05; done ;;\n\
         DEL) while [ ! -e release ]; do sleep 0.05; done; [ ! -e deny ] && exit 0 ;;\n\
         esac\n\
         echo '{{\"cniVersion\": \"1.0.0\", \"code\": 100, \"msg\": \"denied\"}}'\n\
         exit 1\n",
        dir.display()
    );
    fs::write(dir.join("slow"), script).unwrap();
    fs::set_permissions(dir.join("slow"), fs::Permissions::from_mode(0o755)).unwrap();
    let list = json!({ "cniVersion": "1.0.0", "name": "slow", "plugins": [{ "type": "slow" }] });
    fs::write(daemon.path("net.d/10-slow.conflist"), list.to_string()).unwrap();
}

#[tokio::test]
async fn a_daemon_serves_while_it_undoes_pods_and_shows_one_that_it_cannot_undo() {
    let (mut daemon, _guest) = Daemon::without_guests(&["unshare", "-n"]);
    daemon.end(Signal::TERM);
    add_plugin(&daemon);
    let file = |name: &str| daemon.path(&format!("plugin/{name}"));
    let [added, gone, deny, release, del] = ["ADD", "gone", "deny", "release", "DEL"].map(file);
    let plugins = daemon.path("plugin").display().to_string();
    daemon.arguments = vec!["--cni-bin-dir".to_owned(), plugins];
    daemon.start();
    let mut runtime = daemon.runtime().await;
    let made = tokio::spawn(async move { runtime.run_pod_sandbox(run(pod("half"))).await });
    eventually("the file of ADD", || added.exists()).await;
    daemon.end(Signal::KILL);
    assert!(made.await.unwrap().is_err());
    fs::write(&gone, "").unwrap();
    fs::write(&deny, "").unwrap();

    daemon.start();
    let mut runtime = daemon.runtime().await;
    eventually("the file of DEL", || del.exists()).await;
    let list = ListPodSandboxRequest::default();
    let pods = runtime.list_pod_sandbox(list.clone()).await.unwrap();
    assert_eq!(pods.into_inner().items, []);
    fs::write(&release, "").unwrap();
    let mut left = Vec::new();
    while left.is_empty() {
        let pods = runtime.list_pod_sandbox(list.clone()).await.unwrap();
        left = pods.into_inner().items;
    }
    assert_eq!(left[0].state(), PodSandboxState::SandboxNotready);
    let request = RemovePodSandboxRequest {
        pod_sandbox_id: left[0].id.clone(),
    };
    let denied = runtime.remove_pod_sandbox(request.clone()).await;
    assert!(denied.unwrap_err().message().contains("denied"));
    fs::remove_file(&deny).unwrap();
    runtime.remove_pod_sandbox(request).await.unwrap();
    // Its name is free.
    let again = runtime.run_pod_sandbox(run(pod("half"))).await;
    assert_ne!(again.unwrap_err().code(), Code::AlreadyExists);
}

#[tokio::test]
async fn images_are_pulled_shown_and_removed() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let image = TestImage::busybox(json!({"User": "1000:50", "Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    let name = registry.name("test/busybox");
    let mut images = daemon.images().await;

    let request = |name: &str| ImageStatusRequest {
        image: spec(name),
        verbose: true,
    };
    let status = images
        .image_status(request(&name))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.image, None);

    let pull = || PullImageRequest {
        image: spec(&name),
        ..PullImageRequest::default()
    };
    let (mut one, mut two) = (images.clone(), images.clone());
    let (one, two) = tokio::join!(one.pull_image(pull()), two.pull_image(pull()));
    assert_eq!(one.unwrap().into_inner().image_ref, id);
    assert_eq!(two.unwrap().into_inner().image_ref, id);

    for known in [name.as_str(), id.as_str()] {
        let status = images
            .image_status(request(known))
            .await
            .unwrap()
            .into_inner();
        let image = status.image.unwrap();
        assert_eq!(image.id, id);
        assert_eq!(image.repo_tags, std::slice::from_ref(&name));
        assert_eq!(image.repo_digests.len(), 1);
        assert_eq!(image.uid, Some(Int64Value { value: 1000 }));
        assert!(image.size > 0);
        assert!(status.info["info"].contains("imageSpec"));
    }
    let listed = images
        .list_images(ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(listed.images.len(), 1);
    let usage = images
        .image_fs_info(ImageFsInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    let used = usage.image_filesystems[0]
        .used_bytes
        .as_ref()
        .unwrap()
        .value;
    assert!(used > 0);

    let remove = || RemoveImageRequest { image: spec(&name) };
    images.remove_image(remove()).await.unwrap();
    images.remove_image(remove()).await.unwrap();
    let listed = images
        .list_images(ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(listed.images.is_empty());

    let bad = images
        .pull_image(PullImageRequest::default())
        .await
        .unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
    let bad = PullImageRequest {
        image: spec(&registry.name("no/such")),
        ..PullImageRequest::default()
    };
    assert!(images.pull_image(bad).await.is_err());
}

#[tokio::test]
async fn settings_of_registries_are_read_at_each_pull() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    let settings = daemon.path("certs.d");
    let host = settings.join("registry.invalid");
    fs::create_dir_all(&host).unwrap();
    fs::write(host.join("hosts.toml"), "server = \"http://127.0.0.1:1\"").unwrap();
    let dir = settings.to_str().unwrap().to_owned();
    daemon.arguments.extend(["--hosts-dir".to_owned(), dir]);
    daemon.start();
    let image = TestImage::busybox(json!({"Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    let mut images = daemon.images().await;
    let pull = || PullImageRequest {
        image: spec("registry.invalid/test/busybox:1"),
        ..PullImageRequest::default()
    };
    images.pull_image(pull()).await.unwrap_err();
    let toml = format!("server = \"http://{}\"", registry.address());
    fs::write(host.join("hosts.toml"), toml).unwrap();
    let pulled = images.pull_image(pull()).await.unwrap().into_inner();
    assert_eq!(pulled.image_ref, id);
    // Settings that cannot be used leave those before.
    fs::write(host.join("hosts.toml"), "server =").unwrap();
    images.pull_image(pull()).await.unwrap();
}

#[tokio::test]
async fn a_signature_policy_holds_for_pulls_and_is_read_anew() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    let file = daemon.path("policy.json");
    let path = file.clone();
    let policy = |of_test: &str, registry: &str| {
        let text = json!({
            "default": [{ "type": "reject" }],
            "transports": { "docker": { format!("{registry}/test"): [{ "type": of_test }] } },
        });
        fs::write(&path, text.to_string()).unwrap();
    };
    let image = TestImage::busybox(json!({"Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    policy("reject", &registry.address().to_string());
    let file = file.to_str().unwrap().to_owned();
    daemon
        .arguments
        .extend(["--signature-policy".to_owned(), file]);
    daemon.start();
    let mut images = daemon.images().await;
    let name = registry.name("test/busybox");
    let pull = || PullImageRequest {
        image: spec(&name),
        ..PullImageRequest::default()
    };
    let refused = async |images: &mut ImageServiceClient<Channel>| {
        let error = images.pull_image(pull()).await.unwrap_err();
        assert_eq!(error.code(), Code::Unknown, "{error}");
        let message = error.message().to_owned();
        assert!(
            message.starts_with("SignatureValidationFailed: "),
            "{message}"
        );
        message
    };
    refused(&mut images).await;
    policy("insecureAcceptAnything", &registry.address().to_string());
    let pulled = images.pull_image(pull()).await.unwrap().into_inner();
    assert_eq!(pulled.image_ref, id);
    // A policy of which nothing is known lets nothing in.
    fs::write(&path, "{").unwrap();
    let message = refused(&mut images).await;
    assert!(message.contains("policy.json"), "{message}");
}

#[tokio::test]
async fn a_socket_has_one_daemon_and_one_that_was_killed_is_replaced() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    let second = daemon.command().output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert!(stderr.contains("is served already"), "{stderr}");
    daemon.end(Signal::KILL);
    daemon.start();
    let mut runtime = daemon.runtime().await;
    runtime.version(VersionRequest::default()).await.unwrap();
    daemon.end(Signal::TERM);
    assert!(!daemon.path("s").exists());
}

#[tokio::test]
async fn a_state_directory_has_one_daemon_whatever_else_a_second_one_has() {
    let (mut daemon, guest) = Daemon::without_guests(&[]);
    let stranger = daemon.path("run/sb/stranger");
    fs::create_dir(&stranger).unwrap();
    let socket = format!("unix://{}", daemon.path("other.sock").display());
    let second = Command::new(env!("CARGO_BIN_EXE_podvisor"))
        .args(["serve", "--listen", &socket, "--root"])
        .arg(daemon.path("other"))
        .arg("--state")
        .arg(daemon.path("run"))
        .arg("--cni-conf-dir")
        .arg(daemon.path("net.d"))
        .env("PODVISOR_GUEST_DIR", guest.path())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&second.stderr);
    let owner = format!("belongs to another daemon, process {}", daemon.pid());
    assert!(stderr.contains(&owner), "{stderr}");
    assert!(stranger.exists());
    daemon.end(Signal::KILL);
    daemon.start();
}

#[tokio::test]
async fn filters_of_nothing_find_nothing() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let mut runtime = daemon.runtime().await;
    let filter = PodSandboxFilter {
        id: "abc".to_owned(),
        label_selector: HashMap::from([("a".to_owned(), "b".to_owned())]),
        ..PodSandboxFilter::default()
    };
    let request = ListPodSandboxRequest {
        filter: Some(filter),
    };
    let found = runtime
        .list_pod_sandbox(request)
        .await
        .unwrap()
        .into_inner();
    assert!(found.items.is_empty());
    let stats = runtime
        .list_pod_sandbox_stats(ListPodSandboxStatsRequest::default())
        .await;
    assert!(stats.unwrap().into_inner().stats.is_empty());
    let stats = runtime
        .list_container_stats(ListContainerStatsRequest::default())
        .await;
    assert!(stats.unwrap().into_inner().stats.is_empty());
}
