//! Pods: what they are made of, their states and the calls that make and change them.

use std::collections::HashMap;

use prost::{Enumeration, Message};
use serde::Serialize;

use crate::{
    ContainerStatus, LinuxContainerResources, LinuxSandboxSecurityContext, NamespaceOption,
    WindowsPodSandboxConfig,
};

/// A protocol of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Protocol {
    /// TCP.
    Tcp = 0,
    /// UDP.
    Udp = 1,
    /// SCTP.
    Sctp = 2,
}

/// State of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum PodSandboxState {
    /// It runs.
    SandboxReady = 0,
    /// It does not run.
    SandboxNotready = 1,
}

/// What a pod's `/etc/resolv.conf` says.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct DnsConfig {
    /// Addresses of name servers.
    #[prost(string, repeated, tag = "1")]
    pub servers: Vec<String>,
    /// Domains that names without a dot are looked for in.
    #[prost(string, repeated, tag = "2")]
    pub searches: Vec<String>,
    /// Options of the resolver.
    #[prost(string, repeated, tag = "3")]
    pub options: Vec<String>,
}

/// A port of the node that leads to a port of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct PortMapping {
    /// The protocol.
    #[prost(enumeration = "Protocol", tag = "1")]
    pub protocol: i32,
    /// The port of the pod.
    #[prost(int32, tag = "2")]
    pub container_port: i32,
    /// The port of the node; none if it is 0.
    #[prost(int32, tag = "3")]
    pub host_port: i32,
    /// The node's address that is listened on; all if it is empty.
    #[prost(string, tag = "4")]
    pub host_ip: String,
}

/// What a pod has on Linux.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct LinuxPodSandboxConfig {
    /// The control group that the pod's are made in.
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
    /// What its processes may do.
    #[prost(message, optional, tag = "2")]
    pub security_context: Option<LinuxSandboxSecurityContext>,
    /// Kernel parameters.
    #[prost(map = "string, string", tag = "3")]
    pub sysctls: HashMap<String, String>,
    /// What the pod takes besides its containers.
    #[prost(message, optional, tag = "4")]
    pub overhead: Option<LinuxContainerResources>,
    /// The sum of its containers' limits.
    #[prost(message, optional, tag = "5")]
    pub resources: Option<LinuxContainerResources>,
}

/// What a kubelet names a pod by.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct PodSandboxMetadata {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The pod's UID.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// The Kubernetes namespace.
    #[prost(string, tag = "3")]
    pub namespace: String,
    /// How often it was made anew before, from 0 on.
    #[prost(uint32, tag = "4")]
    pub attempt: u32,
}

/// What a pod is made of.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct PodSandboxConfig {
    /// Its names.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Its host name.
    #[prost(string, tag = "2")]
    pub hostname: String,
    /// The directory of its containers' logs on the node.
    #[prost(string, tag = "3")]
    pub log_directory: String,
    /// Its resolver.
    #[prost(message, optional, tag = "4")]
    pub dns_config: Option<DnsConfig>,
    /// Ports of the node that lead to it.
    #[prost(message, repeated, tag = "5")]
    pub port_mappings: Vec<PortMapping>,
    /// Values to select by.
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "7")]
    pub annotations: HashMap<String, String>,
    /// What only Linux has.
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPodSandboxConfig>,
    /// What only Windows has.
    #[prost(message, optional, tag = "9")]
    pub windows: Option<WindowsPodSandboxConfig>,
}

/// Request of [`RuntimeService::run_pod_sandbox`](crate::RuntimeService::run_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RunPodSandboxRequest {
    /// The pod.
    #[prost(message, optional, tag = "1")]
    pub config: Option<PodSandboxConfig>,
    /// The runtime handler; empty for the default.
    #[prost(string, tag = "2")]
    pub runtime_handler: String,
}

/// Answer of [`RuntimeService::run_pod_sandbox`](crate::RuntimeService::run_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RunPodSandboxResponse {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
}

/// Request of [`RuntimeService::stop_pod_sandbox`](crate::RuntimeService::stop_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StopPodSandboxRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
}

/// Answer of [`RuntimeService::stop_pod_sandbox`](crate::RuntimeService::stop_pod_sandbox).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct StopPodSandboxResponse {}

/// Request of
/// [`RuntimeService::remove_pod_sandbox`](crate::RuntimeService::remove_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RemovePodSandboxRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
}

/// Answer of [`RuntimeService::remove_pod_sandbox`](crate::RuntimeService::remove_pod_sandbox).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RemovePodSandboxResponse {}

