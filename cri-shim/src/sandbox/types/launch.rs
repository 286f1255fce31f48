//! What a sandbox is made of.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::machine::{NicKind, Transport, UserRange};
#[cfg(doc)]
use crate::sandbox::Psi;
use crate::sandbox::cgroup::DEFAULT_CGROUP_PARENT;

/// Longest host name, in bytes.
const HOSTNAME_MAX: usize = 64;

/// What [`SandboxClient::launch`](super::super::SandboxClient::launch) makes a sandbox of.
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
    /// As many as [`SandboxClient::set_vcpus`](super::super::SandboxClient::set_vcpus) may ask for while
    /// it runs; not fewer than `vcpus`.
    pub max_vcpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that [`SandboxClient::grow`](super::super::SandboxClient::grow) may add while it runs: a
    /// multiple of [`GROWTH_UNIT`](crate::machine::GROWTH_UNIT).
    pub growth: u64,
    /// How many different images the sandbox's containers may have at once.
    pub image_slots: u8,
    /// Network cards.
    pub nics: Vec<NicConfig>,
    /// The directory that the guest sees as `/run/podvisor/shared`, with what is mounted below
    /// it, and what will be when it [passes its mounts on](super::super::jail::pass_on_mounts).
    pub shared_dir: Option<PathBuf>,
    /// Users of the guest that are the host's from 0 on in what is shared, as those of containers
    /// in a user namespace with these ids; `None`: all are the host's with the same numbers.
    pub users: Option<UserRange>,
    /// File for what the guest's kernel prints; a console makes the boot slower.
    pub console: Option<PathBuf>,
    /// Where starts and ends of containers are noted, opened for appending: lines that
    /// [`Event::parse`](super::super::Event::parse) reads.
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
