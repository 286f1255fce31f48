//! What the controller and a node's part know of each other about disks that come and go, and about
//! dumps of memory.

use serde::{Deserialize, Serialize};

/// Has a node plug a claim into a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlugRequest {
    /// Unique id of the pod that keeps it.
    pub(crate) pod_uid: String,
}

/// Has a node take a disk from a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UnplugRequest {
    /// Its serial number.
    pub(crate) serial: String,
    /// Seconds that the guest has to release it.
    pub(crate) limit_seconds: u32,
}

/// How a disk was taken from a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct UnplugAnswer {
    /// The guest did not release it in time.
    pub(crate) is_forced: bool,
}

/// Has a node dump a VM's memory to a claim, or say how far that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DumpRequest {
    /// Unique id of the pod that keeps the claim.
    pub(crate) pod_uid: String,
    /// The name of the file.
    pub(crate) file: String,
}

/// How far a dump is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DumpAnswer {
    /// How far it is.
    pub(crate) state: DumpState,
    /// Bytes of memory that were passed, of all.
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Why it failed.
    pub(crate) message: String,
}

/// How far a dump is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DumpState {
    #[default]
    Writing,
    Done,
    Failed,
}
