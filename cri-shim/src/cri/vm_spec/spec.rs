//! What a machine is to be, wherever that was written.

use podvisor_cloud_init::{Form, UserData};
use serde::{Deserialize, Serialize};

/// Virtual CPUs of a machine that asks for no number.
pub(super) const DEFAULT_VCPUS: u8 = 1;

/// The unit of a machine's memory, in bytes.
pub(in crate::cri) const MEMORY_UNIT: u64 = 1 << 20;

/// What starts the system on a machine's disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Booter {
    /// podvisor's loader.
    #[default]
    Loader,
    /// The node's UEFI firmware.
    Firmware,
}

/// A machine, as its user wants it. Its image and its memory are its container's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmSpec {
    /// Virtual CPUs.
    pub(crate) vcpus: u8,
    /// Bytes of the root disk; `None`, and anything smaller than the image, is the image's size.
    pub(crate) root_size: Option<u64>,
    /// What starts its system.
    pub(crate) booter: Booter,
    /// The machine's identity; `None`: made from its pod's id.
    pub(crate) uuid: Option<[u8; 16]>,
    /// How cloud-init gets its data.
    pub(crate) form: Form,
    /// A mapping in YAML whose keys win over those that are generated.
    pub(crate) meta_data: Option<String>,
    /// The user's configuration for cloud-init.
    pub(crate) user_data: UserData,
    /// Keys with which the default user can log in.
    pub(crate) ssh_keys: Vec<String>,
    /// The guest is told nothing about its network: it asks by DHCP.
    pub(crate) force_dhcp: bool,
    /// podvisor's guest agent is installed by cloud-init.
    pub(crate) installs_agent: bool,
}

impl Default for VmSpec {
    fn default() -> Self {
        Self {
            vcpus: DEFAULT_VCPUS,
            root_size: None,
            booter: Booter::Loader,
            uuid: None,
            form: Form::default(),
            meta_data: None,
            user_data: UserData::None,
            ssh_keys: Vec::new(),
            force_dhcp: false,
            installs_agent: false,
        }
    }
}
