//! What a container is made of.

use std::os::fd::OwnedFd;

use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

use super::process::SupplementalGroups;

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
    /// [`container_spec`](super::super::container_spec) makes one: without a log, a terminal or an input.
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
