//! What is reported of a VMI (`status`).

use std::collections::BTreeMap;

use serde_json::Value;

use super::CpuTopology;
use crate::Quantity;

object! {
    /// What is reported of a VMI.
    pub struct VmiStatus {
        /// Where in its life it is.
        pub phase: Option<String>,
        /// When each phase was entered.
        pub phase_transition_timestamps: Vec<PhaseTransition>,
        /// Conditions.
        pub conditions: Vec<Condition>,
        /// Why it is in this state, in brief.
        pub reason: Option<String>,
        /// The node that it runs on.
        pub node_name: Option<String>,
        /// UIDs of its pods that live, and their nodes.
        pub active_pods: BTreeMap<String, String>,
        /// Network cards.
        pub interfaces: Vec<InterfaceStatus>,
        /// Volumes.
        pub volume_status: Vec<VolumeStatus>,
        /// Memory.
        pub memory: Option<MemoryStatus>,
        /// vCPUs.
        #[serde(rename = "currentCPUTopology")]
        pub current_cpu_topology: Option<CpuTopology>,
        /// What the guest's agent says of the guest.
        #[serde(rename = "guestOSInfo")]
        pub guest_os_info: Option<GuestOsInfo>,
        /// The latest migration.
        pub migration_state: Option<MigrationState>,
        /// How its disks migrate.
        pub migration_method: Option<String>,
        /// The node that it is to leave.
        pub evacuation_node_name: Option<String>,
        /// Quality of service of its pod.
        pub qos_class: Option<String>,
        /// The VM's image of the launcher pod; the runtime's name here.
        pub launcher_container_image_version: Option<String>,
        /// Machine type.
        pub machine: Option<super::Machine>,
        /// Whether file systems are frozen.
        pub fs_freeze_status: Option<String>,
        /// Name of the ControllerRevision that it was made from.
        pub virtual_machine_revision_name: Option<String>,
        /// CID of its vsock device.
        #[serde(rename = "VSOCKCID")]
        pub vsock_cid: Option<u32>,
        /// SELinux context of its process.
        pub selinux_context: Option<String>,
    }

    /// When a phase was entered.
    pub struct PhaseTransition {
        /// The phase.
        pub phase: String,
        /// The time, in RFC 3339.
        pub phase_transition_timestamp: Option<String>,
    }

    /// A condition.
    pub struct Condition {
        /// Its name.
        #[serde(rename = "type")]
        pub kind: String,
        /// `True`, `False` or `Unknown`.
        pub status: String,
        /// When it was looked at last.
        pub last_probe_time: Option<String>,
        /// When its status changed last.
        pub last_transition_time: Option<String>,
        /// Why, in a word.
        pub reason: Option<String>,
        /// Why, in a sentence.
        pub message: Option<String>,
    }

    /// A network card.
    pub struct InterfaceStatus {
        /// Name in the specification.
        pub name: Option<String>,
        /// Address.
        pub ip_address: Option<String>,
        /// All addresses.
        pub ip_addresses: Vec<String>,
        /// Hardware address.
        pub mac: Option<String>,
        /// Name in the guest.
        pub interface_name: Option<String>,
        /// Name in the pod.
        pub pod_interface_name: Option<String>,
        /// Who reports it: `domain`, `guest-agent`, `multus-status`.
        pub info_source: Option<String>,
        /// Queues.
        pub queue_count: Option<i32>,
        /// `up` or `down`.
        pub link_state: Option<String>,
    }

    /// A volume.
    pub struct VolumeStatus {
        /// Its name.
        pub name: String,
        /// The disk in the guest.
        pub target: Option<String>,
        /// Where in its way it is, when it is plugged.
        pub phase: Option<String>,
        /// Why, in a word.
        pub reason: Option<String>,
        /// Why, in a sentence.
        pub message: Option<String>,
        /// What is known of the claim.
        pub persistent_volume_claim_info: Option<Value>,
        /// Set on volumes that are plugged.
        pub hotplug_volume: Option<Value>,
        /// The dump of the memory, of a volume for that.
        pub memory_dump_volume: Option<Value>,
        /// Bytes of the disk.
        pub size: Option<i64>,
    }

    /// Memory.
    pub struct MemoryStatus {
        /// At boot.
        pub guest_at_boot: Option<Quantity>,
        /// Now.
        pub guest_current: Option<Quantity>,
        /// Asked for.
        pub guest_requested: Option<Quantity>,
    }

    /// What the guest's agent says of the guest.
    pub struct GuestOsInfo {
        /// Identifier of the distribution.
        pub id: Option<String>,
        /// Its name.
        pub name: Option<String>,
        /// Its name and version.
        pub pretty_name: Option<String>,
        /// Its version.
        pub version: Option<String>,
        /// Identifier of its version.
        pub version_id: Option<String>,
        /// Release of the kernel.
        pub kernel_release: Option<String>,
        /// Version of the kernel.
        pub kernel_version: Option<String>,
        /// Architecture.
        pub machine: Option<String>,
    }

    /// A migration.
    pub struct MigrationState {
        /// When memory began to move.
        pub start_timestamp: Option<String>,
        /// When it ended.
        pub end_timestamp: Option<String>,
        /// From this node.
        pub source_node: Option<String>,
        /// To this node.
        pub target_node: Option<String>,
        /// From this pod.
        pub source_pod: Option<String>,
        /// To this pod.
        pub target_pod: Option<String>,
        /// Where the target listens.
        pub target_node_address: Option<String>,
        /// `PreCopy`, `PostCopy` or `Paused`.
        pub mode: Option<String>,
        /// It is over.
        pub completed: Option<bool>,
        /// It failed.
        pub failed: Option<bool>,
        /// Why it failed.
        pub failure_reason: Option<String>,
        /// It is to end.
        pub abort_requested: Option<bool>,
        /// How far the abort is.
        pub abort_status: Option<String>,
        /// UID of the migration.
        pub migration_uid: Option<String>,
        /// Its settings.
        pub migration_configuration: Option<Value>,
        /// The policy that they come from.
        pub migration_policy_name: Option<String>,
    }
}
