//! CPUs and memory that come while a VM runs.

use prost::Message;

use super::VmName;

/// Gives a VM more CPUs or memory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ResizeVmRequest {
    /// Which VM.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// All CPUs that it is to have; 0 leaves them as they are.
    #[prost(uint32, tag = "2")]
    pub vcpus: u32,
    /// All memory that it is to have, in bytes; 0 leaves it as it is.
    #[prost(uint64, tag = "3")]
    pub memory: u64,
}

/// What a VM has then. Its guest may take a while to use it.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ResizeVmAnswer {
    /// Memory that the guest has, in bytes; 0 if none was asked for. Less than was asked for if its
    /// driver has not taken all.
    #[prost(uint64, tag = "1")]
    pub memory: u64,
}
