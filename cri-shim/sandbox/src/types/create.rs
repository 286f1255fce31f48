//! The configuration of a container.

use std::os::fd::OwnedFd;

use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

use super::process::SupplementalGroups;

/// What the guest's agent makes a container from. It goes through the pod's process as it is.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct GuestContainer {
    /// Names the container: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
    pub id: String,
    /// Writes to the root filesystem are refused.
    pub readonly_rootfs: bool,
    /// The OCI runtime specification, at most 3 MiB as JSON. The agent fills in `root.path`, and
    /// the numbers of `process.user` unless [`Self::user`] is empty.
    pub spec: Spec,
    /// `user[:group]` as names or numbers of the image; empty: as the specification says.
    pub user: String,
    /// Which of the image's groups the process gets in addition.
    #[serde(default)]
    pub supplemental_groups: SupplementalGroups,
    /// It has the guest's own devices, whose use its specification allows.
    #[serde(default)]
    pub guest_devices: bool,
    /// Contents of the container's `/etc/hosts`; empty: the image's.
    pub etc_hosts: Vec<u8>,
    /// Contents of the container's `/etc/resolv.conf`; empty: the image's.
    pub etc_resolv_conf: Vec<u8>,
    /// Contents of the container's `/etc/hostname`; empty: the image's.
    pub etc_hostname: Vec<u8>,
}

/// A container to be created.
#[derive(Debug)]
pub struct CreateContainer {
    /// What the guest is told.
    pub config: GuestContainer,
    /// The image as an EROFS file, open for reading. Its lock is kept while the image is used.
    pub image: OwnedFd,
    /// The image's digest, `sha256:HEX` or `HEX`: containers of one digest share a disk.
    pub image_digest: String,
    /// Images that the specification mounts, each with its `image_source` as the mount's source.
    pub volumes: Vec<ImageVolume>,
    /// The file for the output, in the format of CRI's logs; opened for appending.
    pub log: Option<OwnedFd>,
    /// The process has a terminal.
    pub tty: bool,
    /// The process's stdin is kept open for attaching clients; otherwise it is at its end.
    pub stdin: bool,
    /// The process's stdin is closed when the first attached client's input has ended.
    pub stdin_once: bool,
    /// Whether its process is restarted when it has ended.
    pub restart: RestartPolicy,
    /// Devices in addition to those that every container has.
    pub devices: Vec<ContainerDevice>,
}

impl CreateContainer {
    /// Creates a configuration of a container with this id, image and specification, which
    /// [`container_spec`](super::super::container_spec) makes: without a log, a terminal or an
    /// input.
    pub fn new(
        id: impl Into<String>,
        image: impl Into<OwnedFd>,
        image_digest: impl Into<String>,
        spec: Spec,
    ) -> Self {
        Self {
            config: GuestContainer {
                id: id.into(),
                spec,
                ..GuestContainer::default()
            },
            image: image.into(),
            image_digest: image_digest.into(),
            volumes: Vec::new(),
            log: None,
            tty: false,
            stdin: false,
            stdin_once: true,
            restart: RestartPolicy::Never,
            devices: Vec::new(),
        }
    }
}

/// A device of a container.
#[derive(Debug)]
pub struct ContainerDevice {
    /// Its absolute path in the container.
    pub path: String,
    /// How the container may access it: some of `r`, `w` and `m` (mknod).
    pub access: String,
    /// The device itself.
    pub source: DeviceSource,
}

/// The source of a container's device.
#[derive(Debug)]
pub enum DeviceSource {
    /// A disk that is plugged into the guest while a container has it. Containers whose disks have
    /// the same serial number share one. The machine must be on PCI.
    Disk {
        /// The open file or block device.
        file: OwnedFd,
        /// The disk's serial number: at most 20 bytes, and not digits of an image's digest.
        serial: String,
        /// The guest cannot write to it, whatever the container's access is.
        is_read_only: bool,
        /// Permissions of its device node.
        mode: u32,
        /// Owner of its device node.
        uid: u32,
        /// Group of its device node.
        gid: u32,
    },
    /// A character device of the guest's kernel, by its path there.
    Guest(String),
}

/// Whether a container's process is restarted after it ended by itself: in the same guest, with the
/// files that it left. A container that was stopped or killed on request is not restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RestartPolicy {
    /// Never.
    #[default]
    Never,
    /// If its exit code was not 0.
    OnFailure {
        /// The maximum number of restarts; `None`: no limit.
        max_restarts: Option<u32>,
    },
    /// Whatever its exit code was.
    Always,
}

/// An image that a container mounts in addition to its root.
#[derive(Debug)]
pub struct ImageVolume {
    /// The image as an EROFS file, open for reading.
    pub image: OwnedFd,
    /// The image's digest, as [`CreateContainer::image_digest`].
    pub digest: String,
}
