//! Messages with fields that the message crate does not have, as newer kubelets send them.

use k8s_cri::v1::{ContainerConfig, CreateContainerResponse, PodSandboxConfig, StatusRequest};
use prost::Message as _;

use super::cri::Daemon;
use super::stand_in::Node;

const CREATE: &str = "/runtime.v1.RuntimeService/CreateContainer";
const STATUS: &str = "/runtime.v1.RuntimeService/Status";

/// Newer fields of a container's configuration.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NewerConfig {
    #[prost(message, repeated, tag = "6")]
    pub(crate) envs: Vec<NewerVariable>,
    #[prost(message, repeated, tag = "7")]
    pub(crate) mounts: Vec<NewerMount>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NewerVariable {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NewerMount {
    #[prost(string, tag = "1")]
    pub(crate) container_path: String,
    #[prost(string, tag = "2")]
    pub(crate) host_path: String,
    #[prost(string, repeated, tag = "11")]
    pub(crate) mount_options: Vec<String>,
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

/// Asks a daemon for a container in the pod of a node, whose image it has.
pub(crate) async fn create(
    daemon: &Daemon,
    node: &Node,
    newer: NewerConfig,
) -> Result<String, tonic::Status> {
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
    let created: CreateContainerResponse = daemon.raw(CREATE, request).await?;
    Ok(created.container_id)
}

/// StatusResponse with its features only.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerStatus {
    #[prost(message, optional, tag = "4")]
    features: Option<NewerFeatures>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NewerFeatures {
    #[prost(bool, tag = "1")]
    pub(crate) supplemental_groups_policy: bool,
    #[prost(bool, tag = "3")]
    pub(crate) mount_options: bool,
}

/// Returns the features that a daemon's Status has.
pub(crate) async fn features(daemon: &Daemon) -> NewerFeatures {
    let status = daemon.raw(STATUS, StatusRequest::default()).await;
    let status: NewerStatus = status.unwrap();
    status.features.unwrap()
}
