//! The volumes of a container, as its guest has them.

use rustix::fs::StatVfsMountFlags;

/// A volume in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct Volume {
    /// Its source in the guest.
    pub(in crate::cri) source: VolumeSource,
    /// Its mount point in the container.
    pub(in crate::cri) destination: String,
    /// Whether nothing in it may be written, not even in mounts below it.
    pub(in crate::cri) readonly: bool,
    /// Whether later mounts of the host are propagated.
    pub(in crate::cri) is_slave: bool,
    /// Those of the mount that the host has it in, as far as programs in it notice.
    pub(in crate::cri) flags: StatVfsMountFlags,
    /// Those that the request asks for: some of NOEXEC, NOSUID and NODEV.
    pub(in crate::cri) asked: StatVfsMountFlags,
}

/// The source of a volume in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) enum VolumeSource {
    /// A name in the pod's shared directory.
    Shared(String),
    /// Like [`Self::Shared`]; the agent copies the image's files into it.
    Filled(String),
    /// An image, or a part of one.
    Image {
        /// The image's digest.
        digest: String,
        /// A path in it; empty for all of it.
        below: String,
    },
    /// In the guest's memory.
    Memory(MemorySource),
    /// A device of the guest's own kernel, by its path there.
    Device(&'static str),
}

/// A volume in the guest's memory; the agent creates it if it is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct MemorySource {
    /// Its index in the pod's volumes in memory.
    pub(in crate::cri) key: usize,
    /// A path in it; `None` for all of it.
    pub(in crate::cri) below: Option<String>,
    /// In bytes; `None` for a share of the guest's memory.
    pub(in crate::cri) size: Option<u64>,
    pub(in crate::cri) mode: u32,
    pub(in crate::cri) uid: u32,
    pub(in crate::cri) gid: u32,
}

impl Volume {
    /// Marks a volume to be filled with the image's files, if it is in the shared directory.
    pub(in crate::cri) fn filled(mut self) -> Self {
        if let VolumeSource::Shared(name) = self.source {
            self.source = VolumeSource::Filled(name);
        }
        self
    }

    /// Returns its name in the pod's shared directory, if it is there.
    pub(in crate::cri) fn name(&self) -> Option<&str> {
        match &self.source {
            VolumeSource::Shared(name) | VolumeSource::Filled(name) => Some(name),
            VolumeSource::Image { .. } | VolumeSource::Memory(_) | VolumeSource::Device(_) => None,
        }
    }
}
