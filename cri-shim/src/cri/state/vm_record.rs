//! What is recorded of a container that is a virtual machine: enough to open everything again when
//! it is started, also by another daemon.

use std::path::PathBuf;

use podvisor_sandbox::machine::{DiskMove, MachineIdentity, MachineShare, OverlayFormat};
use serde::{Deserialize, Serialize};

use crate::cri::vm_spec::Booter;

/// A machine. In a record of an older daemon there are no disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    /// Its disks, in the guest's order.
    #[serde(default)]
    pub(crate) disks: Vec<DiskRecord>,
    /// Directories that its guest mounts.
    #[serde(default)]
    pub(crate) shares: Vec<MachineShare>,
    /// Serial number of the disk that the loader boots.
    #[serde(default = "root")]
    pub(crate) root: String,
    /// What starts the system on it.
    #[serde(default)]
    pub(crate) booter: Booter,
    /// A kernel that it boots instead.
    #[serde(default)]
    pub(crate) kernel: Option<KernelRecord>,
    /// The machine's UUID.
    pub(crate) uuid: [u8; 16],
    /// What else its firmware tables say.
    #[serde(default)]
    pub(crate) identity: MachineIdentity,
    /// Virtual CPUs.
    pub(crate) vcpus: u8,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// It is paused as soon as it runs.
    #[serde(default)]
    pub(crate) starts_paused: bool,
    /// A guest that reboots has ended.
    #[serde(default)]
    pub(crate) ends_at_reboot: bool,
    /// It is not booted: it comes by this migration.
    #[serde(default)]
    pub(crate) incoming: Option<String>,
    /// There is no machine: the pod keeps a claim for another one's.
    #[serde(default)]
    pub(crate) is_idle: bool,
}

impl VmRecord {
    /// Returns the disk image that the machine's first boot finds as it is in the store, if there
    /// is one.
    pub(in crate::cri) fn fresh_root(&self) -> Option<&str> {
        let boots_itself = self.kernel.is_some() || self.booter != Booter::Loader;
        if boots_itself || self.incoming.is_some() {
            return None;
        }
        let root = self.disks.iter().find(|disk| disk.serial == self.root)?;
        match &root.content {
            DiskContent::Image { id, .. } => Some(id),
            _ => None,
        }
    }
}

/// Serial number of the disk that the loader boots.
pub(crate) const ROOT: &str = "root";

fn root() -> String {
    ROOT.to_owned()
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskRecord {
    /// Its serial number.
    pub(crate) serial: String,
    /// The guest cannot write it.
    pub(crate) is_read_only: bool,
    /// No other node has it, wherever it is.
    #[serde(default)]
    pub(crate) is_local: bool,
    /// Where its contents are.
    pub(crate) content: DiskContent,
}

impl DiskRecord {
    /// Returns what becomes of it when its machine moves to another node.
    pub(in crate::cri) fn moves(&self) -> DiskMove {
        match &self.content {
            DiskContent::Image { id, overlay: None } => DiskMove::Same(id.clone()),
            DiskContent::Image { id, .. } => DiskMove::Copied(id.clone()),
            DiskContent::Ephemeral { .. } => DiskMove::Copied("ephemeral".to_owned()),
            DiskContent::Made(_) => DiskMove::Copied("made".to_owned()),
            DiskContent::Node(_) if self.is_local => DiskMove::Copied("empty".to_owned()),
            DiskContent::Node(_) | DiskContent::Persistent(_) => DiskMove::Shared,
        }
    }
}

/// Where the contents of a disk are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskContent {
    /// In a disk image of the store, which stays as it is.
    Image {
        /// Its id.
        id: String,
        /// What the guest writes.
        overlay: Option<OverlayRecord>,
    },
    /// In a file or device of the node, which stays as it is.
    Ephemeral {
        /// Where.
        base: NodeFile,
        /// What the guest writes.
        overlay: OverlayRecord,
    },
    /// In a file of this name in the machine's own directory.
    Made(String),
    /// In a file or device of the node.
    Node(NodeFile),
    /// In a block device to which the image was written, after its header.
    Persistent(NodeFile),
}

/// A file or block device of the node. Others write into the directory that it is in, so it is
/// opened as what it should be, or not at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NodeFile {
    /// A block device.
    Device(PathBuf),
    /// A regular file, which no link leads to.
    File(PathBuf),
}

/// The file with a disk's differences from another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OverlayRecord {
    /// Its name in the machine's own directory.
    pub(crate) file: String,
    /// How they are stored.
    pub(crate) kind: OverlayKind,
    /// Bytes that it took on the node's disk when it was made: those that it shares with its image.
    #[serde(default)]
    pub(crate) shared: u64,
}

/// A kernel in the machine's own directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KernelRecord {
    /// Whether it has an initramfs.
    pub(crate) has_initramfs: bool,
    /// Its command line.
    pub(crate) cmdline: String,
}

impl KernelRecord {
    /// The kernel's file.
    pub(in crate::cri) const KERNEL: &str = "kernel";
    /// Its initramfs' file.
    pub(in crate::cri) const INITRAMFS: &str = "initramfs";
}

/// How an overlay stores differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OverlayKind {
    /// A raw file that shares blocks with the image.
    Reflink,
    /// A qcow2 file.
    Qcow2,
}

impl From<OverlayFormat> for OverlayKind {
    fn from(format: OverlayFormat) -> Self {
        match format {
            OverlayFormat::Reflink => Self::Reflink,
            _ => Self::Qcow2,
        }
    }
}

impl From<OverlayKind> for OverlayFormat {
    fn from(kind: OverlayKind) -> Self {
        match kind {
            OverlayKind::Reflink => Self::Reflink,
            OverlayKind::Qcow2 => Self::Qcow2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_claims_are_there_on_both_nodes() {
        let overlay = || OverlayRecord {
            file: "0.disk".to_owned(),
            kind: OverlayKind::Qcow2,
            shared: 0,
        };
        let id = || "sha256:00".to_owned();
        let claim = || NodeFile::Device("/dev/sdb".into());
        let copied = |name: &str| DiskMove::Copied(name.to_owned());
        for (content, is_local, moves) in [
            (
                DiskContent::Image {
                    id: id(),
                    overlay: Some(overlay()),
                },
                false,
                copied("sha256:00"),
            ),
            (
                DiskContent::Image {
                    id: id(),
                    overlay: None,
                },
                false,
                DiskMove::Same(id()),
            ),
            (
                DiskContent::Ephemeral {
                    base: claim(),
                    overlay: overlay(),
                },
                false,
                copied("ephemeral"),
            ),
            (DiskContent::Made("1.img".to_owned()), false, copied("made")),
            (DiskContent::Node(claim()), true, copied("empty")),
            (DiskContent::Node(claim()), false, DiskMove::Shared),
        ] {
            let disk = DiskRecord {
                serial: "root".to_owned(),
                is_read_only: false,
                is_local,
                content,
            };
            assert_eq!(disk.moves(), moves, "{disk:?}");
        }
    }

    #[test]
    fn a_record_of_an_older_daemon_is_read() {
        let old = r#"{"disk": "sha256:00", "overlay": "Qcow2", "uuid": [0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1],
            "vcpus": 2, "memory": 1048576, "devices": []}"#;
        let record: VmRecord = serde_json::from_str(old).unwrap();
        assert_eq!((record.vcpus, record.root.as_str()), (2, "root"));
        assert!(record.disks.is_empty());
    }
}
