//! What a sandbox is made of and what it tells: the types of its face. None of them is the
//! agent's or the library's, so that who uses a sandbox needs neither.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use oci_spec::runtime::{Process, Spec};
use serde::{Deserialize, Serialize};

use super::cgroup::DEFAULT_CGROUP_PARENT;
use super::error::printable;
use super::psi::Psi;
use crate::machine::{KernelPanic, MachineExit, NicKind, Transport, UserRange};

/// Longest host name, in bytes.
const HOSTNAME_MAX: usize = 64;

/// What [`SandboxClient::launch`](super::SandboxClient::launch) makes a sandbox of.
#[derive(Debug)]
pub struct LaunchConfig {
    /// Names the sandbox: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
    pub id: String,
    /// The guest's host name, at most 64 bytes.
    pub hostname: String,
    /// The sandbox's own directory: it exists, belongs to this user and is of mode 0700. Its
    /// path is at most 90 bytes long, because sockets are made in it.
    pub dir: PathBuf,
    /// Kernel to boot, an ELF vmlinux or a bzImage.
    pub kernel: PathBuf,
    /// Initramfs that holds the agent.
    pub initramfs: PathBuf,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// As many as [`SandboxClient::set_vcpus`](super::SandboxClient::set_vcpus) may ask for while
    /// it runs; not fewer than `vcpus`.
    pub max_vcpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that [`SandboxClient::grow`](super::SandboxClient::grow) may add while it runs: a
    /// multiple of [`GROWTH_UNIT`](crate::machine::GROWTH_UNIT).
    pub growth: u64,
    /// How many different images the sandbox's containers may have at once.
    pub image_slots: u8,
    /// Network cards.
    pub nics: Vec<NicConfig>,
    /// The directory that the guest sees as `/run/podvisor/shared`, with what is mounted below
    /// it, and what will be when it [passes its mounts on](super::jail::pass_on_mounts).
    pub shared_dir: Option<PathBuf>,
    /// Users of the guest that are the host's from 0 on in what is shared, as those of containers
    /// in a user namespace with these ids; `None`: all are the host's with the same numbers.
    pub users: Option<UserRange>,
    /// File for what the guest's kernel prints; a console makes the boot slower.
    pub console: Option<PathBuf>,
    /// Where starts and ends of containers are noted, opened for appending: lines that
    /// [`Event::parse`](super::Event::parse) reads.
    pub events: Option<File>,
    /// The guest's kernel parameters by their dotted names.
    pub sysctls: BTreeMap<String, String>,
    /// The bus of the guest's devices. A clone has that of its template, which is looked for with
    /// the one that is asked for.
    pub transport: Transport,
    /// Whether the guest's kernel counts pressure ([`Psi`]). A clone's does as that of its
    /// template, which is looked for with what is asked for.
    pub psi: bool,
    /// Whether the process is jailed.
    pub jail: JailMode,
    /// Where templates are kept, machines that have booted already: the sandbox begins as a clone
    /// of the one that is like it, and makes one where there is none. `None`: it boots.
    pub templates: Option<PathBuf>,
    /// The directory of a snapshot of which the sandbox is a clone, or is not at all. Kernel,
    /// vCPUs, memory and kinds of devices are the snapshot's then.
    pub snapshot: Option<PathBuf>,
    /// The control group (v2) below which the sandbox gets its own, as a path from the
    /// hierarchy's root; `None`: it stays in its launcher's. Where the host has no cgroup v2 or
    /// it cannot be written, the sandbox does without and says why in its log.
    pub cgroup_parent: Option<String>,
}

impl LaunchConfig {
    /// A sandbox of this id in a directory of its own: named like its id, with one vCPU, 256 MiB,
    /// room for one image, jailed, below [`DEFAULT_CGROUP_PARENT`], without a network, and by
    /// booting.
    pub fn new(
        id: impl Into<String>,
        dir: impl Into<PathBuf>,
        kernel: impl Into<PathBuf>,
        initramfs: impl Into<PathBuf>,
    ) -> Self {
        let id = id.into();
        Self {
            hostname: id.chars().take(HOSTNAME_MAX).collect(),
            id,
            dir: dir.into(),
            kernel: kernel.into(),
            initramfs: initramfs.into(),
            vcpus: 1,
            max_vcpus: 1,
            memory: 256 << 20,
            growth: 0,
            image_slots: 1,
            nics: Vec::new(),
            shared_dir: None,
            users: None,
            console: None,
            events: None,
            sysctls: BTreeMap::new(),
            transport: Transport::Mmio,
            psi: false,
            jail: JailMode::Enforced,
            templates: None,
            snapshot: None,
            cgroup_parent: Some(DEFAULT_CGROUP_PARENT.to_owned()),
        }
    }
}

