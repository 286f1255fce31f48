//! Volumes in the guest's memory. Each is a tmpfs that exists from the first container that names
//! it until the guest ends; containers that name the same one share it.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use oci_spec::runtime::Mount;
use podvisor_agent_protocol::{MountSource, limits};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, mkdirat, openat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind};

use crate::container::files::rootfs::{MountPoint, RootfsError, files_of};
use crate::container::limit::TooMany;
use crate::container::spec_error::SpecError;
use crate::container::users::namespace::{IdKind, IdMaps, NamespaceError};
use crate::guest::memory::room_for_files;

/// Longest key, in bytes.
const KEY_BYTES: usize = 32;

/// Where the volumes are in the directory of the agent.
const NAME: &str = "memory";

/// A container's volumes in memory cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(in crate::container) enum MemoryError {
    Spec(#[from] SpecError),
    Namespace(#[from] NamespaceError),
    Mount(#[from] RootfsError),
    TooMany(#[from] TooMany),
}

/// A volume in memory as described by a mount of a specification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryVolumeMount {
    key: String,
    /// The path in it, unless all of it is mounted.
    below: Option<PathBuf>,
    /// In bytes; `None`: the kernel's default.
    size: Option<u64>,
    mode: u32,
    uid: u32,
    gid: u32,
    /// Options of the bind mount.
    options: Vec<String>,
}

impl MemoryVolumeMount {
    /// Returns the volume that a mount describes; `None` if it is a mount of another kind.
    ///
    /// # Errors
    ///
    /// [`SpecError::Refused`].
    pub fn of(mount: &Mount) -> Result<Option<Self>, SpecError> {
        let source = mount.source().as_deref().and_then(Path::to_str);
        let Some(MountSource::Memory { key, below }) = source.and_then(MountSource::parse) else {
            return Ok(None);
        };
        let below = below.map(PathBuf::from);
        let is_key = (1..=KEY_BYTES).contains(&key.len())
            && key.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_key {
            return Err(SpecError::Refused(
                "the key of a volume in memory is 1 to 32 letters and digits (memory:KEY)",
            ));
        }
        let is_below = below
            .as_deref()
            .is_none_or(|below| !below.as_os_str().is_empty() && is_plain(below));
        if !is_below {
            return Err(SpecError::Refused(
                "a path in a volume in memory is relative, without `..` (memory:KEY/PATH)",
            ));
        }
        let mut wanted = Self {
            key: key.to_owned(),
            below,
            size: None,
            mode: 0o755,
            uid: 0,
            gid: 0,
            options: Vec::new(),
        };
        for option in mount.options().iter().flatten() {
            wanted.take(option)?;
        }
        Ok(Some(wanted))
    }

    fn take(&mut self, option: &str) -> Result<(), SpecError> {
        const NUMBER: SpecError = SpecError::Refused(
            "options of a volume in memory: size is at least 1, mode octal and at most 7777, uid \
             and gid below 4294967295",
        );
        let id = |value: &str| {
            let id: u32 = value.parse().map_err(|_| NUMBER)?;
            if id == u32::MAX { Err(NUMBER) } else { Ok(id) }
        };
        match option.split_once('=') {
            Some(("size", value)) => match value.parse() {
                Ok(0) | Err(_) => return Err(NUMBER),
                Ok(size) => self.size = Some(size),
            },
            Some(("mode", value)) => match u32::from_str_radix(value, 8) {
                Ok(mode) if mode <= 0o7777 => self.mode = mode,
                _ => return Err(NUMBER),
            },
            Some(("uid", value)) => self.uid = id(value)?,
            Some(("gid", value)) => self.gid = id(value)?,
            _ => self.options.push(option.to_owned()),
        }
        Ok(())
    }

    /// Mounts the volume's tmpfs.
    fn mount(&self, path: &Path) -> io::Result<()> {
        let size = self
            .size
            .map_or(String::new(), |size| format!(",size={size}"));
        // The kernel's default would be that of the memory at boot, for good.
        let files = files_of(room_for_files());
        let data = format!(
            "mode={:o},uid={},gid={},nr_inodes={files}{size}",
            self.mode, self.uid, self.gid
        );
        // Device nodes in a volume cannot be opened.
        let flags = MountFlags::NODEV;
        Ok(mount(
            "tmpfs",
            path,
            "tmpfs",
            flags,
            CString::new(data)?.as_c_str(),
        )?)
    }

    /// Binds the requested path in the volume at `root`.
    fn bind(&self, root: &Path, below: &Path, target: PathBuf) -> Result<MountPoint, RootfsError> {
        let from = root.join(below);
        let failed = || RootfsError::mount("open in a volume", &from);
        let opened = self.open_below(root, below).map_err(failed())?;
        let stat = fstat(&opened).map_err(io::Error::from).map_err(failed())?;
        let target = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => MountPoint::create(target)?,
            _ => MountPoint::create_file(target)?,
        };
        // By its descriptor: containers cannot change in between what the path refers to.
        mount_bind(
            format!("/proc/self/fd/{}", opened.as_raw_fd()),
            target.path(),
        )
        .map_err(io::Error::from)
        .map_err(RootfsError::mount("bind from a volume", &from))?;
        Ok(target.mounted())
    }

    /// Opens the requested path in the volume at `root`. Missing directories are created, with the
    /// volume's mode and owner. Links are not followed: containers create them.
    fn open_below(&self, root: &Path, below: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = openat(CWD, root, flags | OFlags::DIRECTORY, Mode::empty())?;
        for name in below.iter().map(Path::new) {
            at = match openat(&at, name, flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    // A container may have created it meanwhile; then it is left as it is.
                    match mkdirat(&at, name, Mode::RWXU) {
                        Ok(()) => self.give(&at, name)?,
                        Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    openat(&at, name, flags, Mode::empty())?
                }
                opened => opened?,
            };
        }
        match FileType::from_raw_mode(fstat(&at)?.st_mode) {
            FileType::Directory | FileType::RegularFile => Ok(at),
            _ => Err(Errno::LOOP.into()),
        }
    }

    /// Gives a created directory the volume's mode and owner.
    fn give(&self, at: &OwnedFd, name: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = File::from(openat(at, name, flags, Mode::empty())?);
        std::os::unix::fs::fchown(&made, Some(self.uid), Some(self.gid))?;
        made.set_permissions(Permissions::from_mode(self.mode))
    }
}

/// The existing volumes, by their keys.
#[derive(Debug, Default)]
pub(in crate::container) struct Memory {
    made: Mutex<BTreeSet<String>>,
}

impl Memory {
    /// Ensures that a container's volumes in memory exist, and sets the sources of its mounts;
    /// their owners are the container's, with the mappings `maps`. Binds for this container only
    /// are mounted in `directory`, until the value is dropped.
    ///
    /// # Errors
    ///
    /// [`MemoryError`].
    pub(in crate::container) fn place(
        &self,
        mounts: Option<&mut Vec<Mount>>,
        base: &Path,
        directory: &Path,
        maps: Option<&IdMaps>,
    ) -> Result<Vec<MountPoint>, MemoryError> {
        let mut bound = Vec::new();
        for mount in mounts.into_iter().flatten() {
            let Some(mut wanted) = MemoryVolumeMount::of(mount)? else {
                continue;
            };
            if let Some(maps) = maps {
                wanted.uid = maps.id(IdKind::User, wanted.uid)?;
                wanted.gid = maps.id(IdKind::Group, wanted.gid)?;
            }
            let root = self.ensure(&wanted, &base.join(NAME))?;
            let path = match &wanted.below {
                None => root,
                Some(below) => {
                    let target = directory.join(format!("{NAME}-{}", bound.len()));
                    let target = wanted.bind(&root, below, target)?;
                    let path = target.path().to_owned();
                    bound.push(target);
                    path
                }
            };
            mount.set_source(Some(path));
            mount.set_options(Some(wanted.options));
        }
        Ok(bound)
    }

    /// Returns the tmpfs of a volume, which is created unless it exists.
    fn ensure(&self, wanted: &MemoryVolumeMount, dir: &Path) -> Result<PathBuf, MemoryError> {
        let path = dir.join(&wanted.key);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.contains(&wanted.key) {
            return Ok(path);
        }
        let limit = limits::MEMORY_VOLUMES;
        if made.len() >= limit {
            let what = "volumes in memory";
            return Err(TooMany { what, limit }.into());
        }
        fs::create_dir_all(&path).map_err(RootfsError::mount("create", &path))?;
        let mounted = wanted.mount(&path);
        mounted.map_err(RootfsError::mount("mount a tmpfs on", &path))?;
        made.insert(wanted.key.clone());
        Ok(path)
    }
}

/// Returns whether a path only descends.
pub(in crate::container) fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    parts.all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use serde_json::json;

    use super::*;

    fn mount_of(source: &str, options: &[&str]) -> Mount {
        let value = json!({
            "destination": "/x", "type": "bind", "source": source, "options": options,
        });
        serde_json::from_value(value).unwrap()
    }

    fn wanted(source: &str, options: &[&str]) -> MemoryVolumeMount {
        MemoryVolumeMount::of(&mount_of(source, options))
            .unwrap()
            .unwrap()
    }

    #[test]
    fn a_volume_is_told_from_other_sources_with_its_options() {
        for other in ["/dev/shm", "image:0123", "/run/podvisor/shared/memory:1"] {
            assert_eq!(
                MemoryVolumeMount::of(&mount_of(other, &["size=x"])).unwrap(),
                None
            );
        }
        let options = ["rbind", "size=4096", "mode=2777", "uid=1", "gid=2000", "ro"];
        let found = wanted("memory:7/a b/c", &options);
        assert_eq!(found.key, "7");
        assert_eq!(found.below.as_deref(), Some(Path::new("a b/c")));
        assert_eq!(found.size, Some(4096));
        assert_eq!((found.mode, found.uid, found.gid), (0o2777, 1, 2000));
        assert_eq!(found.options, ["rbind", "ro"]);
    }

    #[test]
    fn what_is_no_volume_in_memory_is_refused() {
        let long = format!("memory:{}", "a".repeat(33));
        for source in [
            "memory:",
            "memory:/a",
            "memory:..",
            "memory:../a",
            "memory:a/",
            "memory:a//b",
            "memory:a/..",
            "memory:a/b/../../..",
            "memory:a-b",
            &long,
        ] {
            let found = MemoryVolumeMount::of(&mount_of(source, &["rbind"]));
            assert!(matches!(found, Err(SpecError::Refused(_))), "{source}");
        }
        for option in [
            "size=0",
            "size=-1",
            "size=1,mode=0",
            "size=18446744073709551616",
            "mode=10000",
            "mode=8",
            "uid=4294967295",
            "gid=root",
            "gid=",
        ] {
            let found = MemoryVolumeMount::of(&mount_of("memory:a", &[option]));
            assert!(matches!(found, Err(SpecError::Refused(_))), "{option}");
        }
    }

    #[test]
    fn what_is_below_a_volume_is_made_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let (uid, gid) = {
            let meta = fs::metadata(root).unwrap();
            (meta.uid(), meta.gid())
        };
        let of = |uid: u32, gid: u32| {
            let ids = [format!("uid={uid}"), format!("gid={gid}")];
            wanted("memory:a/b", &["mode=1777", &ids[0], &ids[1]])
        };
        let volume = of(uid, gid);
        let open = |below: &str| volume.open_below(root, Path::new(below));
        open("new/inner").unwrap();
        for made in ["new", "new/inner"] {
            let mode = fs::metadata(root.join(made)).unwrap().mode();
            assert_eq!(mode & 0o7777, 0o1777, "{made}");
        }
        // Existing directories are left unchanged.
        fs::create_dir(root.join("old")).unwrap();
        fs::set_permissions(root.join("old"), Permissions::from_mode(0o700)).unwrap();
        open("old").unwrap();
        assert_eq!(
            fs::metadata(root.join("old")).unwrap().mode() & 0o7777,
            0o700
        );
        fs::write(root.join("file"), "").unwrap();
        open("file").unwrap();
        assert!(open("file/below").is_err());

        symlink("/etc", root.join("link")).unwrap();
        symlink("nowhere", root.join("dangling")).unwrap();
        for refused in ["link", "link/passwd", "link/new", "dangling", "dangling/x"] {
            assert!(open(refused).is_err(), "{refused}");
        }
        assert!(!root.join("nowhere").exists());
    }
}
