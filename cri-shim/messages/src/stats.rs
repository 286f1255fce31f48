//! Statistics of pods and containers.

use std::collections::HashMap;

use prost::Message;

use crate::{
    ContainerMetadata, FilesystemUsage, PodSandboxMetadata, UInt64Value, WindowsPodSandboxStats,
};

/// Request of [`RuntimeService::pod_sandbox_stats`](crate::RuntimeService::pod_sandbox_stats).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PodSandboxStatsRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
}

/// Answer of [`RuntimeService::pod_sandbox_stats`](crate::RuntimeService::pod_sandbox_stats).
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStatsResponse {
    /// Statistics.
    #[prost(message, optional, tag = "1")]
    pub stats: Option<PodSandboxStats>,
}

/// Of which pods statistics are listed: of those that match all of it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatsFilter {
    /// The id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Labels that it must have, each with this value.
    #[prost(map = "string, string", tag = "2")]
    pub label_selector: HashMap<String, String>,
}

/// Request of
/// [`RuntimeService::list_pod_sandbox_stats`](crate::RuntimeService::list_pod_sandbox_stats).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodSandboxStatsRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<PodSandboxStatsFilter>,
}

/// Answer of
/// [`RuntimeService::list_pod_sandbox_stats`](crate::RuntimeService::list_pod_sandbox_stats).
#[derive(Clone, PartialEq, Message)]
pub struct ListPodSandboxStatsResponse {
    /// Statistics.
    #[prost(message, repeated, tag = "1")]
    pub stats: Vec<PodSandboxStats>,
}

/// Request of
/// [`RuntimeService::stream_pod_sandbox_stats`](crate::RuntimeService::stream_pod_sandbox_stats).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamPodSandboxStatsRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<PodSandboxStatsFilter>,
}

/// One of the answers of
/// [`RuntimeService::stream_pod_sandbox_stats`](crate::RuntimeService::stream_pod_sandbox_stats).
#[derive(Clone, PartialEq, Message)]
pub struct StreamPodSandboxStatsResponse {
    /// Statistics of some of the pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_sandbox_stats: Vec<PodSandboxStats>,
}

/// The pod that statistics are about.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxAttributes {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Values to select by.
    #[prost(map = "string, string", tag = "3")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
}

/// Statistics of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStats {
    /// What the statistics are about.
    #[prost(message, optional, tag = "1")]
    pub attributes: Option<PodSandboxAttributes>,
    /// What only Linux has.
    #[prost(message, optional, tag = "2")]
    pub linux: Option<LinuxPodSandboxStats>,
    /// What only Windows has.
    #[prost(message, optional, tag = "3")]
    pub windows: Option<WindowsPodSandboxStats>,
}

/// Statistics of a pod on Linux.
#[derive(Clone, PartialEq, Message)]
pub struct LinuxPodSandboxStats {
    /// CPU time.
    #[prost(message, optional, tag = "1")]
    pub cpu: Option<CpuUsage>,
    /// Memory.
    #[prost(message, optional, tag = "2")]
    pub memory: Option<MemoryUsage>,
    /// Its network.
    #[prost(message, optional, tag = "3")]
    pub network: Option<NetworkUsage>,
    /// Processes.
    #[prost(message, optional, tag = "4")]
    pub process: Option<ProcessUsage>,
    /// Statistics of its containers.
    #[prost(message, repeated, tag = "5")]
    pub containers: Vec<ContainerStats>,
    /// Pressure by reading and writing (Kubernetes 1.34).
    #[prost(message, optional, tag = "6")]
    pub io: Option<IoUsage>,
}

/// Traffic of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct NetworkUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// The interface of the default route.
    #[prost(message, optional, tag = "2")]
    pub default_interface: Option<NetworkInterfaceUsage>,
    /// All other interfaces.
    #[prost(message, repeated, tag = "3")]
    pub interfaces: Vec<NetworkInterfaceUsage>,
}

/// Traffic of an interface, since it was made.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct NetworkInterfaceUsage {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Bytes received.
    #[prost(message, optional, tag = "2")]
    pub rx_bytes: Option<UInt64Value>,
    /// Errors while receiving.
    #[prost(message, optional, tag = "3")]
    pub rx_errors: Option<UInt64Value>,
    /// Bytes sent.
    #[prost(message, optional, tag = "4")]
    pub tx_bytes: Option<UInt64Value>,
    /// Errors while sending.
    #[prost(message, optional, tag = "5")]
    pub tx_errors: Option<UInt64Value>,
}

/// Processes of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ProcessUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// How many.
    #[prost(message, optional, tag = "2")]
    pub process_count: Option<UInt64Value>,
}

/// Request of [`RuntimeService::container_stats`](crate::RuntimeService::container_stats).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ContainerStatsRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Answer of [`RuntimeService::container_stats`](crate::RuntimeService::container_stats).
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatsResponse {
    /// Statistics.
    #[prost(message, optional, tag = "1")]
    pub stats: Option<ContainerStats>,
}

/// Request of
/// [`RuntimeService::list_container_stats`](crate::RuntimeService::list_container_stats).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListContainerStatsRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ContainerStatsFilter>,
}

