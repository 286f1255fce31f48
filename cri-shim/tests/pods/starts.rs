//! Starts that their daemon does not live to see.

use std::fs;

use podvisor_cri_messages::*;
use rustix::process::Signal;

use super::support::stand_in::{Node, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_outlives_its_daemon_is_known_to_the_next_one_once_it_is_over() {
    for succeeds in [true, false] {
        let mut node = Node::new(2).await;
        let id = node.create("a", None).await;
        node.hold("Start");
        let mut runtime = node.runtime().await;
        let container_id = id.clone();
        let start = StartContainerRequest { container_id };
        let start = tokio::spawn(async move { runtime.start_container(start).await });
        until(async || node.asked(&format!("Start {id}")) == 1).await;
        node.daemon.end(Signal::KILL);
        start.await.unwrap().unwrap_err();
        node.daemon.start();
        // The guest has not answered when the next daemon takes the pod over.
        let created = ContainerState::ContainerCreated;
        assert_eq!(node.status(&id).await.state(), created);
        if !succeeds {
            fs::write(node.control.join("refuse-Start"), "no").unwrap();
        }
        let stop = async || {
            let request = StopContainerRequest {
                container_id: id.clone(),
                timeout: 0,
            };
            node.runtime().await.stop_container(request).await.unwrap();
        };
        if !succeeds {
            node.let_go("Start");
            // It waits for the start, and has nothing to do then.
            stop().await;
            let status = node.status(&id).await;
            assert_eq!(status.state(), ContainerState::ContainerExited);
            assert_eq!(status.reason, "StartError");
            assert_eq!(node.asked_to("Signal"), 0);
            continue;
        }
        node.let_go("Start");
        let running = ContainerState::ContainerRunning;
        until(async || node.status(&id).await.state() == running).await;
        stop().await;
        let status = node.status(&id).await;
        assert_eq!(status.state(), ContainerState::ContainerExited);
        assert_eq!(status.exit_code, 137);
    }
}
