//! What the daemon tells of itself and the node, and its settings.

use super::*;

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