/// Whether a sandbox's process is jailed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum JailMode {
    /// Namespaces, an identity of its own, Landlock and seccomp; what of it the host refuses
    /// fails the launch.
    #[default]
    Enforced,
    /// The process has all that its launcher has, but for the limits of its control group.
    Disabled,
}

/// A network card.
#[derive(Debug)]
pub struct NicConfig {
    /// What the host's end is.
    pub kind: NicKind,
    /// The host's end.
    pub fd: OwnedFd,
    /// The guest's hardware address.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
}

/// The guest's network configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The interfaces, in the order of the cards: each is found by its hardware address, and where
    /// no card has that yet, is the card at its place.
    pub interfaces: Vec<Interface>,
    /// The routes, in the order in which they are added.
    pub routes: Vec<Route>,
    /// Neighbours that are there for good.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
}

/// An interface in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// The name that it gets, such as `eth0`.
    pub name: String,
    /// Which card it is.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
    /// Addresses with their prefix lengths, such as `10.0.0.2/24`.
    pub addresses: Vec<String>,
}

/// A route in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// A prefix such as `10.1.0.0/16` or `0.0.0.0/0`.
    pub destination: String,
    /// The next hop; none means that the destination is on the link.
    pub gateway: Option<String>,
    /// The interface's name.
    pub interface: String,
}

/// A static neighbour of the guest's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: String,
    /// The hardware address that has it.
    pub mac: [u8; 6],
    /// The interface's name.
    pub interface: String,
}

/// A container to be made.
#[derive(Debug)]
pub struct CreateContainer {
    /// Names the container: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
    pub id: String,
    /// The image as an EROFS file, open for reading. Its lock is kept while the image is used.
    pub image: OwnedFd,
    /// The image's digest, `sha256:HEX` or `HEX`: containers of one digest share a disk.
    pub image_digest: String,
    /// Images that the specification mounts, each with its `image_source` as
    /// the mount's source.
    pub volumes: Vec<ImageVolume>,
    /// Writes to the root filesystem are refused.
    pub readonly_rootfs: bool,
    /// The OCI runtime specification, at most 3 MiB as JSON. `root.path` is the agent's to
    /// fill, and the numbers of `process.user` unless [`Self::user`] is empty.
    pub spec: Spec,
    /// `user[:group]` as names or numbers of the image; empty: as the specification says.
    pub user: String,
    /// Which of the image's groups the process gets.
    pub supplemental_groups: SupplementalGroups,
    /// Where the output goes, in the format of CRI's logs; opened for appending.
    pub log: Option<OwnedFd>,
    /// The process has a terminal.
    pub tty: bool,
    /// The process's stdin is kept open for attachers; else it reads the end of the file.
    pub stdin: bool,
    /// The process's stdin is closed when the first attacher's input has ended.
    pub stdin_once: bool,
    /// Whether its process is started again when it has ended.
    pub restart: RestartPolicy,
    /// Devices beside those that every container has.
    pub devices: Vec<ContainerDevice>,
    /// It finds the guest's own devices, whose use its specification allows.
    pub guest_devices: bool,
    /// Contents of the container's `/etc/hosts`; empty: the image's.
    pub etc_hosts: Vec<u8>,
    /// Contents of the container's `/etc/resolv.conf`; empty: the image's.
    pub etc_resolv_conf: Vec<u8>,
    /// Contents of the container's `/etc/hostname`; empty: the image's.
    pub etc_hostname: Vec<u8>,
}

impl CreateContainer {
    /// A container of this id with an image and a specification, as
    /// [`container_spec`](super::container_spec) makes one: without a log, a terminal or an input.
    pub fn new(
        id: impl Into<String>,
        image: impl Into<OwnedFd>,
        image_digest: impl Into<String>,
        spec: Spec,
    ) -> Self {
        Self {
            id: id.into(),
            image: image.into(),
            image_digest: image_digest.into(),
            volumes: Vec::new(),
            readonly_rootfs: false,
            spec,
            user: String::new(),
            supplemental_groups: SupplementalGroups::Default,
            log: None,
            tty: false,
            stdin: false,
            stdin_once: true,
            restart: RestartPolicy::Never,
            devices: Vec::new(),
            guest_devices: false,
            etc_hosts: Vec::new(),
            etc_resolv_conf: Vec::new(),
            etc_hostname: Vec::new(),
        }
    }
}

