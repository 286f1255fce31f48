//! Instance types and preferences: CPUs and memory that several VMs share, and what their guests
//! like best. They are applied to the template of a VM when it starts.
//!
//! An instance type sets fields, which the VM must not set as well: each such field is a conflict.
//! A preference fills in what nothing else says.

mod apply;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    Quantity,
    vmi::{CpuFeature, Hugepages, IoThreads, Rng},
};

pub use apply::apply;

/// The API group.
pub const GROUP: &str = "instancetype.kubevirt.io";

/// The kinds of instance types: of a namespace, and of the cluster, which is meant without a kind.
pub const INSTANCETYPES: [&str; 2] = [
    "VirtualMachineInstancetype",
    "VirtualMachineClusterInstancetype",
];

/// The kinds of preferences: of a namespace, and of the cluster, which is meant without a kind.
pub const PREFERENCES: [&str; 2] = [
    "VirtualMachinePreference",
    "VirtualMachineClusterPreference",
];

object! {
    /// CPUs, memory and where they may be (`spec` of an instance type).
    pub struct InstancetypeSpec {
        /// vCPUs.
        pub cpu: InstancetypeCpu,
        /// Memory.
        pub memory: InstancetypeMemory,
        /// How disks share I/O threads.
        pub io_threads_policy: Option<String>,
        /// The pool of I/O threads.
        pub io_threads: Option<IoThreads>,
        /// Labels of the nodes that may run it.
        pub node_selector: BTreeMap<String, String>,
        /// As a pod's.
        pub scheduler_name: Option<String>,
        /// Annotations of its VMIs.
        pub annotations: BTreeMap<String, String>,
        /// Refused by each VM that uses it.
        pub gpus: Option<Value>,
        /// Refused by each VM that uses it.
        pub host_devices: Option<Value>,
        /// Refused by each VM that uses it.
        pub launch_security: Option<Value>,
    }

    /// vCPUs of an instance type.
    pub struct InstancetypeCpu {
        /// How many.
        pub guest: Option<i64>,
        /// What CPU the guest sees.
        pub model: Option<String>,
        /// How many sockets may be reached while it runs.
        pub max_sockets: Option<i64>,
        /// Pins each vCPU to a CPU of its own.
        #[serde(rename = "dedicatedCPUPlacement")]
        pub dedicated_cpu_placement: Option<bool>,
        /// Refused by each VM that uses it.
        pub isolate_emulator_thread: Option<Value>,
        /// Refused by each VM that uses it.
        pub realtime: Option<Value>,
        /// Refused by each VM that uses it.
        pub numa: Option<Value>,
    }

    /// Memory of an instance type.
    pub struct InstancetypeMemory {
        /// What the guest sees.
        pub guest: Option<Quantity>,
        /// What the guest may grow to while it runs.
        pub max_guest: Option<Quantity>,
        /// Backs it by huge pages.
        pub hugepages: Option<Hugepages>,
        /// How much of it is not asked of the node.
        pub overcommit_percent: Option<i64>,
    }

    /// What a guest likes best (`spec` of a preference).
    ///
    /// What podvisor does not have (a bus, a firmware) is not applied: guests that podvisor runs
    /// do without it.
    pub struct PreferenceSpec {
        /// vCPUs.
        pub cpu: Option<CpuPreference>,
        /// Devices.
        pub devices: Option<DevicePreference>,
        /// What a VM needs at least.
        pub requirements: Option<Requirements>,
        /// Subdomain of the host name.
        pub preferred_subdomain: Option<String>,
        /// Seconds between the request to shut down and the kill.
        pub preferred_termination_grace_period_seconds: Option<i64>,
        /// Annotations of its VMIs.
        pub annotations: BTreeMap<String, String>,
        /// How many cores each socket has where vCPUs are spread, the older name.
        pub prefer_spread_socket_to_core_ratio: Option<i64>,
        /// Not applied.
        pub clock: Option<Value>,
        /// Not applied.
        pub features: Option<Value>,
        /// Not applied.
        pub firmware: Option<Value>,
        /// Not applied.
        pub machine: Option<Value>,
        /// Not applied.
        pub volumes: Option<Value>,
        /// Not applied.
        pub preferred_architecture: Option<String>,
    }

    /// vCPUs that a guest likes best.
    pub struct CpuPreference {
        /// Of what there are as many as vCPUs: `sockets`, `cores`, `threads`, `spread`, `any`.
        #[serde(rename = "preferredCPUTopology")]
        pub preferred_cpu_topology: Option<String>,
        /// How vCPUs are spread.
        pub spread_options: Option<SpreadOptions>,
        /// Features of the CPU.
        #[serde(rename = "preferredCPUFeatures")]
        pub preferred_cpu_features: Vec<CpuFeature>,
    }

    /// How vCPUs are spread.
    pub struct SpreadOptions {
        /// Over what: `SocketsCores`, `SocketsCoresThreads`, `CoresThreads`.
        pub across: Option<String>,
        /// How many cores each socket has; two by default.
        pub ratio: Option<i64>,
    }

    /// Devices that a guest likes best. Others of this name are not applied.
    pub struct DevicePreference {
        /// A balloon.
        pub preferred_autoattach_mem_balloon: Option<bool>,
        /// The pod's network where no interface is given.
        pub preferred_autoattach_pod_interface: Option<bool>,
        /// A serial console.
        pub preferred_autoattach_serial_console: Option<bool>,
        /// A queue per vCPU for each disk.
        pub preferred_block_multi_queue: Option<bool>,
        /// A queue per vCPU for each card.
        pub preferred_network_interface_multi_queue: Option<bool>,
        /// A source of randomness.
        pub preferred_rng: Option<Rng>,
    }

    /// What a VM needs at least.
    pub struct Requirements {
        /// vCPUs.
        pub cpu: Option<CpuRequirement>,
        /// Memory.
        pub memory: Option<MemoryRequirement>,
    }

    /// vCPUs that a VM needs at least.
    pub struct CpuRequirement {
        /// How many.
        pub guest: Option<i64>,
    }

    /// Memory that a VM needs at least.
    pub struct MemoryRequirement {
        /// How much.
        pub guest: Option<Quantity>,
    }
}
