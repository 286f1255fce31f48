//! The resource usage of containers.

use serde::{Deserialize, Serialize};

use crate::psi::Psi;

/// Figures of a container's control group, of its processes and of its writable layer; a limit of 0
/// means none. Figures that an older sandbox does not count are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The names are the control group's, with their units.
pub struct ContainerStats {
    /// When the figures were read: nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub timestamp_ns: u64,
    pub cpu_usage_us: u64,
    pub cpu_user_us: u64,
    pub cpu_system_us: u64,
    pub cpu_throttled_us: u64,
    pub cpu_periods: u64,
    pub cpu_throttled_periods: u64,
    pub memory_usage_bytes: u64,
    /// Usage without the inactive file cache, which the kernel reclaims if needed.
    pub memory_working_set_bytes: u64,
    pub memory_limit_bytes: u64,
    pub memory_anon_bytes: u64,
    pub memory_file_bytes: u64,
    pub memory_mapped_file_bytes: u64,
    pub memory_kernel_bytes: u64,
    pub memory_peak_bytes: u64,
    /// How often the usage was about to exceed the limit.
    pub memory_limit_hits: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub oom_kills: u64,
    /// Threads, as the limit counts threads, too.
    pub pids_current: u64,
    pub pids_limit: u64,
    pub processes: u64,
    /// If there are very many descriptors and threads, the agent counts only the first ones.
    pub descriptors: u64,
    /// Soft limit of the container's own process.
    pub descriptor_limit: u64,
    pub sockets: u64,
    pub tasks_running: u64,
    pub tasks_sleeping: u64,
    pub tasks_stopped: u64,
    pub tasks_uninterruptible: u64,
    pub io_read_bytes: u64,
    pub io_write_bytes: u64,
    pub io_read_operations: u64,
    pub io_write_operations: u64,
    /// The file system with what the container writes to its root.
    pub writable_bytes: u64,
    pub writable_used_bytes: u64,
    pub writable_inodes: u64,
    pub writable_used_inodes: u64,
    /// The pressure in the container's control group.
    pub psi: Psi,
    /// The pressure in the control group above those of all the guest's containers.
    pub guest_psi: Psi,
    /// The figures of that same group; `None` for an older sandbox.
    pub guest: Option<GuestStats>,
}

/// The resource usage of all containers of a guest together. Times and counts include containers
/// that are gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // As in `ContainerStats`.
pub struct GuestStats {
    pub cpu_usage_us: u64,
    pub memory_usage_bytes: u64,
    pub memory_working_set_bytes: u64,
    pub memory_anon_bytes: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
}
