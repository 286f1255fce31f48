//! How a VM was booted.

use prost::Message;

/// How the latest machine of a VM was booted, and how far it got. What it says of a boot entry is
/// the word of the disk's files.
#[derive(Clone, PartialEq, Message)]
pub struct BootInfo {
    /// One word: `loader`, `keptKernel`, `ownKernel`, `savedState`, `snapshot`, `migration`,
    /// `unknown`.
    #[prost(string, tag = "1")]
    pub way: String,
    /// The same for people.
    #[prost(string, tag = "2")]
    pub description: String,
    /// Title of the disk's boot entry; empty if none is known.
    #[prost(string, tag = "3")]
    pub entry: String,
    /// Format and place of the entry's configuration.
    #[prost(string, tag = "4")]
    pub config: String,
    /// The kernel's file on the disk.
    #[prost(string, tag = "5")]
    pub kernel: String,
    /// The files of its initial file system on the disk.
    #[prost(string, tag = "6")]
    pub initramfs: String,
    /// The kernel's command line.
    #[prost(string, tag = "7")]
    pub cmdline: String,
    /// The number of the VM's machines: each reboot of the guest makes another one.
    #[prost(uint32, tag = "8")]
    pub boots: u32,
    /// When the latest one began, in nanoseconds since 1970.
    #[prost(uint64, tag = "9")]
    pub started_at_ns: u64,
    /// What it has reached, in order.
    #[prost(message, repeated, tag = "10")]
    pub phases: Vec<BootPhase>,
}

/// Something that a boot has reached.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BootPhase {
    /// One word: `begun`, `machine`, `loader`, `entry`, `handed`, `console`, `address`, `prompt`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Nanoseconds since the beginning.
    #[prost(uint64, tag = "2")]
    pub after_ns: u64,
}
