//! The frames by which a sandbox's process is launched.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::machine::{KernelPanic, NicKind, UserRange};
use crate::types::{GuestKind, JailLayer, JailMode, ShareUsers};

/// Version of the frames of a launch, whose two ends mostly use one executable.
pub(crate) const LAUNCH_VERSION: u32 = 5;

/// The first frame to a sandbox's process, on its stdin. With it come: the control socket, the file
/// for the record of its exit, kernel and initramfs of an agent's guest, the template's state and
/// memory, network cards, then the shared directory, the console and the log of events, each if
/// there is one. The second frame is a `GuestNetwork`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LaunchHeader {
    pub(crate) version: u32,
    /// The number of the launcher's request in the log.
    pub(crate) request: Option<u64>,
    pub(crate) id: String,
    pub(crate) hostname: String,
    pub(crate) dir: PathBuf,
    pub(crate) guest: GuestKind,
    pub(crate) vcpus: u8,
    pub(crate) max_vcpus: u8,
    pub(crate) memory: u64,
    pub(crate) growth: u64,
    pub(crate) image_slots: u8,
    pub(crate) nics: Vec<NicHeader>,
    pub(crate) has_shared_dir: bool,
    pub(crate) users: Option<UserRange>,
    #[serde(default)]
    pub(crate) share_users: ShareUsers,
    pub(crate) has_console: bool,
    pub(crate) has_events: bool,
    pub(crate) sysctls: BTreeMap<String, String>,
    pub(crate) jail: JailMode,
    /// Layers without which it must not start.
    #[serde(default)]
    pub(crate) required_layers: Vec<JailLayer>,
    /// Whether the guest's devices are on PCI.
    pub(crate) pci: bool,
    /// Whether the guest's kernel counts pressure.
    #[serde(default)]
    pub(crate) psi: bool,
    /// Whether it must not boot if it cannot be a clone.
    pub(crate) must_clone: bool,
    /// Whether the process is in a control group of its own.
    #[serde(default)]
    pub(crate) has_cgroup: bool,
    /// Whether that group lets it open no other devices than a machine needs.
    #[serde(default)]
    pub(crate) denies_devices: bool,
    /// Whether the files of a template come, too.
    pub(crate) has_template: bool,
}

/// A network card whose host's end comes with the frame.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NicHeader {
    pub(crate) kind: NicKind,
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u16,
}

/// The answer to both frames: the guest is configured, or the reason why it is not.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct LaunchReply {
    pub(crate) failed: Option<String>,
    /// It failed because the host does not let it enter its jail.
    #[serde(default)]
    pub(crate) is_jail: bool,
    /// It is a clone of the template.
    #[serde(default)]
    pub(crate) is_clone: bool,
    /// It failed because the clone of the template had no working guest.
    #[serde(default)]
    pub(crate) blames_template: bool,
    /// It failed before the guest was told of its network: no frame went through the cards.
    #[serde(default)]
    pub(crate) has_unused_cards: bool,
    /// It failed because the guest's kernel panicked.
    #[serde(default)]
    pub(crate) panic: Option<KernelPanic>,
    /// The names of the jail's layers that the host does not have.
    #[serde(default)]
    pub(crate) missing_layers: Vec<String>,
}
