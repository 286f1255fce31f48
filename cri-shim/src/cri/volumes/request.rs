//! A mount that a container asks for: its source on the host, opened and checked, and its mount
//! among the volumes of its pod.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use podvisor_cri_messages::{Mount, MountPropagation};
use rustix::fs::{StatVfsMountFlags, fstatvfs};

use super::directory::mount_points;
use crate::bind::{self, DetachedTree, Extent, Propagation};
use crate::cri::error::{CriError, Result};
use crate::cri::volume_users::Mounted;
use crate::guest_devices;
use crate::sandbox::{AttachError, SharedDirectory};

/// Suffix of the names of volumes in which the host's later mounts appear.
pub(super) const FOLLOWS: char = 's';

/// A mounted volume of the pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct MountSource {
    /// Device and inode.
    pub(super) object: (u64, u64),
    pub(super) flags: StatVfsMountFlags,
}

/// A mount that a container asks for, with its source open.
#[derive(Debug)]
pub(super) struct RequestedVolume {
    /// Index in the container's mounts.
    pub(super) number: usize,
    pub(super) mount: Mount,
    source: File,
    meta: Metadata,
    /// The source's object and mount flags.
    pub(super) there: MountSource,
    /// The host enforces that the guest cannot write there. For the pod's own volumes, the guest
    /// enforces it per container.
    is_read_only: bool,
}

impl RequestedVolume {
    pub(super) fn open(number: usize, mount: &Mount, mounted: &Mounted) -> Result<Self> {
        let path = Path::new(&mount.host_path);
        let failed = || CriError::io("look at", path);
        let source = open_source(path)?;
        let meta = source.metadata().map_err(failed())?;
        let at = fstatvfs(&source).map_err(|error| failed()(error.into()))?;
        let there = MountSource {
            object: (meta.dev(), meta.ino()),
            flags: at.f_flag,
        };
        let mut wanted = Self {
            number,
            mount: mount.clone(),
            source,
            meta,
            there,
            is_read_only: mount.readonly,
        };
        let is_the_pods = mounted.is_the_pods(&mount.host_path) && !is_slave(mount);
        if mount.readonly && is_the_pods && wanted.is_single()? {
            wanted.is_read_only = false;
        }
        Ok(wanted)
    }

    /// Returns the path of the guest's own device that its source stands for.
    pub(super) fn guest_device(&self) -> Option<&'static str> {
        guest_devices::path_of(&self.meta)
    }

    /// Returns whether nothing is mounted below it.
    fn is_single(&self) -> Result<bool> {
        let link = format!("/proc/self/fd/{}", self.source.as_raw_fd());
        let path = fs::read_link(&link).map_err(CriError::io("read", &link))?;
        let points = mount_points(&path)?;
        Ok(points.iter().all(|point| *point == path))
    }

    /// Returns the name of an existing volume that this container can share.
    pub(super) fn find(
        &self,
        shared: &SharedDirectory,
        there: &BTreeMap<String, MountSource>,
    ) -> Result<Option<String>> {
        for (name, there) in there {
            if there.object == self.there.object
                && name.ends_with(FOLLOWS) == is_slave(&self.mount)
                && self.is_like(there, shared, name)?
            {
                return Ok(Some(name.clone()));
            }
        }
        Ok(None)
    }

    /// Returns whether an existing mount of the same object has the properties that this one needs.
    fn is_like(&self, there: &MountSource, shared: &SharedDirectory, name: &str) -> Result<bool> {
        let differ = there.flags ^ self.there.flags;
        if differ.contains(StatVfsMountFlags::NOEXEC) {
            return Ok(false);
        }
        let there = there.flags.contains(StatVfsMountFlags::RDONLY);
        let read_only = self.is_read_only || self.there.flags.contains(StatVfsMountFlags::RDONLY);
        if is_slave(&self.mount) {
            // Mounts below follow the host in both.
            return Ok(there == read_only);
        }
        // The guest enforces read-only mounts for its containers.
        let may_be_used = there == read_only || self.mount.readonly && !there;
        Ok(may_be_used && is_single(shared, name)? && self.is_single()?)
    }

    /// Returns its object and flags once it is mounted.
    pub(super) fn once_mounted(&self) -> MountSource {
        let mut there = self.there;
        if self.is_read_only {
            there.flags |= StatVfsMountFlags::RDONLY;
        }
        there
    }

    /// Mounts it on a name in `shared`. Returns true if nothing in it can be written, not even in
    /// mounts below it.
    pub(super) fn mount_at(&self, shared: &SharedDirectory, name: &str) -> Result<bool> {
        let wanted = &self.mount;
        let failed = || CriError::io("mount the volume", Path::new(&wanted.host_path));
        let is_dir = self.meta.is_dir();
        let extent = match is_dir {
            true => Extent::Whole,
            false => Extent::Top,
        };
        let propagation = match is_slave(wanted) {
            true => Propagation::FromSource,
            false => Propagation::Private,
        };
        // By descriptor, so that the path cannot change its meaning in between.
        let tree = DetachedTree::of(&self.source, extent, propagation).map_err(failed())?;
        // Neither devices nor set-user-ID programs work where the jail has it.
        tree.make_harmless().map_err(failed())?;
        // The host enforces it even against a malicious guest. Mounts below stay as they are,
        // unless the request says otherwise.
        if self.is_read_only {
            let extent = match wanted.recursive_read_only {
                true => Extent::Whole,
                false => Extent::Top,
            };
            tree.make_read_only(extent).map_err(failed())?;
        }
        shared
            .attach(&tree, name, is_dir)
            .map_err(|error| match error {
                AttachError::Io(error) => failed()(error),
                source => CriError::HostUsers {
                    path: wanted.host_path.clone().into(),
                    source,
                },
            })?;
        let is_whole = wanted.recursive_read_only
            || (wanted.readonly && !is_slave(wanted) && is_single(shared, name)?);
        Ok(wanted.readonly && is_whole)
    }
}

/// Returns whether nothing is mounted below a volume of the pod.
fn is_single(shared: &SharedDirectory, name: &str) -> Result<bool> {
    let mounts = shared.mounts_at(name);
    let dir = shared.host_path();
    Ok(mounts.map_err(CriError::io("find the mounts in", dir))? == 1)
}

/// Opens the source of a mount; a missing path is created as a directory, as other runtimes do.
fn open_source(path: &Path) -> Result<File> {
    let failed = || CriError::io("open the volume", path);
    match bind::open_source(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut builder = fs::DirBuilder::new();
            let made = builder.recursive(true).mode(0o755).create(path);
            made.map_err(CriError::io("create the volume", path))?;
            bind::open_source(path).map_err(failed())
        }
        opened => opened.map_err(failed()),
    }
}

pub(super) fn is_slave(mount: &Mount) -> bool {
    mount.propagation == i32::from(MountPropagation::PropagationHostToContainer)
}
