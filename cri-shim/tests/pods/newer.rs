//! Requests with fields that the message crate does not have.

use super::support::newer::{NewerConfig, NewerMount, NewerVariable, create, features};
use super::support::stand_in::Node;

#[tokio::test(flavor = "multi_thread")]
async fn a_variable_may_have_a_value_that_is_not_utf_8() {
    let node = Node::new(2).await;
    let variable = |key: &str, value: &[u8]| NewerVariable {
        key: key.to_owned(),
        value: value.to_vec(),
    };
    let newer = NewerConfig {
        envs: vec![
            variable("TOKEN", b"a\xff\xfeb"),
            variable("NAME", "ä".as_bytes()),
        ],
        ..NewerConfig::default()
    };
    let id = create(&node.daemon, &node, newer).await.unwrap();
    let created = node.created(&id);
    let env = created["spec"]["process"]["env"].as_array().unwrap();
    for expected in ["TOKEN=a\u{fffd}\u{fffd}b", "NAME=ä"] {
        assert!(env.iter().any(|one| one == expected), "{env:?}");
    }
    node.start(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_has_the_options_that_are_asked_for() {
    let node = Node::new(2).await;
    let volume = node.daemon.path("volume");
    std::fs::create_dir(&volume).unwrap();
    let mount = |path: &str, options: &[&str]| NewerMount {
        container_path: path.to_owned(),
        host_path: volume.to_str().unwrap().to_owned(),
        mount_options: options.iter().map(|&option| option.to_owned()).collect(),
    };
    let of = |mounts: Vec<NewerMount>| NewerConfig {
        mounts,
        ..NewerConfig::default()
    };
    let refused = create(
        &node.daemon,
        &node,
        of(vec![mount("/a", &["noexec", "noatime"])]),
    )
    .await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("\"noatime\""), "{refused}");
    let mounts = vec![
        mount("/a", &[]),
        mount("/b", &["noexec", "nosuid", "nodev"]),
    ];
    let id = create(&node.daemon, &node, of(mounts)).await.unwrap();
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
    let features = features(&node.daemon).await;
    assert!(features.supplemental_groups_policy && features.mount_options);
}
