//! Requests with fields that the message crate does not have, as newer kubelets send them.

use k8s_cri::v1::*;
use prost::Message as _;

use super::support::stand_in::Node;

const CREATE: &str = "/runtime.v1.RuntimeService/CreateContainer";

/// Newer fields of a container's configuration.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerConfig {
    #[prost(message, repeated, tag = "6")]
    envs: Vec<NewerVariable>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerVariable {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// CreateContainerRequest whose configuration has been encoded.
#[derive(Clone, PartialEq, prost::Message)]
struct EncodedRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", tag = "2")]
    config: Vec<u8>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

/// Creates a container of this configuration.
async fn create(node: &Node, newer: NewerConfig) -> Result<String, tonic::Status> {
    node.pull().await;
    let request = node.create_request("a", ContainerConfig::default()).await;
    // Two concatenated encodings are one message with the fields of both.
    let config = [
        request.config.unwrap().encode_to_vec(),
        newer.encode_to_vec(),
    ];
    let request = EncodedRequest {
        pod_sandbox_id: request.pod_sandbox_id,
        config: config.concat(),
        sandbox_config: request.sandbox_config,
    };
    let created: CreateContainerResponse = node.daemon.raw(CREATE, request).await?;
    Ok(created.container_id)
}

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
    };
    let id = create(&node, newer).await.unwrap();
    let created = node.created(&id);
    let env = created["spec"]["process"]["env"].as_array().unwrap();
    for expected in ["TOKEN=a\u{fffd}\u{fffd}b", "NAME=ä"] {
        assert!(env.iter().any(|one| one == expected), "{env:?}");
    }
    node.start(&id).await.unwrap();
}
