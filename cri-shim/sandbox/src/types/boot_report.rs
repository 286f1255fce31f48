//! How a machine with an operating system of its own was booted, and when it got how far.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// How a container's latest machine was booted. What it says of the disk's boot entry is the
/// loader's word, which has read a disk that anybody may have made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BootReport {
    /// Counts changes, from 1 on.
    pub version: u64,
    /// The number of the container's machines: each reboot of the guest makes another one.
    pub boots: u32,
    /// What was started.
    pub way: BootWay,
    /// The title of the disk's boot entry.
    pub entry: Option<String>,
    /// The format of the entry's configuration, and where it is on the disk.
    pub config: Option<String>,
    /// The kernel's file on the disk.
    pub kernel: Option<String>,
    /// The files of its initial file system on the disk.
    pub initramfs: Option<String>,
    /// The command line of the guest's kernel.
    pub cmdline: Option<String>,
    /// When it began, in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// What has been reached, in order; the first event is the beginning.
    pub events: Vec<BootEvent>,
}

/// What a machine has started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BootWay {
    /// podvisor's loader, which starts what is on the disk.
    Loader,
    /// The kernel that was kept of the image.
    KeptKernel,
    /// A kernel of its own, apart from the disk (KubeVirt's `kernelBoot`).
    OwnKernel,
    /// A UEFI firmware, which starts what is on the disk.
    Firmware,
    /// It continues from memory that was saved, as the machine that it was.
    SavedState,
    /// It continues from the memory of a snapshot, as clones do.
    Snapshot,
    /// It has come from another host.
    Migration,
    /// Nothing yet, or what only a newer podvisor knows.
    #[default]
    #[serde(other)]
    Unknown,
}

impl BootWay {
    /// Says it in one line.
    pub fn description(self) -> &'static str {
        match self {
            Self::Loader => "by the loader, from its disk",
            Self::KeptKernel => "by the kernel that was kept of its image",
            Self::OwnKernel => "by a kernel that was given with it",
            Self::Firmware => "by a UEFI firmware, from its disk",
            Self::SavedState => "continued from its saved memory",
            Self::Snapshot => "continued from the memory of a snapshot",
            Self::Migration => "came from another host",
            Self::Unknown => "not known",
        }
    }
}

/// How far a boot got. Each phase ends with the event of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BootPhase {
    /// It was asked for.
    Begun,
    /// The image is in the store.
    Image,
    /// The VM's own disk is made.
    Disk,
    /// The network is made.
    Network,
    /// The sandbox's process runs in its jail.
    Sandbox,
    /// The kernel that the image boots is known.
    Kernel,
    /// The machine is built, and runs.
    Machine,
    /// The loader runs.
    Loader,
    /// The loader has found what the disk boots.
    Entry,
    /// The loader has started the guest's kernel.
    Handed,
    /// The guest's system has written to the console.
    Console,
    /// The guest got an address by DHCP.
    Address,
    /// The console asks for a login or a command.
    Prompt,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

impl BootPhase {
    /// Says what was reached.
    pub fn description(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Image => "image ready",
            Self::Disk => "disk made",
            Self::Network => "network made",
            Self::Sandbox => "process jailed",
            Self::Kernel => "kernel of the image known",
            Self::Machine => "machine built",
            Self::Loader => "loader started",
            Self::Entry => "boot entry found",
            Self::Handed => "kernel started by the loader",
            Self::Console => "first output of the guest",
            Self::Address => "address by DHCP",
            Self::Prompt => "prompt on the console",
            Self::Unknown => "something else",
        }
    }
}

/// Something that a boot has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BootEvent {
    /// What.
    pub phase: BootPhase,
    /// When, in nanoseconds of the host's monotonic clock, which all of its processes share.
    pub at_ns: u64,
}

impl BootEvent {
    /// Most events that a boot's beginning may bring.
    pub(crate) const MAX: usize = 16;

    /// Something that happens now.
    #[must_use]
    pub fn now(phase: BootPhase) -> Self {
        let time = clock_gettime(ClockId::Monotonic);
        let time = Duration::new(
            u64::try_from(time.tv_sec).unwrap_or(0),
            u32::try_from(time.tv_nsec).unwrap_or(0),
        );
        Self {
            phase,
            at_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl BootReport {
    /// Whether a phase was reached.
    pub fn has(&self, phase: BootPhase) -> bool {
        self.events.iter().any(|event| event.phase == phase)
    }

    /// Returns the time from the beginning to each event, in their order.
    pub fn times(&self) -> impl Iterator<Item = (BootPhase, Duration)> {
        let begin = self.events.first().map_or(0, |event| event.at_ns);
        self.events.iter().map(move |event| {
            let after = event.at_ns.saturating_sub(begin);
            (event.phase, Duration::from_nanos(after))
        })
    }
}