/// A device of a container.
#[derive(Debug)]
pub struct ContainerDevice {
    /// Where the container has it: an absolute path.
    pub path: String,
    /// What it may do with it: some of `r`, `w` and `m` (mknod).
    pub access: String,
    /// What it is.
    pub source: DeviceSource,
}

/// What a container's device is.
#[derive(Debug)]
pub enum DeviceSource {
    /// A disk that is plugged into the guest for as long as a container has it. Containers whose
    /// disks have one serial number have the same one. The machine must be on PCI.
    Disk {
        /// The open file or block device.
        file: OwnedFd,
        /// At most 20 bytes, and no digits of an image's digest.
        serial: String,
        /// The guest cannot write it, whatever the container may.
        is_read_only: bool,
        /// Permissions of its node.
        mode: u32,
        /// Owner of its node.
        uid: u32,
        /// Group of its node.
        gid: u32,
    },
    /// A character device of the guest's kernel, by its path there.
    Guest(String),
}

/// Whether a container's process is started again when it has ended by itself: in the same guest,
/// with the files that it left. A container that was stopped or killed on request is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RestartPolicy {
    /// Never.
    #[default]
    Never,
    /// When its exit code was not 0.
    OnFailure {
        /// At most so many times; `None`: always.
        max_restarts: Option<u32>,
    },
    /// Whatever its exit code was.
    Always,
}

/// An image that a container mounts beside its root.
#[derive(Debug)]
pub struct ImageVolume {
    /// The image as an EROFS file, open for reading.
    pub image: OwnedFd,
    /// The image's digest, as [`CreateContainer::image_digest`].
    pub digest: String,
}

/// Who a container's process is, as the guest resolved it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUser {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// All supplementary group ids, the group's own among them.
    pub groups: Vec<u32>,
}

/// Which supplementary groups a process gets beside those of its specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SupplementalGroups {
    /// Those of the image's `/etc/group` that list the user, unless `user` names a group.
    #[default]
    Default,
    /// Those of the image's `/etc/group` that list the user, in any case.
    Merge,
    /// None.
    Strict,
}

/// A further process in a running container.
#[derive(Debug)]
pub struct Exec {
    /// Names the process within its container; as long as a container's id may be.
    pub exec_id: String,
    /// What to run.
    pub process: Process,
    /// `user[:group]` as names or numbers of the image; empty: as `process` says.
    pub user: String,
    /// Which of the image's groups the process gets.
    pub supplemental_groups: SupplementalGroups,
    /// The process gets a terminal of this size.
    pub tty: Option<TerminalSize>,
    /// Where its streams come from and go to. With a terminal, stderr is not used.
    pub stdio: StdioFds,
}

/// Files for a process's standard streams; what is missing is `/dev/null`.
#[derive(Debug, Default)]
pub struct StdioFds {
    /// Read for the process's stdin.
    pub stdin: Option<OwnedFd>,
    /// Written with the process's stdout, or all that its terminal shows.
    pub stdout: Option<OwnedFd>,
    /// Written with the process's stderr.
    pub stderr: Option<OwnedFd>,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// A container's process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The process in the guest's PID namespace.
    pub pid: u32,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub started_at_ns: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Its exit code, 0 to 255; 128 and the signal's number for one that a signal killed.
    pub code: i32,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub exited_at_ns: u64,
    /// The kernel's OOM killer struck in its container.
    pub oom_killed: bool,
}

/// Where a container is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ContainerState {
    /// Its process waits for the start.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended and will be started again.
    Restarting,
    /// Its process has ended for good.
    Exited,
}

/// A container of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerInfo {
    /// Its name.
    pub id: String,
    /// Where it is in its life.
    pub state: ContainerState,
    /// Its process in the guest's PID namespace.
    pub pid: u32,
    /// Nanoseconds since 1970-01-01 UTC; 0: not started.
    pub started_at_ns: u64,
    /// How its process ended, when it has; one that was started again, how it ended last.
    pub exit: Option<ProcessExit>,
    /// How often its process was started again.
    #[serde(default)]
    pub restarts: u32,
}

