//! Pods that cannot be, and what is left of them.

use super::*;

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
