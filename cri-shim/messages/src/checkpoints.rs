//! Saved containers and pods.

use std::collections::HashMap;

use prost::Message;

use crate::{ContainerConfig, PodSandboxConfig};

/// Request of
/// [`RuntimeService::checkpoint_container`](crate::RuntimeService::checkpoint_container).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct CheckpointContainerRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// The file to write.
    #[prost(string, tag = "2")]
    pub location: String,
    /// How long it may take, in seconds; 0 as long as the runtime allows.
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}

/// Answer of
/// [`RuntimeService::checkpoint_container`](crate::RuntimeService::checkpoint_container).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct CheckpointContainerResponse {}

/// Request of [`RuntimeService::checkpoint_pod`](crate::RuntimeService::checkpoint_pod).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CheckpointPodRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// The file to write.
    #[prost(string, tag = "2")]
    pub output_path: String,
    /// The containers to save; all if there are none.
    #[prost(string, repeated, tag = "3")]
    pub container_ids: Vec<String>,
    /// Further settings, which runtimes define.
    #[prost(map = "string, string", tag = "4")]
    pub options: HashMap<String, String>,
}

/// Answer of [`RuntimeService::checkpoint_pod`](crate::RuntimeService::checkpoint_pod).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct CheckpointPodResponse {}

/// Request of [`RuntimeService::restore_pod`](crate::RuntimeService::restore_pod).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RestorePodRequest {
    /// The file to restore from.
    #[prost(string, tag = "1")]
    pub checkpoint_path: String,
    /// The pod as it shall be now.
    #[prost(message, optional, tag = "2")]
    pub config: Option<PodSandboxConfig>,
    /// The runtime handler; empty for the default.
    #[prost(string, tag = "3")]
    pub runtime_handler: String,
    /// Further settings, which runtimes define.
    #[prost(map = "string, string", tag = "4")]
    pub options: HashMap<String, String>,
    /// The containers as they shall be now.
    #[prost(message, repeated, tag = "5")]
    pub container_configs: Vec<ContainerConfig>,
}

/// A container of a restored pod.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RestoredContainer {
    /// Its name in the pod.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The id of the container.
    #[prost(string, tag = "2")]
    pub container_id: String,
}

/// Answer of [`RuntimeService::restore_pod`](crate::RuntimeService::restore_pod).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RestorePodResponse {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Its containers.
    #[prost(message, repeated, tag = "2")]
    pub restored_containers: Vec<RestoredContainer>,
}
