//! The configuration of a sandbox.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::PathBuf;

use podvisor_network::guest::NicConfig;
use serde::{Deserialize, Serialize};

use crate::cgroup::{DEFAULT_CGROUP_PARENT, IoLimit};
use crate::machine::{Transport, UserRange};
#[cfg(doc)]
use crate::psi::Psi;

/// Longest host name, in bytes.
const HOSTNAME_MAX: usize = 64;

/// The configuration of a sandbox for
/// [`SandboxClient::launch`](super::super::SandboxClient::launch).
#[derive(Debug)]
pub struct LaunchConfig {
    /// Names the sandbox: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
    pub id: String,
    /// The guest's host name, at most 64 bytes.
    pub hostname: String,
    /// The sandbox's own directory: it exists, belongs to this user and has mode 0700. Its path is
    /// at most 90 bytes long, because sockets are created in it.
    pub dir: PathBuf,
    /// What is in the guest. Fields that are about the agent's guest mean nothing for another one.
    pub guest: GuestKind,
    /// Kernel to boot, an ELF vmlinux or a bzImage. Not used with [`GuestKind::OwnOs`].
    pub kernel: PathBuf,
    /// Initramfs that holds the agent. Not used with [`GuestKind::OwnOs`].
    pub initramfs: PathBuf,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// The maximum of vCPUs for
    /// [`SandboxClient::set_vcpus`](super::super::SandboxClient::set_vcpus); at least `vcpus`.
    pub max_vcpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that [`SandboxClient::grow`](super::super::SandboxClient::grow) may add at run time: a
    /// multiple of [`GROWTH_UNIT`](crate::machine::GROWTH_UNIT).
    pub growth: u64,
    /// How many different images the sandbox's containers may use at the same time.
    pub image_slots: u8,
    /// Network cards.
    pub nics: Vec<NicConfig>,
    /// The directory that the guest sees as `/run/podvisor/shared`, including mounts below it.
    /// Volumes are mounted in it by [`SandboxClient::shared_directory`](
    /// super::super::SandboxClient::shared_directory). If it [passes its mounts
    /// on](super::super::jail::pass_on_mounts), later mounts of the host are included, too.
    pub shared_dir: Option<PathBuf>,
    /// A range of the guest's users that are the host's users from 0 on in the shared directory, as
    /// those of containers in a user namespace with these ids; `None`: all users have the host's
    /// numbers.
    pub users: Option<UserRange>,
    /// Whose rights on the host the process has where it serves the shared directory.
    pub share_users: ShareUsers,
    /// File for the guest kernel's messages; a console makes the boot slower.
    pub console: Option<PathBuf>,
    /// File for the starts and ends of containers, opened for appending: lines that
    /// [`Event::parse`](super::super::Event::parse) reads.
    pub events: Option<File>,
    /// The guest's sysctls by their dotted names.
    pub sysctls: BTreeMap<String, String>,
    /// The bus of the guest's devices. A clone has its template's, so only templates with this bus
    /// are used.
    pub transport: Transport,
    /// Whether the guest's kernel counts pressure ([`Psi`]). A clone does as its template, so only
    /// templates with this setting are used.
    pub psi: bool,
    /// Whether the process is jailed.
    pub jail: JailMode,
    /// Layers of its confinement without which it does not start: others may be missing where the
    /// host does not have them.
    pub required_layers: Vec<JailLayer>,
    /// The directory of templates, snapshots of machines that have booted already: the sandbox
    /// starts as a clone of the matching one, and creates one if it is missing. It boots if the
    /// clone has no working guest. `None`: it boots.
    pub templates: Option<PathBuf>,
    /// The directory of a snapshot that the sandbox must be a clone of. Kernel, vCPUs, memory and
    /// kinds of devices are the snapshot's then.
    pub snapshot: Option<PathBuf>,
    /// The control group (v2) below which the sandbox gets its own, as a path from the hierarchy's
    /// root; `None`: it stays in its launcher's. If the host has no cgroup v2, or it cannot be
    /// written, the sandbox has none and logs why.
    pub cgroup_parent: Option<String>,
    /// Limits of the I/O of the sandbox's process on block devices of the host. They take a control
    /// group with the `io` controller: the launch fails without one.
    pub io_limits: Vec<IoLimit>,
}