/// Figures of a container's control group, of its processes and of what it has written; a limit of
/// 0 means none. What an older sandbox does not count is 0.
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
    /// Usage less the inactive file cache, which the kernel gives up at need.
    pub memory_working_set_bytes: u64,
    pub memory_limit_bytes: u64,
    pub memory_anon_bytes: u64,
    pub memory_file_bytes: u64,
    pub memory_mapped_file_bytes: u64,
    pub memory_kernel_bytes: u64,
    pub memory_peak_bytes: u64,
    /// Times that the use was about to exceed the limit.
    pub memory_limit_hits: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub oom_kills: u64,
    /// Threads; so is the limit.
    pub pids_current: u64,
    pub pids_limit: u64,
    pub processes: u64,
    /// Of very many descriptors and threads, the agent counts those that it meets first.
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
    /// Of the file system that takes what the container writes to its root.
    pub writable_bytes: u64,
    pub writable_used_bytes: u64,
    pub writable_inodes: u64,
    pub writable_used_inodes: u64,
    /// Of the container's control group.
    pub psi: Psi,
    /// Of the control group that those of all the guest's containers are below.
    pub guest_psi: Psi,
    /// Of that same group; an older sandbox has none.
    pub guest: Option<GuestStats>,
}

/// What all containers of a guest use together. Times and counts are also those of containers that
/// are gone.
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

/// How a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SandboxExit {
    /// The guest powered itself off, asked to or not.
    PoweredOff,
    /// The guest reset itself.
    Reset,
    /// The guest's kernel panicked.
    Panicked(KernelPanic),
    /// A fault that the guest's kernel could not handle.
    TripleFault,
    /// The machine was killed: its guest did not stop within the grace period.
    Killed,
    /// The VMM or the host failed; what it said.
    Failed(String),
    /// The process is gone and has said nothing: it was killed, or the host restarted.
    Died,
    /// The host's kernel killed the process because memory ran out.
    OutOfMemory {
        /// The control group that was at its limit, the sandbox's own or one above it; `None` where
        /// it was the host that had no memory left, or nobody knows.
        group: Option<PathBuf>,
    },
}

impl fmt::Display for SandboxExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("the guest powered itself off"),
            Self::Reset => f.write_str("the guest reset itself"),
            Self::Panicked(panic) => write!(f, "the guest ended by a kernel panic: {panic}"),
            Self::TripleFault => f.write_str("the guest ended by a triple fault"),
            Self::Killed => f.write_str("the machine was killed"),
            Self::Failed(why) => f.write_str(why),
            Self::Died => f.write_str("the sandbox's process died"),
            Self::OutOfMemory { group } => {
                f.write_str("the host's kernel killed the machine because ")?;
                match group {
                    Some(group) => {
                        let group = group.display();
                        write!(f, "the control group {group} was at its memory limit")
                    }
                    None => f.write_str("memory ran out"),
                }
            }
        }
    }
}

/// Characters that are told of why a machine failed, or of a control group's path.
const TOLD: usize = 4 << 10;

impl SandboxExit {
    /// The same in words that may be shown: of bounded length, and nothing in them that a terminal
    /// or a log would act on.
    pub(super) fn printable(self) -> Self {
        match self {
            Self::Panicked(panic) => Self::Panicked(panic.map(printable)),
            Self::Failed(why) => Self::Failed(printable(&why, TOLD)),
            Self::OutOfMemory { group } => Self::OutOfMemory {
                group: group.map(|group| printable(&group.to_string_lossy(), TOLD).into()),
            },
            exit => exit,
        }
    }

    /// The last messages of the guest's kernel, where it panicked: the guest's own words.
    #[must_use]
    pub fn kernel_log(&self) -> &[String] {
        match self {
            Self::Panicked(panic) => panic.log(),
            _ => &[],
        }
    }
}

impl From<MachineExit> for SandboxExit {
    fn from(exit: MachineExit) -> Self {
        match exit {
            MachineExit::PoweredOff => Self::PoweredOff,
            MachineExit::Reset => Self::Reset,
            MachineExit::Panicked(panic) => Self::Panicked(panic),
            MachineExit::TripleFault => Self::TripleFault,
            MachineExit::Killed => Self::Killed,
            MachineExit::Failed(why) => Self::Failed(why),
        }
    }
}
