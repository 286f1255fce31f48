//! Dumps of a VM's memory.

use prost::{Enumeration, Message};

use super::VmName;

/// Has the memory of a VM written to a file of a claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DumpMemoryRequest {
    /// Which VM.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the pod on the same node that keeps the claim. Its annotation
    /// `podvisor.io/attachment` says for which VM and which volume, and that it is for dumps.
    #[prost(string, tag = "2")]
    pub pod_uid: String,
    /// The name of the file, by which the dump is told from others.
    #[prost(string, tag = "3")]
    pub file: String,
    /// Seconds for which the guest may stand still; 0 for the node's default.
    #[prost(uint32, tag = "4")]
    pub limit_seconds: u32,
}

/// How far a dump is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DumpMemoryAnswer {
    /// How far it is.
    #[prost(enumeration = "DumpState", tag = "1")]
    pub state: i32,
    /// Bytes of memory that were passed.
    #[prost(uint64, tag = "2")]
    pub done: u64,
    /// Bytes of all memory; 0 before it is known.
    #[prost(uint64, tag = "3")]
    pub total: u64,
    /// Why it failed.
    #[prost(string, tag = "4")]
    pub message: String,
}

/// How far a dump is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum DumpState {
    /// The node is newer than its client.
    Unknown = 0,
    /// It is being written, and the guest stands still.
    Writing = 1,
    /// The file is there, whole and on the disk.
    Done = 2,
    /// There is no such file.
    Failed = 3,
}
