//! Devices by the Container Device Interface, as drivers of Kubernetes' tests define them: by files
//! that name variables only.

use std::fs;

use podvisor_cri_messages::*;
use serde_json::json;
use tonic::Code;

use super::support::stand_in::Node;

/// A node whose daemon reads the specifications of this directory.
async fn node() -> Node {
    let mut node = Node::ended(2).await;
    let directory = node.daemon.path("cdi");
    fs::create_dir(&directory).unwrap();
    let flag = ["--cdi-spec-dir".to_owned(), directory.display().to_string()];
    node.daemon.arguments.extend(flag);
    node.daemon.start();
    node
}

fn define(node: &Node, name: &str, edits: &serde_json::Value) {
    let document = json!({
        "cdiVersion": "0.3.0", "kind": "test-driver.cdi.k8s.io/test",
        "devices": [{ "name": name, "containerEdits": edits }],
    });
    let file = node.daemon.path("cdi").join(format!("{name}.json"));
    fs::write(file, document.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_has_the_variables_and_mounts_of_its_devices() {
    let node = node().await;
    let library = node.daemon.path("library");
    fs::create_dir(&library).unwrap();
    let mount = json!({
        "hostPath": library, "containerPath": "/library", "options": ["ro", "noexec", "bind"],
    });
    define(
        &node,
        "claim-1",
        &json!({ "env": ["FIRST=1"], "mounts": [mount] }),
    );
    define(&node, "claim-2", &json!({ "env": ["SECOND=2"] }));
    let config = ContainerConfig {
        cdi_devices: vec![CdiDevice {
            name: "test-driver.cdi.k8s.io/test=claim-1".to_owned(),
        }],
        annotations: [(
            "cdi.k8s.io/claim".to_owned(),
            "test-driver.cdi.k8s.io/test=claim-2".to_owned(),
        )]
        .into(),
        ..ContainerConfig::default()
    };
    let id = node.try_create("a", config).await.unwrap();
    let created = node.created(&id);
    let env = created["spec"]["process"]["env"].as_array().unwrap();
    for variable in ["FIRST=1", "SECOND=2"] {
        assert!(env.iter().any(|one| one == variable), "{env:?}");
    }
    let mut mounts = created["spec"]["mounts"].as_array().unwrap().iter();
    let mount = mounts.find(|mount| mount["destination"] == "/library");
    let options = mount.unwrap()["options"].as_array().unwrap();
    for option in ["ro", "rnoexec"] {
        assert!(options.iter().any(|one| one == option), "{options:?}");
    }
    node.start(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_not_defined_is_named_and_may_be_defined_later() {
    let node = node().await;
    let config = ContainerConfig {
        cdi_devices: vec![CdiDevice {
            name: "test-driver.cdi.k8s.io/test=late".to_owned(),
        }],
        ..ContainerConfig::default()
    };
    let refused = node.try_create("a", config.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let reason = "unresolvable CDI devices test-driver.cdi.k8s.io/test=late";
    assert!(refused.message().contains(reason), "{refused}");
    define(
        &node,
        "late",
        &json!({ "hooks": [{ "hookName": "poststop", "path": "/x" }] }),
    );
    let refused = node.try_create("a", config.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(
        refused.message().contains("containerEdits.hooks"),
        "{refused}"
    );
    define(&node, "late", &json!({ "env": ["LATE=yes"] }));
    node.try_create("a", config).await.unwrap();
    assert_eq!(node.asked_to("Create"), 1);
}
