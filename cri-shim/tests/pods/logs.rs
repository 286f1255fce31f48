//! Containers' logs.

use std::fs;

use podvisor_cri_messages::*;
use rustix::process::Signal;

use super::support::stand_in::{Node, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_container_has_a_log_once_it_is_to_run_and_not_before() {
    let mut node = Node::new(2).await;
    let failed = |node: &Node| node.control.join("refuse-Create");
    fs::write(failed(&node), "no such luck").unwrap();
    node.try_create("a", ContainerConfig::default())
        .await
        .unwrap_err();
    // As by a daemon that was killed while it created the container, which the next one undoes.
    fs::remove_file(failed(&node)).unwrap();
    node.hold("Create");
    {
        let create = node.try_create("b", ContainerConfig::default());
        let begins = until(async || node.asked_to("Create") == 2);
        let mut create = std::pin::pin!(create);
        tokio::select! {
            created = &mut create => panic!("{created:?}"),
            () = begins => {}
        }
    }
    node.daemon.end(Signal::KILL);
    node.let_go("Create");
    node.daemon.start();
    let id = node.create("c", None).await;
    assert!(["a", "b", "c"].iter().all(|name| !node.has_log(name)));
    node.start(&id).await.unwrap();
    assert!(node.has_log("c"));
    assert_eq!(node.asked(&format!("ReopenLog {id}")), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_changed_is_not_made() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    node.start(&id).await.unwrap();
    let log = node.daemon.path("logs/a.log");
    fs::write(node.control.join("refuse-ReopenLog"), "no such luck").unwrap();
    let reopen = async || {
        let request = ReopenContainerLogRequest {
            container_id: id.clone(),
        };
        let mut runtime = node.runtime().await;
        runtime.reopen_container_log(request).await.unwrap_err();
    };
    reopen().await;
    assert!(log.exists());
    fs::rename(&log, log.with_extension("rotated")).unwrap();
    reopen().await;
    assert!(!log.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_log_cannot_be_opened_has_failed_to_start() {
    let node = Node::new(2).await;
    let id = node.create("a", None).await;
    fs::create_dir(node.daemon.path("logs/a.log")).unwrap();
    let failed = node.start(&id).await.unwrap_err();
    assert!(failed.message().contains("Is a directory"), "{failed}");
    let status = node.status(&id).await;
    assert_eq!((status.exit_code, &*status.reason), (128, "StartError"));
    assert_eq!(status.message, failed.message());
    assert_eq!(node.asked(&format!("Start {id}")), 0);
    assert_eq!(node.asked(&format!("Delete {id}")), 1);
}
