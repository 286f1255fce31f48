//! Disks that come and go while a VM runs.

use prost::Message;

use super::VmName;

/// Plugs a claim into a VM.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PlugDiskRequest {
    /// Which VM.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the pod on the same node that keeps the claim. Its annotation
    /// `podvisor.io/attachment` says for which VM, which volume, and its serial number.
    #[prost(string, tag = "2")]
    pub pod_uid: String,
}

/// Takes a disk from a VM.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UnplugDiskRequest {
    /// Which VM.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// The serial number of the disk.
    #[prost(string, tag = "2")]
    pub serial: String,
    /// Seconds that the guest has to release it; it is taken away after them.
    #[prost(uint32, tag = "3")]
    pub limit_seconds: u32,
}

/// How a disk was taken from a VM, which has it no longer.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct UnplugDiskAnswer {
    /// The guest did not release it in time.
    #[prost(bool, tag = "1")]
    pub is_forced: bool,
}
