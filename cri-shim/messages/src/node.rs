//! The runtime itself: its version, state and settings.

use std::collections::HashMap;

use prost::{Enumeration, Message};

/// Who makes control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum CgroupDriver {
    /// systemd.
    Systemd = 0,
    /// The runtime.
    Cgroupfs = 1,
}

/// Request of [`RuntimeService::version`](crate::RuntimeService::version).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct VersionRequest {
    /// The version of the kubelet's interface.
    #[prost(string, tag = "1")]
    pub version: String,
}

/// Answer of [`RuntimeService::version`](crate::RuntimeService::version).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct VersionResponse {
    /// The version of the kubelet's interface.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The runtime's name.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    /// The runtime's version.
    #[prost(string, tag = "3")]
    pub runtime_version: String,
    /// The version of this interface.
    #[prost(string, tag = "4")]
    pub runtime_api_version: String,
}

/// The network of the node.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct NetworkConfig {
    /// The addresses of the node's pods; several are joined by commas.
    #[prost(string, tag = "1")]
    pub pod_cidr: String,
}

/// What a kubelet tells its runtime.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RuntimeConfig {
    /// The network.
    #[prost(message, optional, tag = "1")]
    pub network_config: Option<NetworkConfig>,
}

/// Request of
/// [`RuntimeService::update_runtime_config`](crate::RuntimeService::update_runtime_config).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct UpdateRuntimeConfigRequest {
    /// The settings.
    #[prost(message, optional, tag = "1")]
    pub runtime_config: Option<RuntimeConfig>,
}

/// Answer of
/// [`RuntimeService::update_runtime_config`](crate::RuntimeService::update_runtime_config).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct UpdateRuntimeConfigResponse {}

/// A condition of a runtime, such as `RuntimeReady` and `NetworkReady`.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RuntimeCondition {
    /// Its name.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// Whether it is met.
    #[prost(bool, tag = "2")]
    pub status: bool,
    /// The reason of its state, as one word.
    #[prost(string, tag = "3")]
    pub reason: String,
    /// More of the reason, for people.
    #[prost(string, tag = "4")]
    pub message: String,
}

/// All conditions of a runtime.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RuntimeStatus {
    /// The conditions; those that are missing are unknown.
    #[prost(message, repeated, tag = "1")]
    pub conditions: Vec<RuntimeCondition>,
}

/// Request of [`RuntimeService::status`](crate::RuntimeService::status).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct StatusRequest {
    /// Whether the answer shall tell more in `info`.
    #[prost(bool, tag = "1")]
    pub verbose: bool,
}

/// What pods of a runtime handler can do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RuntimeHandlerFeatures {
    /// Mounts that cannot be written in any depth.
    #[prost(bool, tag = "1")]
    pub recursive_read_only_mounts: bool,
    /// User namespaces of their own.
    #[prost(bool, tag = "2")]
    pub user_namespaces: bool,
}

/// A runtime handler: a way to run pods that a RuntimeClass names.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RuntimeHandler {
    /// Its name; empty for that of pods without one.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What it can do.
    #[prost(message, optional, tag = "2")]
    pub features: Option<RuntimeHandlerFeatures>,
}

/// What a runtime can do whatever the handler.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RuntimeFeatures {
    /// Policies of supplemental groups.
    #[prost(bool, tag = "1")]
    pub supplemental_groups_policy: bool,
    /// User namespaces in the network of the node (Kubernetes 1.36).
    #[prost(bool, tag = "2")]
    pub user_namespaces_host_network: bool,
    /// Further options of the mount, such as `noexec` (Kubernetes 1.37).
    #[prost(bool, tag = "3")]
    pub mount_options: bool,
}

/// Answer of [`RuntimeService::status`](crate::RuntimeService::status).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusResponse {
    /// The conditions.
    #[prost(message, optional, tag = "1")]
    pub status: Option<RuntimeStatus>,
    /// What a runtime tells besides, if it was asked to be verbose.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
    /// All runtime handlers.
    #[prost(message, repeated, tag = "3")]
    pub runtime_handlers: Vec<RuntimeHandler>,
    /// What it can do.
    #[prost(message, optional, tag = "4")]
    pub features: Option<RuntimeFeatures>,
}

/// Request of [`RuntimeService::runtime_config`](crate::RuntimeService::runtime_config).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RuntimeConfigRequest {}

/// Answer of [`RuntimeService::runtime_config`](crate::RuntimeService::runtime_config).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RuntimeConfigResponse {
    /// What only Linux has.
    #[prost(message, optional, tag = "1")]
    pub linux: Option<LinuxRuntimeConfiguration>,
}

/// How a runtime is set up on Linux.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct LinuxRuntimeConfiguration {
    /// Who makes control groups.
    #[prost(enumeration = "CgroupDriver", tag = "1")]
    pub cgroup_driver: i32,
}
