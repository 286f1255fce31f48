//! The disks' file systems, mounted read-only, as the search for an entry sees them.

use std::ffi::CStr;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use podvisor_boot_entries::signature::Kind;
use podvisor_boot_entries::{
    FileError, FileKind, FileRef, FileStat, Root, Volume, VolumeId, Volumes,
};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::mount::{MountFlags, UnmountFlags, mount as mount_at, unmount as unmount_at};

use crate::console::say;
use crate::disks::{Disk, Part};
use crate::error::LoaderError;
use crate::watchdog::Watchdog;

/// How each file system is mounted: its name in Linux, and what keeps it from writing.
fn how(kind: Kind) -> Option<(&'static str, Option<&'static CStr>)> {
    match kind {
        Kind::Ext4 => Some(("ext4", Some(c"noload"))),
        Kind::Xfs => Some(("xfs", Some(c"norecovery,nouuid"))),
        Kind::Btrfs => Some(("btrfs", Some(c"rescue=nologreplay"))),
        Kind::Vfat => Some(("vfat", None)),
        Kind::Iso9660 => Some(("iso9660", None)),
        _ => None,
    }
}

/// Subvolumes of btrfs that distributions have their root in.
const SUBVOLUMES: &[&str] = &["@", "root"];

/// What tells the root of an operating system.
const OF_A_ROOT: &[&str] = &[
    "etc/os-release",
    "usr/lib/os-release",
    "sbin/init",
    "usr/sbin/init",
];

/// A directory in which paths are resolved, as if it were `/`.
#[derive(Debug)]
struct Tree {
    root: OwnedFd,
    /// What Linux has to mount it with.
    flags: Option<String>,
}

/// The mounted file systems.
#[derive(Debug)]
pub(crate) struct Trees {
    volumes: Vec<Volume>,
    /// Of each volume: its trees, in the order in which a path is looked up.
    trees: Vec<Vec<Tree>>,
    mounts: Vec<PathBuf>,
}

/// Mounts all that can be.
pub(crate) fn mount(disks: &[Disk], watchdog: &Watchdog) -> Result<Trees, LoaderError> {
    let mut all = Trees {
        volumes: Vec::new(),
        trees: Vec::new(),
        mounts: Vec::new(),
    };
    let mut faults = Vec::new();
    for disk in disks {
        for part in &disk.parts {
            watchdog.step(format!("mounting {}", part.name));
            match all.add(disk, part) {
                Ok(()) => {}
                Err(fault) => {
                    let fault = format!("{}: {fault}", part.name);
                    if part
                        .signature
                        .as_ref()
                        .is_some_and(|found| found.kind.is_mountable())
                    {
                        say(&format!("passed over: {fault}"));
                    }
                    faults.push(fault);
                }
            }
        }
    }
    if all.volumes.is_empty() {
        return Err(LoaderError::NoFileSystem(faults.join(", ")));
    }
    Ok(all)
}

impl Trees {
    fn add(&mut self, disk: &Disk, part: &Part) -> Result<(), String> {
        if let Some(fault) = &part.fault {
            return Err(fault.clone());
        }
        let Some(signature) = &part.signature else {
            return Err("neither a file system nor a partition table is known".to_owned());
        };
        let Some((name, options)) = how(signature.kind) else {
            let kind = signature.kind;
            return Err(format!("is {kind}, from which the loader cannot boot"));
        };
        let device = part.device();
        let fails = |error: rustix::io::Errno| format!("failed to mount {name}: {error}");
        let top = self.mount(&device, name, options).map_err(fails)?;
        let mut trees = vec![Tree {
            root: directory(&top).map_err(fails)?,
            flags: None,
        }];
        if signature.kind == Kind::Btrfs {
            // The default subvolume may be below what GRUB's paths begin at.
            let options = c"rescue=nologreplay,subvolid=5";
            if let Ok(top) = self.mount(&device, name, Some(options)) {
                for subvolume in SUBVOLUMES {
                    if let Ok(root) = directory(&top.join(subvolume)) {
                        let flags = Some(format!("subvol={subvolume}"));
                        trees.push(Tree { root, flags });
                    }
                }
                if let Ok(root) = directory(&top) {
                    let flags = Some("subvolid=5".to_owned());
                    trees.push(Tree { root, flags });
                }
            }
        }
        let is_root = |tree: &&Tree| {
            let exists = |path: &&str| tree.open(path, OFlags::PATH).is_ok();
            OF_A_ROOT.iter().any(exists)
        };
        let root = trees.iter().find(is_root).map(|tree| Root {
            flags: tree.flags.clone(),
        });
        self.volumes.push(Volume {
            disk: disk.number,
            partition: part.number,
            device: part.name.clone(),
            kind: signature.kind,
            uuid: signature.uuid.clone(),
            label: signature.label.clone(),
            root,
        });
        self.trees.push(trees);
        Ok(())
    }

