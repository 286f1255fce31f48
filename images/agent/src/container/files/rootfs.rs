//! Images and the root filesystems created from them.
//!
//! An image is mounted once, read-only, while a container uses it. Each container has an overlay on
//! it with its own tmpfs as the upper layer: what the container writes counts as its memory and is
//! discarded with it. Dropping a value unmounts what it mounted.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pathrs::Root;
use podvisor_agent_protocol::api;
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid, chownat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, UnmountFlags, mount, move_mount, unmount};

use crate::container::files::disk::{self, DiskError};
use crate::container::users::namespace::UserNamespace;
use crate::guest;
use crate::owner::Owner;

/// A filesystem ends immediately after its last mount, or when nothing uses it any more.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
const RELEASE_RETRY: Duration = Duration::from_millis(5);

/// Bytes of memory per file that a writable layer may have.
const INODE_BYTES: u64 = 8 << 10;

/// A root filesystem cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootfsError {
    /// The image's disk was not found.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The disk has no filesystem that the guest can mount.
    #[error("cannot mount {disk} as EROFS: the image's disk is damaged or no EROFS file")]
    Image {
        /// The device node.
        disk: PathBuf,
        /// The error of mount(2).
        #[source]
        source: io::Error,
    },
    /// Another mount or directory could not be created.
    #[error("cannot {action} {path}")]
    Mount {
        /// The action that failed.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl RootfsError {
    pub(in crate::container) fn mount(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Mount {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

/// The mounted images, by serial. Clones share one table.
#[derive(Debug, Clone, Default)]
pub struct Images {
    mounted: Arc<Mutex<HashMap<String, Weak<Image>>>>,
}

/// A mounted image.
#[derive(Debug)]
pub struct Image {
    serial: String,
    disk: PathBuf,
    mount: MountPoint,
}

impl Images {
    /// Returns the image on the disk with this serial, mounted under `base`.
    ///
    /// # Errors
    ///
    /// [`RootfsError`]; the serial is assumed to be valid.
    pub async fn get(&self, serial: &str, base: &Path) -> Result<Arc<Image>, RootfsError> {
        if let Some(image) = self.mounted(serial) {
            return Ok(image);
        }
        let node = disk::find(serial).await?;
        // Another request may have mounted it during the wait.
        if let Some(image) = self.mounted(serial) {
            return Ok(image);
        }
        let name = node.file_name().unwrap_or_default();
        let target = MountPoint::create(base.join(name))?;
        let flags = MountFlags::RDONLY | MountFlags::NODEV;
        let options = if disk::is_memory(&node) {
            c"dax=always"
        } else {
            c""
        };
        mount(&node, target.path(), "erofs", flags, options).map_err(|error| {
            RootfsError::Image {
                disk: node.clone(),
                source: error.into(),
            }
        })?;
        let image = Arc::new(Image {
            serial: serial.to_owned(),
            disk: node,
            mount: target.mounted(),
        });
        let mut table = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, image| image.strong_count() > 0);
        table.insert(serial.to_owned(), Arc::downgrade(&image));
        Ok(image)
    }

    /// Releases an image. If this was its last user, waits until the kernel has released the disk
    /// and returns the serial: the disk may change then.
    pub async fn release(&self, image: Arc<Image>) -> Option<String> {
        let Image {
            serial,
            disk,
            mount,
        } = Arc::into_inner(image)?;
        drop(mount);
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        loop {
            // Another container may have mounted it again meanwhile.
            if self.mounted(&serial).is_some() {
                return None;
            }
            // A filesystem claims its disk exclusively while it exists.
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
            match rustix::fs::open(&disk, flags, Mode::empty()) {
                Err(Errno::BUSY) if Instant::now() < deadline => {
                    // The kernel does not report when the last use of a filesystem has ended.
                    tokio::time::sleep(RELEASE_RETRY).await;
                }
                Err(Errno::BUSY) => {
                    tracing::warn!(?disk, "the disk of an image is still in use");
                    return None;
                }
                // A disk that no longer exists is not in use either.
                Ok(_) | Err(_) => return Some(serial),
            }
        }
    }

    fn mounted(&self, serial: &str) -> Option<Arc<Image>> {
        let table = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        table.get(serial).and_then(Weak::upgrade)
    }
}

impl Image {
    /// Returns the serial number of its disk.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// Returns its mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Mounts it again on `target`, with ids of a user namespace.
    pub(in crate::container) fn map(
        &self,
        users: &UserNamespace,
        target: PathBuf,
    ) -> Result<MountPoint, RootfsError> {
        let target = MountPoint::create(target)?;
        let mount = crate::sys::map_mount(self.path(), users)
            .map_err(RootfsError::mount("map the ids of", self.path()))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&mount, c"", CWD, target.path(), flags)
            .map_err(io::Error::from)
            .map_err(RootfsError::mount("mount an image on", target.path()))?;
        Ok(target.mounted())
    }
}

/// A container's root filesystem.
#[derive(Debug)]
pub struct Rootfs {
    // Fields drop in order: the overlay is dropped before its layers.
    overlay: MountPoint,
    upper: MountPoint,
    /// The image with ids of a user namespace.
    mapped: Option<MountPoint>,
    _image: Arc<Image>,
    owner: Option<Owner>,
}

impl Rootfs {
    /// Mounts a writable layer over an image, with mount points in `base`.
    ///
    /// The overlay is mounted `nodev`: device nodes that an image or a container creates in it
    /// cannot be opened. The devices of the specification are in a tmpfs on /dev.
    ///
    /// In a container with a user namespace, `users`, owners in the image are those of the
    /// namespace with the same ids.
    ///
    /// # Errors
    ///
    /// [`RootfsError::Mount`].
    pub fn create(
        image: Arc<Image>,
        base: &Path,
        users: Option<&UserNamespace>,
    ) -> Result<Self, RootfsError> {
        let mapped = users
            .map(|users| image.map(users, base.join("image")))
            .transpose()?;
        let lower = mapped.as_ref().unwrap_or(&image.mount).path().to_owned();
        let upper = MountPoint::create(base.join("upper"))?;
        CString::new(upper_options(guest::memory::room_for_files()))
            .map_err(io::Error::from)
            .and_then(|options| {
                let flags = MountFlags::NODEV;
                let options = options.as_c_str();
                Ok(mount("tmpfs", upper.path(), "tmpfs", flags, options)?)
            })
            .map_err(RootfsError::mount("mount a tmpfs on", upper.path()))?;
        let upper = upper.mounted();
        let (data, work) = (upper.path().join("data"), upper.path().join("work"));
        let etc = etc_directory(&upper);
        for dir in [&data, &work, &etc] {
            fs::create_dir(dir).map_err(RootfsError::mount("create", dir))?;
        }
        copy_root_attributes(&lower, &data)
            .map_err(RootfsError::mount("set the attributes of", &data))?;

        let overlay = MountPoint::create(base.join("rootfs"))?;
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            data.display(),
            work.display()
        );
        CString::new(options)
            .map_err(io::Error::from)
            .and_then(|options| {
                let flags = MountFlags::NODEV;
                Ok(mount(
                    "overlay",
                    overlay.path(),
                    "overlay",
                    flags,
                    options.as_c_str(),
                )?)
            })
            .map_err(RootfsError::mount("mount an overlay on", overlay.path()))?;
        Ok(Self {
            overlay: overlay.mounted(),
            upper,
            mapped,
            _image: image,
            owner: users.map(|users| users.maps().root()),
        })
    }

    /// Returns the usage of the file system of its writable layer.
    ///
    /// # Errors
    ///
    /// [`RootfsError::Mount`].
    pub fn writable(&self) -> Result<api::FsStats, RootfsError> {
        let path = self.upper.path();
        let stat = rustix::fs::statvfs(path)
            .map_err(io::Error::from)
            .map_err(RootfsError::mount("ask for the use of", path))?;
        Ok(api::FsStats {
            bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
            free_bytes: stat.f_bfree.saturating_mul(stat.f_frsize),
            inodes: stat.f_files,
            free_inodes: stat.f_ffree,
            ..Default::default()
        })
    }

    /// Returns the directory for files that are the container's and not its image's. It is beside
    /// the writable layer: what the container writes to them counts like that layer, does not take
    /// the room of the agent's own files in /run, and is discarded with it.
    #[must_use]
    pub fn etc_directory(&self) -> PathBuf {
        etc_directory(&self.upper)
    }

    /// Creates a directory in it, with its parents, unless it exists: images name working
    /// directories that no layer contains.
    ///
    /// # Errors
    ///
    /// [`RootfsError::Mount`].
    pub fn make_dir(&self, path: &Path) -> Result<(), RootfsError> {
        self.try_make_dir(path)
            .map_err(RootfsError::mount("create the container's directory", path))
    }

    fn try_make_dir(&self, path: &Path) -> io::Result<()> {
        // Links of the image are followed only within the root filesystem.
        let root = Root::open(self.path()).map_err(io::Error::other)?;
        let missing: Vec<&Path> = match self.owner {
            Some(_) => {
                let above = path.ancestors().filter(|above| above.parent().is_some());
                above
                    .take_while(|above| root.resolve(above).is_err())
                    .collect()
            }
            None => Vec::new(),
        };
        root.mkdir_all(path, &fs::Permissions::from_mode(0o755))
            .map_err(io::Error::other)?;
        for (made, owner) in missing.iter().zip(self.owner.iter().cycle()) {
            let made = root.resolve(made).map_err(io::Error::other)?;
            let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
            chownat(&made, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// Creates the parent directories of mounts, owned by the container's root: others that are
    /// missing are created with the mounts, and are owned by the guest's root.
    pub fn make_parents(&self, destinations: &[&Path]) {
        if self.owner.is_none() {
            return;
        }
        for (number, destination) in destinations.iter().enumerate() {
            let mut before = destinations.iter().take(number);
            let is_in_another = before.any(|other| destination.starts_with(other));
            if let Some(parent) = destination.parent()
                && parent.parent().is_some()
                && !is_in_another
                && let Err(error) = self.make_dir(parent)
            {
                // The mount reports the error.
                tracing::debug!(%error, "cannot prepare a mount point");
            }
        }
    }

    /// Unmounts it; returns its image.
    #[must_use]
    pub fn unmount(self) -> Arc<Image> {
        let Self {
            overlay,
            upper,
            mapped,
            _image: image,
            ..
        } = self;
        drop(overlay);
        drop(upper);
        drop(mapped);
        image
    }

    /// Returns its mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.overlay.path()
    }
}

fn etc_directory(upper: &MountPoint) -> PathBuf {
    upper.path().join("etc")
}

/// Returns the mount options of a writable layer in a guest whose files may take `memory` bytes.
/// The kernel's default would limit it permanently to half of the memory at boot. Written data is
/// memory of the container, which has a limit or makes the guest grow; the size only determines how
/// much free space programs see.
fn upper_options(memory: u64) -> String {
    // As many as the kernel's default for that much memory.
    let inodes = files_of(memory);
    format!("mode=0755,size={memory},nr_inodes={inodes}")
}

/// Returns how many files the kernel lets a tmpfs have by default that may take so many bytes.
pub(super) fn files_of(memory: u64) -> u64 {
    memory / INODE_BYTES
}

/// Copies the owner and mode of the image's root: the root of an overlay shows those of its upper
/// directory.
fn copy_root_attributes(image: &Path, upper: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let attributes = fs::metadata(image)?;
    std::os::unix::fs::chown(upper, Some(attributes.uid()), Some(attributes.gid()))?;
    fs::set_permissions(upper, attributes.permissions())
}

/// A directory or file that was created to mount on.
#[derive(Debug)]
pub(in crate::container) struct MountPoint {
    path: PathBuf,
    is_file: bool,
    mounted: bool,
}

impl MountPoint {
    pub(in crate::container) fn create(path: PathBuf) -> Result<Self, RootfsError> {
        fs::create_dir_all(&path).map_err(RootfsError::mount("create", &path))?;
        Ok(Self {
            path,
            is_file: false,
            mounted: false,
        })
    }

    /// Creates one for a file, in an existing directory.
    pub(in crate::container) fn create_file(path: PathBuf) -> Result<Self, RootfsError> {
        fs::File::create_new(&path).map_err(RootfsError::mount("create", &path))?;
        Ok(Self {
            path,
            is_file: true,
            mounted: false,
        })
    }

    pub(in crate::container) fn mounted(mut self) -> Self {
        self.mounted = true;
        self
    }

    pub(in crate::container) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        // Immediately if possible. A dying process may hold it for another moment: then it is
        // detached, and freed when the last user is gone.
        let unmounted = || {
            unmount(&self.path, UnmountFlags::NOFOLLOW)
                .or_else(|_| unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW))
        };
        let removed = || match self.is_file {
            true => fs::remove_file(&self.path),
            false => fs::remove_dir(&self.path),
        };
        if self.mounted
            && let Err(error) = unmounted()
        {
            tracing::warn!(path = ?self.path, %error, "cannot unmount");
        } else if let Err(error) = removed() {
            tracing::warn!(path = ?self.path, %error, "cannot remove a mount point");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_layer_is_bounded_by_what_the_guest_may_come_to_have() {
        let options = upper_options(16 << 30);
        assert_eq!(options, "mode=0755,size=17179869184,nr_inodes=2097152");
    }
}
