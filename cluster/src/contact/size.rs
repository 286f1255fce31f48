//! What the controller and a node's part know of each other about CPUs and memory that come.

use serde::{Deserialize, Serialize};

/// Has a node give a VM more CPUs or memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ResizeRequest {
    /// All CPUs that it is to have; 0 leaves them as they are.
    pub(crate) vcpus: u32,
    /// All memory that it is to have, in bytes; 0 leaves it as it is.
    pub(crate) memory: u64,
}

/// What a VM has then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ResizeAnswer {
    /// Memory that the guest has, in bytes; 0 if none was asked for.
    pub(crate) memory: u64,
}
