//! Images and the root filesystems made of them.
//!
//! An image is mounted once, read-only, for as long as a container uses it. Each container
//! has an overlay of it whose upper layer is a tmpfs of its own: what the container writes
//! costs its memory and is gone with it. Dropping a value unmounts what it mounted.

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

use super::disk::{self, DiskError};
use super::users::{Owner, UserNamespace};
use crate::guest;

/// A filesystem whose last mount is gone ends at once, or after what still uses it.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
const RELEASE_RETRY: Duration = Duration::from_millis(5);

/// Memory for each file that a writable layer may have.
const INODE_BYTES: u64 = 8 << 10;

/// A root filesystem cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootfsError {
    /// There is no such image.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The disk holds no filesystem that the guest can mount.
    #[error("cannot mount {disk} as EROFS: the image's disk is damaged or no EROFS file")]
    Image {
        /// The device node.
        disk: PathBuf,
        /// What mount(2) said.
        #[source]
        source: io::Error,
    },
    /// Something else could not be mounted or created.
    #[error("cannot {action} {path}")]
    Mount {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl RootfsError {
    pub(super) fn mount(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Mount {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

/// The images that are mounted, by serial. Clones share one table.
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
    /// The image on the disk with this serial, mounted under `base`.
    ///
    /// # Errors
    ///
    /// [`RootfsError`]; the serial is taken to be valid.
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

    /// Gives an image back. When this was its last user, waits until the kernel has let go of the
    /// disk and gives the serial: the disk may change then.
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
            // A filesystem claims its disk for itself as long as it exists.
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
            match rustix::fs::open(&disk, flags, Mode::empty()) {
                Err(Errno::BUSY) if Instant::now() < deadline => {
                    // Nothing tells when the last use of a filesystem has ended.
                    tokio::time::sleep(RELEASE_RETRY).await;
                }
                Err(Errno::BUSY) => {
                    tracing::warn!(?disk, "the disk of an image is still in use");
                    return None;
                }
                // A disk that is gone is not in use either.
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
    /// The serial number of its disk.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Mounts it once more on `target`, with ids of a user namespace.
    pub(super) fn map(
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
    // Fields drop in order: the overlay goes before what it is made of.
    overlay: MountPoint,
    upper: MountPoint,
    /// The image with ids of a user namespace.
    mapped: Option<MountPoint>,
    _image: Arc<Image>,
    owner: Option<Owner>,
}

impl Rootfs {
    /// Lays a writable layer over an image, with mount points in `base`.
    ///
    /// The overlay is mounted `nodev`: device nodes that an image or a container makes in it
    /// open nothing. The devices of the specification lie in a tmpfs on /dev.
    ///
    /// In a container that is in a user namespace, `users`, owners in the image are those of the
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
        for dir in [&data, &work] {
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

    /// How full the file system of its writable layer is.
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

    /// Makes a directory in it, with its parents, unless it is there: images name working
    /// directories that no layer holds.
    ///
    /// # Errors
    ///
    /// [`RootfsError::Mount`].
    pub fn make_dir(&self, path: &Path) -> Result<(), RootfsError> {
        self.try_make_dir(path)
            .map_err(RootfsError::mount("create the container's directory", path))
    }

    fn try_make_dir(&self, path: &Path) -> io::Result<()> {
        // Links of the image are followed within the root filesystem only.
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

    /// Makes the directories that mounts are to be in, for the container's root to own: what else
    /// is missing is made with the mounts, and is the guest's root's.
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
                // The mount tells what is wrong.
                tracing::debug!(%error, "cannot prepare a mount point");
            }
        }
    }

    /// Unmounts it; gives back what it was made of.
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

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.overlay.path()
    }
}

/// How the file system of a writable layer is mounted in a guest whose files may take `memory`
/// bytes. The kernel would bound it by half of what there is at boot, for good. What is written is
/// memory of the container, which has a limit, or has the guest grow; the bound is what programs
/// are told of how much is free.
fn upper_options(memory: u64) -> String {
    // As many as the kernel has it for as much memory.
    let inodes = memory / INODE_BYTES;
    format!("mode=0755,size={memory},nr_inodes={inodes}")
}

/// The root of an overlay shows its upper directory's owner and mode, not the image's.
fn copy_root_attributes(image: &Path, upper: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let attributes = fs::metadata(image)?;
    std::os::unix::fs::chown(upper, Some(attributes.uid()), Some(attributes.gid()))?;
    fs::set_permissions(upper, attributes.permissions())
}

/// A directory or file that was made to mount on.
#[derive(Debug)]
pub(super) struct MountPoint {
    path: PathBuf,
    is_file: bool,
    mounted: bool,
}

impl MountPoint {
    pub(super) fn create(path: PathBuf) -> Result<Self, RootfsError> {
        fs::create_dir_all(&path).map_err(RootfsError::mount("create", &path))?;
        Ok(Self {
            path,
            is_file: false,
            mounted: false,
        })
    }

    /// One for a file, in a directory that is there.
    pub(super) fn create_file(path: PathBuf) -> Result<Self, RootfsError> {
        fs::File::create_new(&path).map_err(RootfsError::mount("create", &path))?;
        Ok(Self {
            path,
            is_file: true,
            mounted: false,
        })
    }

    pub(super) fn mounted(mut self) -> Self {
        self.mounted = true;
        self
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        // At once if possible. A dying process may hold it for another moment: detached then, and
        // freed when the last user is gone.
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
