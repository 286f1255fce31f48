//! What the controller of migrations and a node's part know of each other.

use serde::{Deserialize, Serialize};

/// What a node says of a VM and of one migration of it: the answer of `podvisor-cluster node`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeReport {
    /// The node's part waits for the other node's connection.
    pub is_expected: bool,
    /// The migration, if the VM has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationReport>,
}

/// How far a migration is, as a node sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationReport {
    /// How far it is.
    pub state: NodeState,
    /// Why, for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Bytes of memory and local disks.
    pub bytes_total: u64,
    /// Bytes that are still to be sent.
    pub bytes_left: u64,
    /// For how long the guest stood still, in nanoseconds.
    pub downtime_ns: u64,
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeState {
    /// The target waits.
    Waiting,
    /// The source sends, and the guest runs.
    Sending,
    /// The target receives.
    Receiving,
    /// The guest stands still.
    HandingOver,
    /// The source has given the VM away and knows no more.
    InDoubt,
    /// It runs at the target.
    Done,
    /// It does not.
    Failed,
    /// It does not, because it was asked not to.
    Cancelled,
    /// A state of later nodes.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Tells a target's node whose connection it is to take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExpectRequest {
    /// The SHA-256 of the certificate of the source's node.
    pub(crate) certificate: String,
}

/// Has a source's node send a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SendRequest {
    /// Where the target's node listens.
    pub(crate) address: std::net::SocketAddr,
    /// The SHA-256 of its certificate.
    pub(crate) certificate: String,
    /// Most bytes per second while the guest runs; 0 for no limit.
    #[serde(default)]
    pub(crate) bandwidth: u64,
    /// Whether a guest that writes too fast is slowed down.
    #[serde(default)]
    pub(crate) auto_converge: bool,
    /// Whether the guest may stand still for as long as it takes.
    #[serde(default)]
    pub(crate) force: bool,
    /// Seconds without anything sent after which it fails.
    #[serde(default)]
    pub(crate) progress_timeout: u32,
    /// Seconds after which it fails.
    #[serde(default)]
    pub(crate) completion_timeout: u32,
}

/// Says where a VM in doubt runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResolveRequest {
    /// At the source.
    pub(crate) run: bool,
}