impl LaunchConfig {
    /// Creates the configuration of a sandbox whose guest has an operating system of its own:
    /// otherwise as [`Self::new`], with a PCI bus. It has no machine yet.
    pub fn of_own_os(id: impl Into<String>, dir: impl Into<PathBuf>) -> Self {
        Self {
            guest: GuestKind::OwnOs,
            image_slots: 0,
            transport: Transport::Pci,
            ..Self::new(id, dir, PathBuf::new(), PathBuf::new())
        }
    }

    /// Creates the configuration of a sandbox with this id in a directory of its own: the id is its
    /// host name; it has one vCPU, 256 MiB, room for one image, a jail, a group below
    /// [`DEFAULT_CGROUP_PARENT`], no network, and boots.
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
            guest: GuestKind::Agent,
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
            share_users: ShareUsers::default(),
            console: None,
            events: None,
            sysctls: BTreeMap::new(),
            transport: Transport::Mmio,
            psi: false,
            jail: JailMode::Enforced,
            required_layers: Vec::new(),
            templates: None,
            snapshot: None,
            cgroup_parent: Some(DEFAULT_CGROUP_PARENT.to_owned()),
            io_limits: Vec::new(),
        }
    }
}

/// What is in the guest of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum GuestKind {
    /// podvisor's kernel and agent, which runs containers. The machine starts with the sandbox.
    #[default]
    Agent,
    /// An operating system of its own, on a disk. The sandbox starts without a machine.
    OwnOs,
}

/// Whose rights on the host a jailed process has where it serves a shared directory, if it is
/// started by root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ShareUsers {
    /// The host's root, with six capabilities: it can have any volume.
    #[default]
    Host,
    /// Nobody's: it is root in a user namespace of its own, whose users volumes are mapped to. It
    /// can only have volumes that the kernel can map, and that do not follow the host
    /// ([`AttachError::needs_host_users`](crate::AttachError::needs_host_users)). Where the host
    /// has no user namespaces it is as [`Self::Host`].
    Mapped,
}

/// Whether a sandbox's process is jailed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum JailMode {
    /// Namespaces, an identity of its own, Landlock and seccomp; the launch fails if the host
    /// refuses any of them.
    #[default]
    Enforced,
    /// The process has all rights of its launcher, within the limits of its control group.
    Disabled,
}

/// A layer of a process's confinement that a host may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JailLayer {
    /// A user namespace in which no user is mapped. A process that serves a shared directory never
    /// has one, and does not need it to start.
    UserNamespace,
    /// Landlock, with all that the newest version that podvisor knows restricts.
    Landlock,
    /// A control group of its own, with the limits of its machine.
    ControlGroup,
    /// A control group that lets it open no other devices than a machine needs.
    DeviceGroup,
    /// A user namespace to serve volumes in: without it the process is the host's root. One that
    /// shares no directory needs none.
    MappedUsers,
}

impl JailLayer {
    /// Returns what to do on a host that lacks it.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::UserNamespace => "see `podvisor check` for the setting that refuses it",
            Self::Landlock => {
                "it takes Linux 6.12 with CONFIG_SECURITY_LANDLOCK, and landlock in lsm= of its \
                 command line"
            }
            Self::ControlGroup => {
                "mount cgroup v2 at /sys/fs/cgroup, where podvisor may write; the log says why the \
                 process has none"
            }
            Self::DeviceGroup => {
                "it takes a control group of its own, a kernel with CONFIG_CGROUP_BPF, and root; \
                 the log says what the kernel answered"
            }
            Self::MappedUsers => {
                "it takes Linux 6.3 and file systems with mounts of mapped users, or a volume less; \
                 `podvisor check` tries it"
            }
        }
    }
}

impl fmt::Display for JailLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UserNamespace => "user namespace",
            Self::Landlock => "Landlock",
            Self::ControlGroup => "control group",
            Self::DeviceGroup => "device control group",
            Self::MappedUsers => "mapped users",
        })
    }
}
