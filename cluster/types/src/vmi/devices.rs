//! The list of devices (`spec.domain.devices`) and what holds for all of them.

use serde_json::Value;

use super::{Disk, Domain, Filesystem, Interface};
use crate::{Causes, FieldPath};

/// More I/O threads than this are a mistake.
const MAX_IO_THREADS: i64 = 64;

object! {
    /// Devices.
    pub struct Devices {
        /// Disks.
        pub disks: Vec<Disk>,
        /// Network cards.
        pub interfaces: Vec<Interface>,
        /// Shared directories.
        pub filesystems: Vec<Filesystem>,
        /// Attaches the pod's network where no interface is given; true by default.
        pub autoattach_pod_interface: Option<bool>,
        /// A serial console; true by default.
        pub autoattach_serial_console: Option<bool>,
        /// Writes the serial console to the pod's log.
        pub log_serial_console: Option<bool>,
        /// A balloon; true by default.
        pub autoattach_mem_balloon: Option<bool>,
        /// A vsock device.
        #[serde(rename = "autoattachVSOCK")]
        pub autoattach_vsock: Option<bool>,
        /// Refused when true.
        pub autoattach_graphics_device: Option<bool>,
        /// Refused when true.
        pub autoattach_input_device: Option<bool>,
        /// A source of randomness.
        pub rng: Option<Rng>,
        /// A queue per vCPU for each card.
        pub network_interface_multiqueue: Option<bool>,
        /// A queue per vCPU for each disk.
        pub block_multi_queue: Option<bool>,
        /// No device can be plugged in later.
        pub disable_hotplug: Option<bool>,
        /// Refused.
        pub use_virtio_transitional: Option<Value>,
        /// Refused.
        pub watchdog: Option<Value>,
        /// Refused.
        pub panic_devices: Option<Value>,
        /// Refused.
        pub inputs: Option<Value>,
        /// Refused.
        pub sound: Option<Value>,
        /// Refused.
        pub video: Option<Value>,
        /// Refused.
        pub tpm: Option<Value>,
        /// Refused.
        pub gpus: Option<Value>,
        /// Refused.
        pub host_devices: Option<Value>,
        /// Refused.
        pub client_passthrough: Option<Value>,
        /// Refused.
        pub downward_metrics: Option<Value>,
    }

    /// A source of randomness: it has no settings.
    pub struct Rng {
    }

    /// The pool of I/O threads.
    pub struct IoThreads {
        /// Number of threads of the policy `supplementalPool`.
        pub supplemental_pool_thread_count: Option<i64>,
    }
}

pub(super) fn validate(domain: &Domain, path: &FieldPath, causes: &mut Causes) {
    if let Some(policy) = &domain.reboot_policy {
        causes.one_of(
            &path.child("rebootPolicy"),
            policy,
            &["Reboot", "Terminate"],
        );
    }
    let Some(policy) = domain.io_threads_policy.as_deref() else {
        return;
    };
    causes.one_of(
        &path.child("ioThreadsPolicy"),
        policy,
        &["shared", "auto", "supplementalPool"],
    );
    if policy != "supplementalPool" {
        return;
    }
    let threads = domain.io_threads.as_ref();
    let count = threads
        .and_then(|threads| threads.supplemental_pool_thread_count)
        .unwrap_or(0);
    if !(1..=MAX_IO_THREADS).contains(&count) {
        causes.invalid(
            &path.child("ioThreads.count"),
            format_args!("is {count}, but supplementalPool needs 1 to {MAX_IO_THREADS} threads"),
        );
    }
}
