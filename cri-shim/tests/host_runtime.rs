//! A daemon with another runtime on its node: another daemon, whose pod's machine is a stand-in.

mod support;

use std::time::Duration;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use support::cri::{Daemon, PodClient};
use support::stand_in::{Node, POD, pod_config};
use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// A node with two runtimes.
struct Both {
    daemon: Daemon,
    host: Node,
    _guest: TempDir,
}

impl Both {
    async fn new() -> Self {
        let host = Node::new(2).await;
        let (mut daemon, guest) = Daemon::without_guests(&[]);
        daemon.end(Signal::TERM);
        let socket = format!("unix://{}", host.daemon.path("s").display());
        daemon.arguments = vec!["--host-runtime".to_owned(), socket];
        daemon.start();
        Self {
            daemon,
            host,
            _guest: guest,
        }
    }

    async fn pods(&self) -> Result<Vec<String>, Status> {
        let mut runtime = self.daemon.runtime().await;
        let listed = runtime.list_pod_sandbox(ListPodSandboxRequest::default());
        let listed = listed.await?.into_inner().items;
        Ok(listed.into_iter().map(|pod| pod.id).collect())
    }

    /// Creates a container in the other runtime's pod.
    async fn create(&self, image: &str) -> Result<String, Status> {
        let runtime = self.daemon.runtime().await;
        let mut client = PodClient::new(runtime, POD);
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: "a".to_owned(),
                attempt: 0,
            }),
            image: Some(named(image)),
            log_path: "a.log".to_owned(),
            ..ContainerConfig::default()
        };
        let request = client.create_request(config, Some(pod(0)));
        let created = client.runtime.create_container(request).await?;
        Ok(created.into_inner().container_id)
    }

    /// Asks for a pod whose network has this mode.
    async fn run(&self, handler: &str, network: NamespaceMode) -> Status {
        let mut runtime = self.daemon.runtime().await;
        let request = RunPodSandboxRequest {
            config: Some(pod(network.into())),
            runtime_handler: handler.to_owned(),
        };
        runtime.run_pod_sandbox(request).await.unwrap_err()
    }

    async fn status(&self) -> StatusResponse {
        let mut runtime = self.daemon.runtime().await;
        let status = runtime.status(StatusRequest::default()).await;
        status.unwrap().into_inner()
    }

    async fn condition(&self, kind: &str) -> RuntimeCondition {
        let conditions = self.status().await.status.unwrap().conditions;
        let mut conditions = conditions.into_iter();
        let found = conditions.find(|condition| condition.r#type == kind);
        found.unwrap()
    }

    /// Starts the daemon anew, with the other runtime for pods without a handler.
    fn set_host_as_default(&mut self) {
        self.daemon.end(Signal::TERM);
        let flags = ["--default-handler", "host"].map(str::to_owned);
        self.daemon.arguments.extend(flags);
        self.daemon.start();
    }

    /// Returns the tags of all images.
    async fn images(&self) -> Vec<Vec<String>> {
        self.try_images().await.unwrap()
    }

    async fn try_images(&self) -> Result<Vec<Vec<String>>, Status> {
        let mut images = self.daemon.images().await;
        let listed = images.list_images(ListImagesRequest::default()).await;
        let listed = listed?.into_inner().images;
        Ok(listed.into_iter().map(|image| image.repo_tags).collect())
    }

    /// Pulls an image, for podvisor unless `pod` is the other runtime's.
    async fn pull(&self, image: &str, pod: Option<PodSandboxConfig>) {
        pull(&self.daemon, named(image), pod).await;
    }

    async fn remove_image(&self, image: &str) -> Result<(), Status> {
        let remove = RemoveImageRequest {
            image: Some(named(image)),
        };
        self.daemon
            .images()
            .await
            .remove_image(remove)
            .await
            .map(drop)
    }
}

async fn pull(daemon: &Daemon, image: ImageSpec, pod: Option<PodSandboxConfig>) {
    let pull = PullImageRequest {
        image: Some(image),
        sandbox_config: pod,
        ..PullImageRequest::default()
    };
    daemon.images().await.pull_image(pull).await.unwrap();
}

fn named(image: &str) -> ImageSpec {
    ImageSpec {
        image: image.to_owned(),
        ..ImageSpec::default()
    }
}

