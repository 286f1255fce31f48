//! What the caller says of a pod that gets a network.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The name of the pod's first interface in its network namespace and in the guest.
pub const INTERFACE: &str = "eth0";

/// The pod that gets a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodIdentity {
    /// Id of its sandbox: CNI's container id.
    pub id: String,
    /// Name in Kubernetes.
    pub name: String,
    /// Namespace in Kubernetes.
    pub namespace: String,
    /// Uid in Kubernetes.
    pub uid: String,
}

/// Values that the runtime passes to plugins with a capability of that name: `portMappings`,
/// `bandwidth`, `ips`, `mac`, `dns`, ….
pub type Capabilities = serde_json::Map<String, Value>;

/// The capability of plugins that forward ports of the host.
pub(super) const PORT_MAPPINGS: &str = "portMappings";

/// A port of the host that is forwarded to one of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortMapping {
    /// The port of the host.
    pub host_port: u16,
    /// The port of the pod.
    pub pod_port: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
    /// The address of the host; empty for all addresses.
    pub host_ip: String,
}

/// Returns the capability `portMappings`, unless there are none.
pub fn port_mappings(mappings: &[PortMapping]) -> Option<(String, Value)> {
    let mappings = mappings.iter().map(|mapping| {
        json!({
            "hostPort": mapping.host_port,
            "containerPort": mapping.pod_port,
            "protocol": mapping.protocol,
            "hostIP": mapping.host_ip,
        })
    });
    let mappings: Vec<Value> = mappings.collect();
    (!mappings.is_empty()).then(|| (PORT_MAPPINGS.to_owned(), Value::Array(mappings)))
}