/// Of which containers statistics are listed: of those that match all of it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerStatsFilter {
    /// The id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The id of the pod.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Labels that it must have, each with this value.
    #[prost(map = "string, string", tag = "3")]
    pub label_selector: HashMap<String, String>,
}

/// Answer of
/// [`RuntimeService::list_container_stats`](crate::RuntimeService::list_container_stats).
#[derive(Clone, PartialEq, Message)]
pub struct ListContainerStatsResponse {
    /// Statistics.
    #[prost(message, repeated, tag = "1")]
    pub stats: Vec<ContainerStats>,
}

/// Request of
/// [`RuntimeService::stream_container_stats`](crate::RuntimeService::stream_container_stats).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamContainerStatsRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ContainerStatsFilter>,
}

/// One of the answers of
/// [`RuntimeService::stream_container_stats`](crate::RuntimeService::stream_container_stats).
#[derive(Clone, PartialEq, Message)]
pub struct StreamContainerStatsResponse {
    /// Statistics of some of the containers.
    #[prost(message, repeated, tag = "1")]
    pub container_stats: Vec<ContainerStats>,
}

/// The container that statistics are about.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAttributes {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<ContainerMetadata>,
    /// Values to select by.
    #[prost(map = "string, string", tag = "3")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
}

/// Statistics of a container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStats {
    /// What the statistics are about.
    #[prost(message, optional, tag = "1")]
    pub attributes: Option<ContainerAttributes>,
    /// CPU time.
    #[prost(message, optional, tag = "2")]
    pub cpu: Option<CpuUsage>,
    /// Memory.
    #[prost(message, optional, tag = "3")]
    pub memory: Option<MemoryUsage>,
    /// What it has written to its own root.
    #[prost(message, optional, tag = "4")]
    pub writable_layer: Option<FilesystemUsage>,
    /// Swap space.
    #[prost(message, optional, tag = "5")]
    pub swap: Option<SwapUsage>,
    /// Pressure by reading and writing (Kubernetes 1.34).
    #[prost(message, optional, tag = "6")]
    pub io: Option<IoUsage>,
}

/// Pressure stall information of a resource.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PsiStats {
    /// When all tasks waited at the same time.
    #[prost(message, optional, tag = "1")]
    pub full: Option<PsiData>,
    /// When at least one task waited.
    #[prost(message, optional, tag = "2")]
    pub some: Option<PsiData>,
}

/// How long tasks waited for a resource.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PsiData {
    /// All of the time, in nanoseconds.
    #[prost(uint64, tag = "1")]
    pub total: u64,
    /// Share of the last 10 seconds, in percent.
    #[prost(double, tag = "2")]
    pub avg10: f64,
    /// Share of the last minute, in percent.
    #[prost(double, tag = "3")]
    pub avg60: f64,
    /// Share of the last 5 minutes, in percent.
    #[prost(double, tag = "4")]
    pub avg300: f64,
}

/// CPU time that was used.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct CpuUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// CPU time of all CPUs since the start, in nanoseconds.
    #[prost(message, optional, tag = "2")]
    pub usage_core_nano_seconds: Option<UInt64Value>,
    /// CPU time per second now, in nanoseconds.
    #[prost(message, optional, tag = "3")]
    pub usage_nano_cores: Option<UInt64Value>,
    /// Pressure stall information (Kubernetes 1.34).
    #[prost(message, optional, tag = "4")]
    pub psi: Option<PsiStats>,
}

/// Memory that is in use.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct MemoryUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// Memory that could not be freed at once, in bytes.
    #[prost(message, optional, tag = "2")]
    pub working_set_bytes: Option<UInt64Value>,
    /// Memory that may still be used, in bytes; absent without a limit.
    #[prost(message, optional, tag = "3")]
    pub available_bytes: Option<UInt64Value>,
    /// All memory, caches included, in bytes.
    #[prost(message, optional, tag = "4")]
    pub usage_bytes: Option<UInt64Value>,
    /// Anonymous memory, in bytes.
    #[prost(message, optional, tag = "5")]
    pub rss_bytes: Option<UInt64Value>,
    /// Page faults without and with a disk.
    #[prost(message, optional, tag = "6")]
    pub page_faults: Option<UInt64Value>,
    /// Page faults that read from a disk.
    #[prost(message, optional, tag = "7")]
    pub major_page_faults: Option<UInt64Value>,
    /// Pressure stall information (Kubernetes 1.34).
    #[prost(message, optional, tag = "8")]
    pub psi: Option<PsiStats>,
}

/// Pressure by reading and writing.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct IoUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// Pressure stall information (Kubernetes 1.34).
    #[prost(message, optional, tag = "2")]
    pub psi: Option<PsiStats>,
}

/// Swap space that is in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct SwapUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// Swap space that may still be used, in bytes.
    #[prost(message, optional, tag = "2")]
    pub swap_available_bytes: Option<UInt64Value>,
    /// Swap space in use, in bytes.
    #[prost(message, optional, tag = "3")]
    pub swap_usage_bytes: Option<UInt64Value>,
}