fn pod(network: i32) -> PodSandboxConfig {
    let options = NamespaceOption {
        network,
        ..NamespaceOption::default()
    };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "new".to_owned(),
            uid: "new".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
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

#[tokio::test(flavor = "multi_thread")]
async fn calls_about_a_pod_go_to_the_runtime_that_has_it() {
    let both = Both::new().await;
    assert_eq!(both.pods().await.unwrap(), [POD]);
    let mut runtime = both.daemon.runtime().await;
    let mut events = runtime
        .get_container_events(GetEventsRequest {})
        .await
        .unwrap()
        .into_inner();
    // The other runtime has events only for who listens already.
    let told = tokio::time::timeout(support::PATIENCE, async {
        loop {
            let id = both.create(&both.host.pull().await.0).await;
            let next = tokio::time::timeout(Duration::from_secs(2), events.message()).await;
            let mut client = PodClient::new(both.daemon.runtime().await, POD);
            let id = id.unwrap();
            match next {
                Ok(event) => break (id, event.unwrap().unwrap()),
                Err(_) => {
                    let container_id = id;
                    let request = RemoveContainerRequest { container_id };
                    client.runtime.remove_container(request).await.unwrap();
                }
            }
        }
    });
    let (id, event) = told.await.unwrap();
    assert!(!event.container_id.is_empty());

    let mut client = PodClient::new(both.daemon.runtime().await, POD);
    client.start(&id).await.unwrap();
    let status = client.status(&id).await;
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    let listed = runtime.list_containers(ListContainersRequest::default());
    let listed = listed.await.unwrap().into_inner().containers;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].id, id);
    let stats = runtime.list_container_stats(ListContainerStatsRequest::default());
    stats.await.unwrap();
    assert_eq!(both.host.asked(&format!("Stats {id} in brief")), 1);
    let url = runtime.exec(ExecRequest {
        container_id: id.clone(),
        cmd: vec!["true".to_owned()],
        stdout: true,
        ..ExecRequest::default()
    });
    let url = url.await.unwrap().into_inner().url;
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    assert_eq!(both.host.asked(&format!("Start {id}")), 1);

    let unknown = runtime.container_status(ContainerStatusRequest {
        container_id: "f".repeat(64),
        verbose: false,
    });
    assert_eq!(unknown.await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_fields_reach_the_other_runtime() {
    let both = Both::new().await;
    let config = ContainerConfig {
        envs: vec![KeyValue {
            key: "TOKEN".to_owned(),
            value: b"a\xff".to_vec(),
        }],
        mounts: vec![Mount {
            container_path: "/volume".to_owned(),
            host_path: both.daemon.path("logs").to_str().unwrap().to_owned(),
            mount_options: vec!["noexec".to_owned()],
            ..Mount::default()
        }],
        ..ContainerConfig::default()
    };
    both.host.pull().await;
    let request = both.host.create_request("a", config).await;
    let mut runtime = both.daemon.runtime().await;
    let created = runtime.create_container(request).await.unwrap();
    let id = created.into_inner().container_id;
    let spec = both.host.created(&id)["spec"].to_string();
    assert!(spec.contains("\"TOKEN=a\u{fffd}\""), "{spec}");
    assert!(spec.contains("\"rnoexec\""), "{spec}");
    let status = runtime.status(StatusRequest::default()).await.unwrap();
    assert!(status.into_inner().features.unwrap().mount_options);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_needs_the_node_is_the_other_runtimes_unless_its_handler_is_a_guests() {
    let mut both = Both::new().await;
    // It refuses them as well, being the same runtime.
    for handler in ["", "host"] {
        let refused = both.run(handler, NamespaceMode::Node).await;
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    both.host.daemon.end(Signal::TERM);
    for (handler, network, code) in [
        ("", NamespaceMode::Node, Code::Unavailable),
        ("host", NamespaceMode::Pod, Code::Unavailable),
        ("podvisor", NamespaceMode::Node, Code::InvalidArgument),
        ("other", NamespaceMode::Node, Code::InvalidArgument),
    ] {
        let refused = both.run(handler, network).await;
        assert_eq!(refused.code(), code, "{handler}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_pods_with_a_handler_of_guests_are_guests_if_the_host_is_the_default() {
    let mut both = Both::new().await;
    both.set_host_as_default();
    both.host.daemon.end(Signal::TERM);
    for (handler, code) in [
        ("", Code::Unavailable),
        ("host", Code::Unavailable),
        // Without a network, guests cannot be made.
        ("podvisor", Code::Unavailable),
        ("other", Code::InvalidArgument),
    ] {
        let refused = both.run(handler, NamespaceMode::Pod).await;
        assert_eq!(refused.code(), code, "{handler}: {refused}");
        let socket = both.host.daemon.path("s").display().to_string();
        let is_hosts = refused.message().contains(&socket);
        assert_eq!(is_hosts, matches!(handler, "" | "host"), "{refused}");
    }
    let ready = both.condition("RuntimeReady").await;
    assert!(!ready.status, "{ready:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_is_down_takes_its_own_pods_with_it_alone() {
    let mut both = Both::new().await;
    assert_eq!(both.pods().await.unwrap(), [POD]);
    let mut runtime = both.daemon.runtime().await;
    let all = runtime.list_containers(ListContainersRequest::default());
    all.await.unwrap();
    assert!(both.condition("HostRuntimeReady").await.status);
    let status = both.status().await;
    let handlers = status.runtime_handlers.iter();
    assert!(
        handlers
            .map(|handler| &handler.name)
            .any(|name| name == "host")
    );

    let (image, _) = both.host.pull().await;
    assert_eq!(both.images().await, [[image.clone()]]);
    let events = runtime.get_container_events(GetEventsRequest {}).await;
    let mut events = events.unwrap().into_inner();

    both.host.daemon.end(Signal::KILL);
    assert!(matches!(events.message().await, Ok(None)));
    let refused = runtime.get_container_events(GetEventsRequest {}).await;
    assert_eq!(refused.map(drop).unwrap_err().code(), Code::Unavailable);
    let refused = runtime.runtime_config(RuntimeConfigRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    let update = UpdateRuntimeConfigRequest::default();
    let refused = runtime.update_runtime_config(update).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    // Its pods run on, also for who asks for one of them.
    assert_eq!(both.pods().await.unwrap(), [POD]);
    let containers = ListContainersRequest {
        filter: Some(ContainerFilter {
            pod_sandbox_id: POD.to_owned(),
            ..ContainerFilter::default()
        }),
    };
    let mut runtime = both.daemon.runtime().await;
    let listed = runtime.list_containers(containers).await;
    assert_eq!(listed.unwrap().into_inner().containers, []);
    // A kubelet forgets images that are not listed.
    assert_eq!(both.images().await, [[image.clone()]]);
    both.pull(&image, None).await;
    both.remove_image(&image).await.unwrap();
    let refused = both.remove_image(&image).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let fault = both.condition("HostRuntimeReady").await;
    let socket = both.host.daemon.path("s").display().to_string();
    assert!(
        !fault.status && fault.message.contains(&socket),
        "{fault:?}"
    );
    let stop = StopPodSandboxRequest {
        pod_sandbox_id: POD.to_owned(),
    };
    let refused = runtime.stop_pod_sandbox(stop).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);

    // A daemon that has never seen its pods does not tell that there are none.
    both.daemon.end(Signal::TERM);
    both.daemon.start();
    assert_eq!(both.pods().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(
        both.try_images().await.unwrap_err().code(),
        Code::Unavailable
    );
    both.host.daemon.start();
    assert_eq!(both.pods().await.unwrap(), [POD]);
    assert!(both.condition("HostRuntimeReady").await.status);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_both_are_listed_once_and_removed_from_both() {
    let both = Both::new().await;
    let (image, id) = both.host.pull().await;
    let mut images = both.daemon.images().await;
    let status = ImageStatusRequest {
        image: Some(named(&image)),
        verbose: false,
    };
    let found = images.image_status(status.clone()).await.unwrap();
    assert_eq!(found.into_inner().image.unwrap().id, id);
    both.pull(&image, None).await;
    assert_eq!(both.images().await, [[image.clone()]]);
    let systems = images.image_fs_info(ImageFsInfoRequest {}).await.unwrap();
    assert_eq!(systems.into_inner().image_filesystems.len(), 2);

    both.remove_image(&image).await.unwrap();
    assert!(both.images().await.is_empty());
    let found = images.image_status(status).await.unwrap();
    assert_eq!(found.into_inner().image, None);
    let missing = both.create(&image).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound, "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_only_one_has_is_pulled_for_a_container_of_the_other() {
    let both = Both::new().await;
    let (image, id) = both.host.pull().await;
    both.remove_image(&image).await.unwrap();
    both.pull(&image, None).await;
    // As a kubelet, which knows the id from ImageStatus.
    let runtime = both.daemon.runtime().await;
    let client = PodClient::new(runtime.clone(), POD);
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "a".to_owned(),
            attempt: 0,
        }),
        image: Some(ImageSpec {
            user_specified_image: image.clone(),
            ..named(&id)
        }),
        ..ContainerConfig::default()
    };
    let request = client.create_request(config, Some(pod_config()));
    let mut runtime = runtime;
    runtime.create_container(request).await.unwrap();
    let mut hosts = both.host.daemon.images().await;
    let listed = hosts.list_images(ListImagesRequest::default()).await;
    assert_eq!(listed.unwrap().into_inner().images.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_only_one_has_may_be_named_by_its_tag() {
    let both = Both::new().await;
    let (image, id) = both.host.pull().await;
    both.remove_image(&image).await.unwrap();
    both.pull(&image, None).await;
    both.create(&image).await.unwrap();
    // The other runtime has it by its digest now, and without the tag.
    let mut hosts = both.host.daemon.images().await;
    let listed = hosts.list_images(ListImagesRequest::default()).await;
    let listed = listed.unwrap().into_inner().images;
    assert_eq!((listed.len(), &listed[0].id), (1, &id));
    assert!(listed[0].repo_tags.is_empty(), "{listed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_into_the_runtime_of_its_pod() {
    let both = Both::new().await;
    let (image, _) = both.host.pull().await;
    let mut hosts = both.host.daemon.images().await;
    let handled = ImageSpec {
        runtime_handler: "host".to_owned(),
        ..named(&image)
    };
    for (spec, config, is_hosts) in [
        (named(&image), None, false),
        (named(&image), Some(pod(0)), false),
        (named(&image), Some(pod(NamespaceMode::Node.into())), true),
        (named(&image), Some(pod_config()), true),
        (handled, None, true),
    ] {
        both.remove_image(&image).await.unwrap();
        pull(&both.daemon, spec.clone(), config.clone()).await;
        let listed = hosts.list_images(ListImagesRequest::default()).await;
        let listed = listed.unwrap().into_inner().images;
        assert_eq!(!listed.is_empty(), is_hosts, "{spec:?} {config:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_a_guest_is_pulled_into_podvisor_if_the_host_is_the_default() {
    let host = Node::new(2).await;
    // Both have a pod of this name.
    let mut node = Node::ended(2).await;
    let socket = format!("--host-runtime=unix://{}", host.daemon.path("s").display());
    node.daemon.arguments = vec![socket, "--default-handler=host".to_owned()];
    node.daemon.start();
    let (image, _) = host.pull().await;
    let mut hosts = host.daemon.images().await;
    let remove = RemoveImageRequest {
        image: Some(named(&image)),
    };
    hosts.remove_image(remove).await.unwrap();
    let listed = async |images: &mut ImageServiceClient<Channel>| {
        let listed = images.list_images(ListImagesRequest::default()).await;
        listed.unwrap().into_inner().images.len()
    };
    pull(&node.daemon, named(&image), Some(pod_config())).await;
    assert_eq!(listed(&mut hosts).await, 0);
    pull(&node.daemon, named(&image), Some(pod(0))).await;
    assert_eq!(listed(&mut hosts).await, 1);
    let systems = node
        .daemon
        .images()
        .await
        .image_fs_info(ImageFsInfoRequest {})
        .await;
    let systems = systems.unwrap().into_inner().image_filesystems;
    let first = systems[0].fs_id.as_ref().unwrap();
    let root = host.daemon.path("root").display().to_string();
    assert!(first.mountpoint.starts_with(&root), "{first:?}");
}