/// Request of
/// [`RuntimeService::pod_sandbox_status`](crate::RuntimeService::pod_sandbox_status).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PodSandboxStatusRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Whether the answer shall tell more in `info`.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// A further address of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PodIp {
    /// An address.
    #[prost(string, tag = "1")]
    pub ip: String,
}

/// Addresses of a pod. A pod in the network of the node has none.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PodSandboxNetworkStatus {
    /// An address.
    #[prost(string, tag = "1")]
    pub ip: String,
    /// Further addresses, such as that of the other IP version.
    #[prost(message, repeated, tag = "2")]
    pub additional_ips: Vec<PodIp>,
}

/// Namespaces of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Namespace {
    /// With whom they are shared.
    #[prost(message, optional, tag = "2")]
    pub options: Option<NamespaceOption>,
}

/// State of a pod that only Linux has.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct LinuxPodSandboxStatus {
    /// Its namespaces.
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<Namespace>,
}

/// State of a pod.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatus {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Its state.
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    /// When it was made, in nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    /// Its network.
    #[prost(message, optional, tag = "5")]
    pub network: Option<PodSandboxNetworkStatus>,
    /// What only Linux has.
    #[prost(message, optional, tag = "6")]
    pub linux: Option<LinuxPodSandboxStatus>,
    /// Values to select by.
    #[prost(map = "string, string", tag = "7")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "8")]
    pub annotations: HashMap<String, String>,
    /// The runtime handler; empty for the default.
    #[prost(string, tag = "9")]
    pub runtime_handler: String,
}

/// Answer of [`RuntimeService::pod_sandbox_status`](crate::RuntimeService::pod_sandbox_status).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatusResponse {
    /// Its state.
    #[prost(message, optional, tag = "1")]
    pub status: Option<PodSandboxStatus>,
    /// What a runtime tells besides, if it was asked to be verbose.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
    /// States of the pod's containers.
    #[prost(message, repeated, tag = "3")]
    pub containers_statuses: Vec<ContainerStatus>,
    /// When it was looked at, in nanoseconds since 1970; set with `containers_statuses`.
    #[prost(int64, tag = "4")]
    pub timestamp: i64,
}

/// The state of a pod, which can be absent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct PodSandboxStateValue {
    /// Its state.
    #[prost(enumeration = "PodSandboxState", tag = "1")]
    pub state: i32,
}

/// Which pods are listed: those that match all of it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxFilter {
    /// The id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its state.
    #[prost(message, optional, tag = "2")]
    pub state: Option<PodSandboxStateValue>,
    /// Labels that it must have, each with this value.
    #[prost(map = "string, string", tag = "3")]
    pub label_selector: HashMap<String, String>,
}

/// Request of [`RuntimeService::list_pod_sandbox`](crate::RuntimeService::list_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodSandboxRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<PodSandboxFilter>,
}

/// A pod in a list.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandbox {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Its state.
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    /// When it was made, in nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    /// Values to select by.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "6")]
    pub annotations: HashMap<String, String>,
    /// The runtime handler; empty for the default.
    #[prost(string, tag = "7")]
    pub runtime_handler: String,
}

/// Answer of [`RuntimeService::list_pod_sandbox`](crate::RuntimeService::list_pod_sandbox).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodSandboxResponse {
    /// All pods that match.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PodSandbox>,
}

/// Request of
/// [`RuntimeService::stream_pod_sandboxes`](crate::RuntimeService::stream_pod_sandboxes).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamPodSandboxesRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<PodSandboxFilter>,
}

/// One of the answers of
/// [`RuntimeService::stream_pod_sandboxes`](crate::RuntimeService::stream_pod_sandboxes).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamPodSandboxesResponse {
    /// Some of the pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_sandboxes: Vec<PodSandbox>,
}

/// Request of
/// [`RuntimeService::update_pod_sandbox_resources`](crate::RuntimeService::update_pod_sandbox_resources).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UpdatePodSandboxResourcesRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// What the pod takes besides its containers; unchanged if absent.
    #[prost(message, optional, tag = "2")]
    pub overhead: Option<LinuxContainerResources>,
    /// The sum of its containers' limits; unchanged if absent.
    #[prost(message, optional, tag = "3")]
    pub resources: Option<LinuxContainerResources>,
}

/// Answer of
/// [`RuntimeService::update_pod_sandbox_resources`](crate::RuntimeService::update_pod_sandbox_resources).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct UpdatePodSandboxResourcesResponse {}
