//! What VMs have used. All counts are since the VM's pod or machine began, and only grow.

use prost::Message;

use super::VmName;

/// Asks for the usage of all VMs that run.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct VmUsageRequest {}

/// The usage of all VMs that run, ordered by namespace and name.
#[derive(Clone, PartialEq, Message)]
pub struct VmUsageList {
    /// They.
    #[prost(message, repeated, tag = "1")]
    pub vms: Vec<VmUsage>,
}

/// What a VM has used.
#[derive(Clone, PartialEq, Message)]
pub struct VmUsage {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// CPU time of its process: of the vCPUs and of the devices, in nanoseconds.
    #[prost(uint64, tag = "2")]
    pub cpu_ns: u64,
    /// The guest's memory in bytes.
    #[prost(uint64, tag = "3")]
    pub memory_bytes: u64,
    /// The host's memory that its process has, in bytes.
    #[prost(uint64, tag = "4")]
    pub resident_bytes: u64,
    /// Its network cards, the first one first.
    #[prost(message, repeated, tag = "5")]
    pub cards: Vec<CardUsage>,
    /// Bytes that were read from all of its disks.
    #[prost(uint64, tag = "6")]
    pub disk_read_bytes: u64,
    /// Bytes that were written to all of its disks.
    #[prost(uint64, tag = "7")]
    pub disk_write_bytes: u64,
    /// Reads from all of its disks.
    #[prost(uint64, tag = "8")]
    pub disk_reads: u64,
    /// Writes to all of its disks.
    #[prost(uint64, tag = "9")]
    pub disk_writes: u64,
}

/// What went over a network card.
#[derive(Clone, PartialEq, Message)]
pub struct CardUsage {
    /// Name of the pod's interface.
    #[prost(string, tag = "1")]
    pub name: String,
    /// To the guest.
    #[prost(message, optional, tag = "2")]
    pub received: Option<Traffic>,
    /// From the guest.
    #[prost(message, optional, tag = "3")]
    pub sent: Option<Traffic>,
}

/// One direction of a network card.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Traffic {
    /// Bytes of whole frames.
    #[prost(uint64, tag = "1")]
    pub bytes: u64,
    /// Frames.
    #[prost(uint64, tag = "2")]
    pub packets: u64,
    /// Frames with an error.
    #[prost(uint64, tag = "3")]
    pub errors: u64,
    /// Frames that there was no room for.
    #[prost(uint64, tag = "4")]
    pub dropped: u64,
}
