//! What an administrator decides for the whole cluster.

use serde::{Deserialize, Serialize};

use crate::Quantity;

/// The machine type that podvisor writes where a user names none.
pub const MACHINE_TYPE: &str = "podvisor";

/// The architecture of the guests.
pub const ARCHITECTURE: &str = "amd64";

/// The most vCPUs that hot-plug may reach.
pub const MAX_VCPUS: i64 = 512;

/// How the default network's card reaches the pod's network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum DefaultBinding {
    /// The guest has the pod's address.
    #[default]
    Bridge,
    /// The guest has a private address behind NAT.
    Masquerade,
}

/// What is filled in where a specification says nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct ClusterDefaults {
    /// CPU request of VMs that give none; without it, there is none.
    pub cpu_request: Option<Quantity>,
    /// Eviction strategy.
    pub eviction_strategy: Option<String>,
    /// How the default network is attached.
    pub binding: DefaultBinding,
    /// CPU model; `host-model` where it is missing.
    pub cpu_model: Option<String>,
    /// Whether sockets and memory may grow while the VM runs.
    pub live_update: bool,
    /// The most sockets; four times the sockets where it is missing.
    pub max_sockets: Option<i64>,
    /// The most guest memory; four times the memory where it is missing.
    pub max_guest: Option<Quantity>,
}

/// What validation depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct ClusterConfig {
    /// Machine types that are accepted; a `*` at the end stands for any rest.
    pub machine_types: Vec<String>,
    /// CPU models beyond `host-model` and `host-passthrough` that the nodes can show.
    pub cpu_models: Vec<String>,
    /// Whether a card may be bridged to the pod network.
    pub permit_bridge_on_pod_network: bool,
    /// Whether sockets and memory may grow while the VM runs.
    pub live_update: bool,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            machine_types: [MACHINE_TYPE, "q35", "pc-q35*"].map(str::to_owned).to_vec(),
            cpu_models: Vec::new(),
            permit_bridge_on_pod_network: true,
            live_update: false,
        }
    }
}
