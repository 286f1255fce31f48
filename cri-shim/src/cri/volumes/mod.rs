//! Volumes of a pod: each is bind-mounted under its own name in the directory that the guest shares
//! when a container needs it, in the mount namespace of the pod's process. When the last container
//! that uses it is gone its name is removed on the host, and the mount with it.

mod directory;
mod request;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path};

use podvisor_cri_messages::Mount;
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::error::{CriError, Result};
use super::spec::mounts::image_of;
use super::spec::{MemorySource, Volume, VolumeSource};
use super::volume_users::{Mounted, Users};
use crate::sandbox::SharedDirectory;
pub(super) use directory::{make_private, remove_dir};
use request::{FOLLOWS, MountSource, RequestedVolume, is_slave};

/// Directory of a pod's volumes within the pod's directory.
pub(super) const SHARED: &str = "shared";

/// A container's mount sources, opened and checked, so that mounting them does not wait for a file
/// server.
#[derive(Debug)]
pub(super) struct ResolvedVolumes {
    /// In the order of the mounts, without those of images.
    volumes: Vec<(Mount, Source)>,
    /// Volumes that are mounted already.
    there: BTreeMap<String, MountSource>,
}

#[derive(Debug)]
enum Source {
    Memory(MemorySource),
    Host(Box<RequestedVolume>),
    /// The guest has it itself.
    Device(&'static str),
}

impl Source {
    fn host(&self) -> Option<&RequestedVolume> {
        match self {
            Self::Host(wanted) => Some(wanted),
            Self::Memory(_) | Self::Device(_) => None,
        }
    }
}

/// Opens and checks the sources of `mounts`, except images and, by their indices, the volumes in
/// the guest's `memory`; also checks what is mounted for the pod. This blocks indefinitely if a
/// file server does not answer: no lock may be held.
pub(super) fn look(
    shared: &SharedDirectory,
    mounted: &Mounted,
    mounts: &[Mount],
    mut memory: BTreeMap<usize, MemorySource>,
) -> Result<ResolvedVolumes> {
    let mut volumes = Vec::new();
    for (number, mount) in mounts.iter().enumerate() {
        if image_of(mount).is_some() {
            continue;
        }
        let source = match memory.remove(&number) {
            Some(source) => Source::Memory(source),
            None => {
                let wanted = RequestedVolume::open(number, mount, mounted)?;
                match wanted.guest_device() {
                    Some(path) => Source::Device(path),
                    None => Source::Host(Box::new(wanted)),
                }
            }
        };
        volumes.push((mount.clone(), source));
    }
    let objects: Vec<_> = volumes
        .iter()
        .filter_map(|(_, source)| source.host().map(|wanted| wanted.there.object))
        .collect();
    let names: Vec<String> = mounted.lock().names().map(str::to_owned).collect();
    let there = match objects.is_empty() || names.is_empty() {
        true => BTreeMap::new(),
        false => shared
            .enter(|dir| mounted_of(dir, names, &objects))
            .map_err(CriError::host("look at the pod's volumes"))?,
    };
    Ok(ResolvedVolumes { volumes, there })
}

/// Returns those of the pod's volumes that show one of `objects`.
fn mounted_of(
    shared: &Path,
    names: Vec<String>,
    objects: &[(u64, u64)],
) -> BTreeMap<String, MountSource> {
    let of_name = |name: String| {
        let target = shared.join(&name);
        let meta = fs::symlink_metadata(&target).ok()?;
        let object = (meta.dev(), meta.ino());
        // Skips those that have been unmounted meanwhile.
        let flags = match objects.contains(&object) {
            true => statvfs(&target).ok()?.f_flag,
            false => return None,
        };
        Some((name, MountSource { object, flags }))
    };
    names.into_iter().filter_map(of_name).collect()
}

/// Mounts the checked sources for a container. A volume that another container has mounted alike is
/// shared. If one fails, none of them stays mounted.
pub(super) fn mount(
    shared: &SharedDirectory,
    mounted: &Mounted,
    container: &str,
    looked: ResolvedVolumes,
) -> Result<Vec<Volume>> {
    let mut users = mounted.lock();
    let ResolvedVolumes { volumes, mut there } = looked;
    // Some may have been unmounted meanwhile.
    there.retain(|name, _| users.names().any(|known| known == name));
    let mut done = Vec::new();
    for (wanted, source) in volumes {
        let flags = (source.host()).map_or(StatVfsMountFlags::empty(), |host| host.there.flags);
        let source = match source {
            Source::Memory(source) => Ok((VolumeSource::Memory(source), wanted.readonly)),
            Source::Device(path) => Ok((VolumeSource::Device(path), wanted.readonly)),
            Source::Host(host) => {
                let short: String = container.chars().take(16).collect();
                let follows = is_slave(&wanted).then_some(FOLLOWS);
                let number = host.number;
                let name = format!("{short}-{number}").chars().chain(follows).collect();
                share_or_mount(shared, &mut users, &mut there, container, name, &host)
            }
        };
        match source {
            Ok((source, readonly)) => done.push(Volume {
                source,
                is_slave: is_slave(&wanted),
                destination: wanted.container_path,
                readonly,
                flags,
                asked: StatVfsMountFlags::empty(),
            }),
            Err(error) => {
                let unused = users.release(container);
                remove_unused(shared.host_path(), &mut users, unused)?;
                return Err(error);
            }
        }
    }
    Ok(done)
}

/// Releases a container's volumes and unmounts those that no other one uses.
pub(super) fn release(shared: &Path, mounted: &Mounted, container: &str) -> Result<()> {
    let mut users = mounted.lock();
    let unused = users.release(container);
    remove_unused(shared, &mut users, unused)
}

/// Releases all containers' volumes after their machine is gone, and unmounts all.
pub(super) fn release_all(shared: &Path, mounted: &Mounted) -> Result<()> {
    let mut users = mounted.lock();
    let unused = users.release_all();
    let removed = remove_unused(shared, &mut users, unused);
    removed.and(remove_strangers(&SharedDirectory::of_host(shared), &users))
}

/// Unmounts volumes that no container uses: a daemon that was killed may have mounted one without
/// recording its user.
pub(super) fn release_strangers(shared: &SharedDirectory, mounted: &Mounted) -> Result<()> {
    remove_strangers(shared, &mounted.lock())
}

fn remove_strangers(shared: &SharedDirectory, users: &Users) -> Result<()> {
    let points = shared.mount_points();
    let points = points.map_err(CriError::io("find the mounts in", shared.host_path()))?;
    let mut strangers = BTreeSet::new();
    for point in points {
        // Others may be mounted below it.
        let Some(Component::Normal(name)) = point.components().next() else {
            continue;
        };
        if users.names().all(|known| known != name) {
            strangers.insert(name.to_owned());
        }
    }
    let mut first = Ok(());
    for name in strangers {
        first = first.and(remove_one(&shared.host_path().join(name)));
    }
    first
}

fn remove_unused(shared: &Path, users: &mut Users, unused: Vec<String>) -> Result<()> {
    let mut first = Ok(());
    for name in unused {
        let removed = remove_one(&shared.join(&name));
        if removed.is_ok() {
            users.forget(&name);
        }
        first = first.and(removed);
    }
    first
}

/// Returns the source of a volume for a container, and whether it is entirely read-only.
fn share_or_mount(
    shared: &SharedDirectory,
    users: &mut Users,
    there: &mut BTreeMap<String, MountSource>,
    container: &str,
    name: String,
    wanted: &RequestedVolume,
) -> Result<(VolumeSource, bool)> {
    if let Some(name) = wanted.find(shared, there)? {
        users.add(&name, container);
        // The host decides on mounts below one that follows the host.
        let readonly = wanted.mount.readonly && !is_slave(&wanted.mount);
        return Ok((VolumeSource::Shared(name), readonly));
    }
    users.add(&name, container);
    let readonly = wanted.mount_at(shared, &name)?;
    there.insert(name.clone(), wanted.once_mounted());
    Ok((VolumeSource::Shared(name), readonly))
}

/// Removes a volume's name, and with it the mount on it in the namespace of the pod's process. One
/// that the host sees is unmounted before. A missing one is not an error.
fn remove_one(target: &Path) -> Result<()> {
    let failed = || CriError::io("unmount the volume", target);
    loop {
        match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            // Not a mount point of the host, or no longer.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(failed()(error.into())),
        }
    }
    let meta = match fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed()(error)),
    };
    // Never recursively: the files below belong to others.
    let removed = match meta.is_dir() {
        true => fs::remove_dir(target),
        false => fs::remove_file(target),
    };
    removed.map_err(CriError::io("remove", target))
}

#[cfg(test)]
mod tests;
