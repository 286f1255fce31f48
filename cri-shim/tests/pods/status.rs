//! What is reported of pods and containers, and which calls to guests that takes.

use std::pin::Pin;
use std::time::Duration;

use podvisor_cri_messages::*;
use rustix::process::Signal;

use super::support::stand_in::{Node, POD};

#[tokio::test(flavor = "multi_thread")]
async fn what_a_kubelet_asks_for_often_is_asked_of_guests_in_brief() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let mut runtime = node.runtime().await;
    let list = runtime.list_container_stats(ListContainerStatsRequest::default());
    list.await.unwrap();
    assert_eq!(node.asked(&format!("Stats {id} in brief")), 1);
    let list = runtime.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default());
    list.await.unwrap();
    assert_eq!(node.asked(&format!("Stats {id}")), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_told_of_a_pod_before_its_machine_was_asked() {
    let mut node = Node::ended(2).await;
    node.hold("List");
    // It serves after some time, and continues to wait for this pod.
    node.daemon.start();
    let containers = async {
        let mut runtime = node.runtime().await;
        let told = runtime.list_containers(ListContainersRequest::default());
        assert_eq!(told.await.unwrap().into_inner().containers, []);
    };
    let status = async {
        let mut runtime = node.runtime().await;
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: POD.to_owned(),
            verbose: true,
        };
        let status = runtime.pod_sandbox_status(request).await.unwrap();
        let info = &status.get_ref().info["info"];
        let pid = format!("\"pid\":{}", node.process.id());
        assert!(info.contains(&pid), "{info}");
    };
    let pods = async {
        assert_eq!(node.pod_state().await, PodSandboxState::SandboxReady);
    };
    let stats = async {
        let mut runtime = node.runtime().await;
        let told = runtime.list_container_stats(ListContainerStatsRequest::default());
        assert_eq!(told.await.unwrap().into_inner().stats, []);
    };
    let mut calls: [Pin<Box<dyn Future<Output = ()>>>; 4] = [
        Box::pin(containers),
        Box::pin(status),
        Box::pin(pods),
        Box::pin(stats),
    ];
    // None of them is answered.
    let first = futures_util::future::select_all(&mut calls);
    let early = tokio::time::timeout(Duration::from_millis(500), first).await;
    assert!(early.is_err());
    node.let_go("List");
    futures_util::future::join_all(calls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_newest_containers_come_first_in_its_status() {
    let node = Node::new(2).await;
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        ids.push(node.create(name, None).await);
    }
    ids.reverse();
    let request = PodSandboxStatusRequest {
        pod_sandbox_id: POD.to_owned(),
        verbose: false,
    };
    let status = node.runtime().await.pod_sandbox_status(request).await;
    let shown = status.unwrap().into_inner().containers_statuses;
    let shown: Vec<String> = shown.into_iter().map(|status| status.id).collect();
    assert_eq!(shown, ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_tells_which_image_is_mounted_also_after_a_restart() {
    let mut node = Node::new(2).await;
    let (name, image_ref) = node.pull().await;
    // The image of the container's root, too.
    let mount = Mount {
        container_path: "/model".to_owned(),
        readonly: true,
        image: Some(ImageSpec {
            image: name.clone(),
            ..ImageSpec::default()
        }),
        ..Mount::default()
    };
    let config = ContainerConfig {
        mounts: vec![mount],
        ..ContainerConfig::default()
    };
    let id = node.try_create("a", config).await.unwrap();
    for restarts in 0..2 {
        if restarts > 0 {
            node.daemon.end(Signal::KILL);
            node.daemon.start();
        }
        let mounts = node.status(&id).await.mounts;
        let [mount] = &mounts[..] else {
            panic!("{mounts:?}");
        };
        assert_eq!(mount.container_path, "/model");
        let image = mount.image.as_ref().unwrap();
        assert_eq!((&image.image, &image.image_ref), (&name, &image_ref));
    }
}
