//! Fields of the newest interface.

use std::path::Path;

use podvisor_cri_messages::{ContainerConfig, KeyValue, Mount, StatusRequest};

use super::support::stand_in::Node;

#[tokio::test(flavor = "multi_thread")]
async fn a_variable_may_have_a_value_that_is_not_utf_8() {
    let node = Node::new(2).await;
    let token = KeyValue {
        key: "TOKEN".to_owned(),
        value: b"a\xff\xfeb".to_vec(),
    };
    let config = ContainerConfig {
        envs: vec![token, KeyValue::new("NAME", "ä")],
        ..ContainerConfig::default()
    };
    let id = node.try_create("a", config).await.unwrap();
    let created = node.created(&id);
    let env = created["spec"]["process"]["env"].as_array().unwrap();
    for expected in ["TOKEN=a\u{fffd}\u{fffd}b", "NAME=ä"] {
        assert!(env.iter().any(|one| one == expected), "{env:?}");
    }
    node.start(&id).await.unwrap();
}

fn with_options(host: &Path, container: &str, options: &[&str]) -> Mount {
    Mount {
        container_path: container.to_owned(),
        host_path: host.to_str().unwrap().to_owned(),
        mount_options: options.iter().map(|&option| option.to_owned()).collect(),
        ..Mount::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_has_the_options_that_are_asked_for() {
    let node = Node::new(2).await;
    let volume = node.daemon.path("volume");
    std::fs::create_dir(&volume).unwrap();
    let of = |mounts: Vec<Mount>| ContainerConfig {
        mounts,
        ..ContainerConfig::default()
    };
    let unknown = with_options(&volume, "/a", &["noexec", "noatime"]);
    let refused = node.try_create("a", of(vec![unknown])).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("\"noatime\""), "{refused}");
    let mounts = vec![
        with_options(&volume, "/a", &[]),
        with_options(&volume, "/b", &["noexec", "nosuid", "nodev"]),
    ];
    let id = node.try_create("a", of(mounts)).await.unwrap();
    let created = node.created(&id);
    let mounts = created["spec"]["mounts"].as_array().unwrap();
    let options = |path: &str| {
        let mut mounts = mounts.iter();
        let mount = mounts.find(|mount| mount["destination"] == path).unwrap();
        let options = mount["options"].as_array().unwrap().iter();
        let options = options.filter_map(serde_json::Value::as_str);
        options.map(str::to_owned).collect::<Vec<_>>()
    };
    let has = |path: &str, option: &str| options(path).contains(&option.to_owned());
    for option in ["rnoexec", "rnosuid", "rnodev"] {
        assert!(has("/b", option), "{:?}", options("/b"));
    }
    assert!(!has("/a", "rnodev"), "{:?}", options("/a"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_says_that_mounts_have_options() {
    let node = Node::new(2).await;
    let status = node.runtime().await.status(StatusRequest::default()).await;
    let features = status.unwrap().into_inner().features.unwrap();
    assert!(features.supplemental_groups_policy && features.mount_options);
}
