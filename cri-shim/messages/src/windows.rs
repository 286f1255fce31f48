//! What only pods on Windows have. It is here so that a message that is read and written again
//! keeps it.

use prost::Message;
use serde::Serialize;

use crate::{ContainerAttributes, FilesystemIdentifier, NamespaceMode, UInt64Value};

/// Statistics of a pod on Windows.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct WindowsPodSandboxStats {
    /// CPU time.
    #[prost(message, optional, tag = "1")]
    pub cpu: Option<WindowsCpuUsage>,
    /// Memory.
    #[prost(message, optional, tag = "2")]
    pub memory: Option<WindowsMemoryUsage>,
    /// Its network.
    #[prost(message, optional, tag = "3")]
    pub network: Option<WindowsNetworkUsage>,
    /// Processes.
    #[prost(message, optional, tag = "4")]
    pub process: Option<WindowsProcessUsage>,
    /// Statistics of its containers.
    #[prost(message, repeated, tag = "5")]
    pub containers: Vec<WindowsContainerStats>,
}

/// Traffic of a pod on Windows.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct WindowsNetworkUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// The interface of the default route.
    #[prost(message, optional, tag = "2")]
    pub default_interface: Option<WindowsNetworkInterfaceUsage>,
    /// All other interfaces.
    #[prost(message, repeated, tag = "3")]
    pub interfaces: Vec<WindowsNetworkInterfaceUsage>,
}

/// Traffic of an interface on Windows, since it was made.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct WindowsNetworkInterfaceUsage {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Bytes received.
    #[prost(message, optional, tag = "2")]
    pub rx_bytes: Option<UInt64Value>,
    /// Received packets that were dropped.
    #[prost(message, optional, tag = "3")]
    pub rx_packets_dropped: Option<UInt64Value>,
    /// Bytes sent.
    #[prost(message, optional, tag = "4")]
    pub tx_bytes: Option<UInt64Value>,
    /// Packets that were dropped and not sent.
    #[prost(message, optional, tag = "5")]
    pub tx_packets_dropped: Option<UInt64Value>,
}

/// Processes of a pod on Windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct WindowsProcessUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// How many.
    #[prost(message, optional, tag = "2")]
    pub process_count: Option<UInt64Value>,
}

/// Which namespaces a pod on Windows shares.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsNamespaceOption {
    /// The network namespace.
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub network: i32,
}

/// What the processes of a pod on Windows may do.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsSandboxSecurityContext {
    /// The user.
    #[prost(string, tag = "1")]
    pub run_as_username: String,
    /// Description of a managed service account.
    #[prost(string, tag = "2")]
    pub credential_spec: String,
    /// Whether it runs on the node itself.
    #[prost(bool, tag = "3")]
    pub host_process: bool,
    /// Its namespaces.
    #[prost(message, optional, tag = "4")]
    pub namespace_options: Option<WindowsNamespaceOption>,
}

/// What a pod has on Windows.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsPodSandboxConfig {
    /// What its processes may do.
    #[prost(message, optional, tag = "1")]
    pub security_context: Option<WindowsSandboxSecurityContext>,
}

/// What the processes of a container on Windows may do.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsContainerSecurityContext {
    /// The user.
    #[prost(string, tag = "1")]
    pub run_as_username: String,
    /// Description of a managed service account.
    #[prost(string, tag = "2")]
    pub credential_spec: String,
    /// Whether it runs on the node itself.
    #[prost(bool, tag = "3")]
    pub host_process: bool,
}

/// What a container has on Windows.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsContainerConfig {
    /// Limits.
    #[prost(message, optional, tag = "1")]
    pub resources: Option<WindowsContainerResources>,
    /// What its processes may do.
    #[prost(message, optional, tag = "2")]
    pub security_context: Option<WindowsContainerSecurityContext>,
}

/// Limits of a container on Windows.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsContainerResources {
    /// Weight among others, 1024 by default.
    #[prost(int64, tag = "1")]
    pub cpu_shares: i64,
    /// Number of CPUs.
    #[prost(int64, tag = "2")]
    pub cpu_count: i64,
    /// Share of all CPUs, in hundredths of a percent.
    #[prost(int64, tag = "3")]
    pub cpu_maximum: i64,
    /// Most memory, in bytes.
    #[prost(int64, tag = "4")]
    pub memory_limit_in_bytes: i64,
    /// Size of its root, in bytes.
    #[prost(int64, tag = "5")]
    pub rootfs_size_in_bytes: i64,
    /// CPUs that it may run on.
    #[prost(message, repeated, tag = "6")]
    pub affinity_cpus: Vec<WindowsCpuGroupAffinity>,
}

/// CPUs of a processor group on Windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message, Serialize)]
pub struct WindowsCpuGroupAffinity {
    /// A bit for each CPU of the group.
    #[prost(uint64, tag = "1")]
    pub cpu_mask: u64,
    /// Number of the processor group.
    #[prost(uint32, tag = "2")]
    pub cpu_group: u32,
}

/// How much of a file system is in use on Windows.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct WindowsFilesystemUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// The file system.
    #[prost(message, optional, tag = "2")]
    pub fs_id: Option<FilesystemIdentifier>,
    /// Bytes in use.
    #[prost(message, optional, tag = "3")]
    pub used_bytes: Option<UInt64Value>,
}

/// Statistics of a container on Windows.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct WindowsContainerStats {
    /// What the statistics are about.
    #[prost(message, optional, tag = "1")]
    pub attributes: Option<ContainerAttributes>,
    /// CPU time.
    #[prost(message, optional, tag = "2")]
    pub cpu: Option<WindowsCpuUsage>,
    /// Memory.
    #[prost(message, optional, tag = "3")]
    pub memory: Option<WindowsMemoryUsage>,
    /// What it has written to its own root.
    #[prost(message, optional, tag = "4")]
    pub writable_layer: Option<WindowsFilesystemUsage>,
}

/// CPU time that was used on Windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct WindowsCpuUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// CPU time of all CPUs since the start, in nanoseconds.
    #[prost(message, optional, tag = "2")]
    pub usage_core_nano_seconds: Option<UInt64Value>,
    /// CPU time per second now, in nanoseconds.
    #[prost(message, optional, tag = "3")]
    pub usage_nano_cores: Option<UInt64Value>,
}

/// Memory that is in use on Windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct WindowsMemoryUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// Memory that could not be freed at once, in bytes.
    #[prost(message, optional, tag = "2")]
    pub working_set_bytes: Option<UInt64Value>,
    /// Memory that may still be used, in bytes; absent without a limit.
    #[prost(message, optional, tag = "3")]
    pub available_bytes: Option<UInt64Value>,
    /// Page faults without and with a disk.
    #[prost(message, optional, tag = "4")]
    pub page_faults: Option<UInt64Value>,
    /// Memory that is committed, in bytes.
    #[prost(message, optional, tag = "5")]
    pub commit_memory_bytes: Option<UInt64Value>,
}
