//! The configuration of a machine whose guest has an operating system of its own.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use podvisor_network::cni::DhcpServer;

use super::{BootEvent, IncomingMachine};
use crate::machine::{
    BootProgram, KeptKernel, MachineDisk, MachineIdentity, MachineShare, SavedMachine,
};

/// A machine to be booted in a sandbox whose guest has an operating system of its own. Its life is
/// that of a container: it has a log, can be attached to, and ends with an exit code.
#[derive(Debug)]
pub struct BootMachine {
    /// Names the container: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
    pub id: String,
    /// Kernel to boot, an ELF vmlinux or a bzImage, open for reading: the loader's, or the guest's
    /// own; or a firmware.
    pub kernel: File,
    /// Which of them `kernel` is.
    pub program: BootProgram,
    /// Its initial file system.
    pub initramfs: Option<File>,
    /// Its command line.
    pub cmdline: String,
    /// The machine's UUID, by which its system knows it (DMI).
    pub uuid: Option<[u8; 16]>,
    /// What else its firmware tables say of the machine.
    pub identity: MachineIdentity,
    /// Virtual CPUs at boot.
    pub vcpus: u8,
    /// Most virtual CPUs that [`SandboxClient::set_vcpus`](crate::SandboxClient::set_vcpus) may
    /// plug in while it runs; no more than `vcpus` if it is less.
    pub max_vcpus: u8,
    /// Memory in bytes; at most what the sandbox was launched for, whose control group limits it.
    pub memory: u64,
    /// Bytes that [`SandboxClient::grow`](crate::SandboxClient::grow) may plug in while it runs: a
    /// multiple of 128 MiB, at most what the sandbox was launched for.
    pub growth: u64,
    /// Bytes of them that are plugged in from the start.
    pub grown: u64,
    /// Disks, the first of which is `/dev/vda`; at most [`MAX_DISKS`](Self::MAX_DISKS).
    pub disks: Vec<MachineDisk>,
    /// Disks behind them that can be unplugged, as if they had been plugged in. For a saved machine
    /// they are those that it was saved with, in that order.
    pub plugged: Vec<MachineDisk>,
    /// Directories that the guest mounts by their tags, of the directory that the sandbox was
    /// launched with ([`LaunchConfig::shared_dir`](crate::LaunchConfig::shared_dir)); at most
    /// [`MAX_SHARES`](Self::MAX_SHARES). A machine with shares is not saved and does not move.
    pub shares: Vec<MachineShare>,
    /// DHCP servers of its cards, which the sandbox's process runs from now on. They replace those
    /// of the machine before.
    pub dhcp: Vec<DhcpServer>,
    /// How long podvisor's loader may take until its first line, if `kernel` is its. Its kernel
    /// looks for partitions before that, and hangs with a disk that does not answer.
    pub loader_limit: Option<Duration>,
    /// A guest that reboots by itself has ended, with exit code 0, instead of being booted again.
    pub ends_at_reboot: bool,
    /// The kernel of the image, which the first machine starts in place of `kernel`. The disk must
    /// be as the image has it.
    pub kept: Option<KeptKernel>,
    /// A saved machine with the same vCPUs, memory, disks and cards, which continues instead of a
    /// boot. `kernel` is what the guest's next reboot boots.
    pub saved: Option<SavedMachine>,
    /// It is not booted: it comes from another sandbox, by
    /// [`SandboxClient::receive_machine`](crate::SandboxClient::receive_machine).
    pub incoming: Option<IncomingMachine>,
    /// There is no machine: the container runs until it is stopped, and keeps what its pod has.
    pub is_idle: bool,
    /// What came before, for the report of the boot
    /// ([`SandboxClient::boot_report`](crate::SandboxClient::boot_report)): it begins with the
    /// first of these, or with the request. Some 16 are kept.
    pub before: Vec<BootEvent>,
    /// The file for the serial console's output, in the format of CRI's logs; opened for appending.
    pub log: Option<OwnedFd>,
}

impl BootMachine {
    /// Most disks of a machine.
    pub const MAX_DISKS: usize = 20;

    /// Most disks with those that are plugged in: more fit on no bus.
    pub const MOST_DISKS: usize = 31;

    /// Most shared directories of a machine.
    pub const MAX_SHARES: usize = 8;

    /// A limit for the loader that is long enough for a busy host.
    pub const LOADER_LIMIT: Duration = Duration::from_secs(180);

    /// Creates the configuration of a machine with this kernel, one vCPU, 1 GiB of memory, nothing
    /// that may be plugged in, no disk, no share, no DHCP server, no limit for a loader, no kept
    /// kernel, and no log, which boots.
    pub fn new(id: impl Into<String>, kernel: File) -> Self {
        Self {
            id: id.into(),
            kernel,
            program: BootProgram::Kernel,
            initramfs: None,
            cmdline: String::new(),
            uuid: None,
            identity: MachineIdentity::default(),
            vcpus: 1,
            max_vcpus: 1,
            memory: 1 << 30,
            growth: 0,
            grown: 0,
            disks: Vec::new(),
            plugged: Vec::new(),
            shares: Vec::new(),
            dhcp: Vec::new(),
            loader_limit: None,
            ends_at_reboot: false,
            kept: None,
            saved: None,
            incoming: None,
            is_idle: false,
            before: Vec::new(),
            log: None,
        }
    }
}