    fn mount(
        &mut self,
        device: &Path,
        name: &str,
        options: Option<&CStr>,
    ) -> rustix::io::Result<PathBuf> {
        let target = PathBuf::from(format!("/mnt/{}", self.mounts.len()));
        let _ = fs::create_dir_all(&target);
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount_at(device, &target, name, flags, options)?;
        self.mounts.push(target.clone());
        Ok(target)
    }

    /// Unmounts all.
    pub(crate) fn unmount(self) {
        drop(self.trees);
        for target in self.mounts.iter().rev() {
            // What is still in use cannot be written either.
            let _ = unmount_at(target, UnmountFlags::DETACH);
        }
    }

    /// A file's name in messages: `/path on vda1`.
    pub(crate) fn name(&self, file: &FileRef) -> String {
        let volume = self.volumes.get(file.volume.0);
        let device = volume.map_or("?", |volume| volume.device.as_str());
        format!("/{} on {device}", file.path)
    }

    /// Opens a regular file.
    pub(crate) fn open(&self, volume: VolumeId, path: &str) -> Result<File, FileError> {
        let fails = |reason: String| FileError {
            path: path.to_owned(),
            reason,
        };
        let file = self
            .first(volume, path, OFlags::RDONLY | OFlags::NONBLOCK)
            .map_err(|error| fails(error.to_string()))?
            .ok_or_else(|| fails("no such file".to_owned()))?;
        let stat = fstat(&file).map_err(|error| fails(error.to_string()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(fails("not a regular file".to_owned()));
        }
        Ok(file.into())
    }

    /// Opens a path in the first tree that has it.
    fn first(
        &self,
        volume: VolumeId,
        path: &str,
        flags: OFlags,
    ) -> rustix::io::Result<Option<OwnedFd>> {
        for tree in self.trees.get(volume.0).into_iter().flatten() {
            match tree.open(path, flags) {
                Ok(file) => return Ok(Some(file)),
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

impl Tree {
    /// Links, absolute ones too, end within the tree.
    fn open(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        openat2(
            &self.root,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
    }
}

fn directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty())
}

impl Volumes for Trees {
    fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    fn stat(&self, volume: VolumeId, path: &str) -> Result<Option<FileStat>, FileError> {
        let fails = |error: rustix::io::Errno| FileError {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let Some(file) = self.first(volume, path, OFlags::PATH).map_err(fails)? else {
            return Ok(None);
        };
        let stat = fstat(&file).map_err(fails)?;
        Ok(Some(FileStat {
            kind: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => FileKind::Regular,
                FileType::Directory => FileKind::Directory,
                _ => FileKind::Other,
            },
            size: u64::try_from(stat.st_size).unwrap_or(0),
        }))
    }

    fn read_at(
        &self,
        volume: VolumeId,
        path: &str,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, FileError> {
        let fails = |error: std::io::Error| FileError {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let file = self.open(volume, path)?;
        let size = file.metadata().map_err(fails)?.len();
        let left = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(left)];
        file.read_exact_at(&mut bytes, offset).map_err(fails)?;
        Ok(bytes)
    }

    fn list(
        &self,
        volume: VolumeId,
        directory: &str,
        max: usize,
    ) -> Result<Vec<String>, FileError> {
        let fails = |error: rustix::io::Errno| FileError {
            path: directory.to_owned(),
            reason: error.to_string(),
        };
        for tree in self.trees.get(volume.0).into_iter().flatten() {
            let Ok(opened) = tree.open(directory, OFlags::RDONLY | OFlags::DIRECTORY) else {
                continue;
            };
            let mut names = Vec::new();
            for entry in Dir::read_from(opened.as_fd()).map_err(fails)? {
                let name = entry
                    .map_err(fails)?
                    .file_name()
                    .to_string_lossy()
                    .into_owned();
                if name != "." && name != ".." {
                    names.push(name);
                }
                if names.len() >= max {
                    break;
                }
            }
            if !names.is_empty() {
                return Ok(names);
            }
        }
        Ok(Vec::new())
    }
}
