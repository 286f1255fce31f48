//! Files of the host, mounted on names in a directory that a guest is served: how the command
//! line and the CRI share volumes.
//!
//! A tree of mounts is copied, gets its attributes while it is mounted nowhere, and is then
//! attached to a descriptor. So nobody ever sees it with other attributes than it is to have, and
//! no path that a guest might have changed is followed.
#![allow(unsafe_code)] // mount_setattr

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, mkdirat, openat, statx};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// Which mounts of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The one at the top.
    Top,
    /// That and all below it.
    Whole,
}

/// What becomes of mounts and unmounts elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Propagation {
    /// Nothing is passed on, in either direction.
    Private,
    /// What is mounted in the source appears here too.
    FromSource,
}

impl Propagation {
    fn flag(self) -> u64 {
        match self {
            Self::Private => libc::MS_PRIVATE,
            Self::FromSource => libc::MS_SLAVE,
        }
    }
}

/// Opens what is at a path, only to name it.
pub(crate) fn open_path(path: &Path) -> io::Result<File> {
    open(path, OFlags::PATH)
}

/// Opens a directory in which names are to be mounted on.
pub(crate) fn open_root(path: &Path) -> io::Result<File> {
    open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW)
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Makes a directory, where it is none yet, a mount of its own, which passes on what is mounted in
/// it from then on to its copies, such as that of a [jail](crate::sandbox::jail::Share). What is
/// mounted in it already stays. Whoever removes the directory unmounts it first.
///
/// # Errors
/// The kernel's: it takes `CAP_SYS_ADMIN`.
pub fn pass_on_mounts(dir: &Path) -> io::Result<()> {
    let mut root = open_root(dir)?;
    let about = statx(&root, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    if !about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        let copy = DetachedTree::of(&root, Extent::Whole, Propagation::Private)?;
        copy.attach(&MountPoint(root.into()))?;
        root = open_root(dir)?;
    }
    // Of a group of its own: were it of its parent's, others would have what is mounted in it.
    set(root.as_fd(), Extent::Top, 0, libc::MS_PRIVATE)?;
    set(root.as_fd(), Extent::Top, 0, libc::MS_SHARED)
}

/// Adds attributes to mounts, the others stay as they are; and says how they propagate.
fn set(mount: BorrowedFd<'_>, extent: Extent, attributes: u64, propagation: u64) -> io::Result<()> {
    let wanted = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation,
        userns_fd: 0,
    };
    let mut flags = libc::AT_EMPTY_PATH;
    if extent == Extent::Whole {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the path is a C string, the structure is of the size that is told, and the kernel
    // writes to neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const wanted,
            size_of::<libc::mount_attr>(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A copy of mounts that is mounted nowhere. It goes with its descriptor, unless it is attached.
#[derive(Debug)]
pub(crate) struct DetachedTree {
    tree: OwnedFd,
    propagation: Propagation,
}

impl DetachedTree {
    /// Copies the mount that an open file or directory is in, from there downwards.
    pub(crate) fn of(
        source: impl AsFd,
        extent: Extent,
        propagation: Propagation,
    ) -> io::Result<Self> {
        let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        if extent == Extent::Whole {
            flags |= OpenTreeFlags::AT_RECURSIVE;
        }
        let tree = open_tree(source, c"", flags)?;
        let copy = Self { tree, propagation };
        copy.set(Extent::Whole, 0)?;
        Ok(copy)
    }

    /// Devices in these mounts open nothing, and programs run with nobody else's rights.
    pub(crate) fn make_harmless(&self) -> io::Result<()> {
        let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        self.set(Extent::Whole, attributes)
    }

    /// Nobody writes in these mounts.
    pub(crate) fn make_read_only(&self, extent: Extent) -> io::Result<()> {
        self.set(extent, libc::MOUNT_ATTR_RDONLY)
    }

    fn set(&self, extent: Extent, attributes: u64) -> io::Result<()> {
        let propagation = self.propagation.flag();
        set(self.tree.as_fd(), extent, attributes, propagation)
    }

    /// Mounts the tree on `point`.
    pub(crate) fn attach(&self, point: &MountPoint) -> io::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&self.tree, c"", &point.0, c"", flags)?;
        // A mount below one that passes mounts on does so itself from then on.
        match self.propagation {
            Propagation::Private => self.set(Extent::Whole, 0),
            Propagation::FromSource => Ok(()),
        }
    }
}

/// The directory at the top, wherever the tree is mounted.
impl AsFd for DetachedTree {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

/// What was made to be mounted on.
#[derive(Debug)]
pub(crate) struct MountPoint(OwnedFd);

impl MountPoint {
    /// Makes a file or directory `name` in `root`, where nothing may be at that name.
    pub(crate) fn make(root: BorrowedFd<'_>, name: &str, is_dir: bool) -> io::Result<Self> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let point = if is_dir {
            mkdirat(root, name, Mode::from_raw_mode(0o755))?;
            openat(
                root,
                name,
                flags | OFlags::PATH | OFlags::DIRECTORY,
                Mode::empty(),
            )
        } else {
            let flags = flags | OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL;
            openat(root, name, flags, Mode::from_raw_mode(0o644))
        };
        Ok(Self(point?))
    }
}

/// The mounts of this process.
pub(crate) const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Mount points at and below `dir`, in the order in which they were mounted. The way to it may have
/// links, which the kernel's names have not. One at `dir` itself is not followed: nothing is
/// mounted on a link, and a guest may have made it.
pub(crate) fn mount_points(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = match resolved(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        dir => dir?,
    };
    let text = fs::read(MOUNTINFO)?;
    let lines = text.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| {
        let point = line.split(|byte| *byte == b' ').nth(4)?;
        Some(unescape(point))
    });
    Ok(points.filter(|point| point.starts_with(&dir)).collect())
}

fn resolved(dir: &Path) -> io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) => Ok(fs::canonicalize(parent)?.join(name)),
        // `/`, or one that ends with `..`.
        _ => fs::canonicalize(dir),
    }
}

/// The kernel writes blanks and backslashes in octal.
pub(crate) fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (
                b'\\',
                [
                    a @ b'0'..=b'3',
                    b @ b'0'..=b'7',
                    c @ b'0'..=b'7',
                    after @ ..,
                ],
            ) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => bytes.push(*byte),
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{UnmountFlags, unmount};
    use std::fs;

    #[test]
    fn mount_points_are_bytes_of_which_the_kernel_writes_some_in_octal() {
        assert_eq!(unescape(br"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescape(br"/a\9"), Path::new(r"/a\9"));
        let foreign = unescape(b"/\xff");
        assert_eq!(foreign.as_os_str().as_encoded_bytes(), b"/\xff");
    }

    struct Rig {
        dir: tempfile::TempDir,
        root: File,
    }

    impl Rig {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["shared", "data", "victim"] {
                fs::create_dir(dir.path().join(name)).unwrap();
            }
            fs::write(dir.path().join("data/file"), "x").unwrap();
            let root = open_root(&dir.path().join("shared")).unwrap();
            Self { dir, root }
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.dir.path().join(name)
        }

        fn tree(&self) -> DetachedTree {
            let source = open_path(&self.path("data")).unwrap();
            DetachedTree::of(source, Extent::Whole, Propagation::Private).unwrap()
        }
    }

    #[test]
    fn a_mount_point_that_is_swapped_for_a_link_leads_nowhere() {
        let rig = Rig::new();
        let point = MountPoint::make(rig.root.as_fd(), "v0", true).unwrap();
        fs::rename(rig.path("shared/v0"), rig.path("shared/away")).unwrap();
        std::os::unix::fs::symlink(rig.path("victim"), rig.path("shared/v0")).unwrap();
        rig.tree().attach(&point).unwrap();
        assert!(!rig.path("victim/file").exists());
        assert!(rig.path("shared/away/file").exists());
        unmount(rig.path("shared/away"), UnmountFlags::DETACH).unwrap();
    }

    #[test]
    fn mount_points_are_found_by_any_way_but_a_link_in_their_place() {
        let rig = Rig::new();
        let point = MountPoint::make(rig.root.as_fd(), "v0", true).unwrap();
        rig.tree().attach(&point).unwrap();
        let mounted = fs::canonicalize(rig.path("shared")).unwrap().join("v0");
        let link = |to: &Path, name: &str| {
            std::os::unix::fs::symlink(to, rig.path(name)).unwrap();
            rig.path(name)
        };
        let root = link(rig.dir.path(), "root");
        for way in ["shared", "shared/v0", "data/../shared"] {
            assert_eq!(mount_points(&root.join(way)).unwrap(), [&*mounted], "{way}");
        }
        let in_place = link(&mounted, "shared/v1");
        assert!(mount_points(&in_place).unwrap().is_empty());
        assert!(mount_points(&rig.path("no/such")).unwrap().is_empty());
        unmount(&mounted, UnmountFlags::DETACH).unwrap();
    }

    #[test]
    fn what_is_at_a_name_already_is_not_mounted_on() {
        let rig = Rig::new();
        std::os::unix::fs::symlink(rig.path("victim"), rig.path("shared/v0")).unwrap();
        for is_dir in [false, true] {
            let made = MountPoint::make(rig.root.as_fd(), "v0", is_dir);
            assert_eq!(made.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        }
        std::os::unix::fs::symlink(rig.path("shared"), rig.path("link")).unwrap();
        assert!(open_root(&rig.path("link")).is_err());
    }

    #[test]
    fn a_read_only_tree_is_so_before_it_is_anywhere() {
        let rig = Rig::new();
        // Whoever writes in the source does not keep its copy from being read-only.
        let _writer = File::create(rig.path("data/written")).unwrap();
        let tree = rig.tree();
        tree.make_harmless().unwrap();
        tree.make_read_only(Extent::Whole).unwrap();
        let made = openat(
            &tree.tree,
            c"new",
            OFlags::WRONLY | OFlags::CREATE,
            Mode::from_raw_mode(0o644),
        );
        assert_eq!(made.unwrap_err(), rustix::io::Errno::ROFS);
        let point = MountPoint::make(rig.root.as_fd(), "v0", true).unwrap();
        tree.attach(&point).unwrap();
        let written = fs::write(rig.path("shared/v0/new"), "");
        assert_eq!(
            written.unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        unmount(rig.path("shared/v0"), UnmountFlags::DETACH).unwrap();
    }

    #[test]
    fn copies_have_what_is_mounted_in_a_directory_that_passes_it_on() {
        let rig = Rig::new();
        let shared = rig.path("shared");
        for _ in 0..2 {
            pass_on_mounts(&shared).unwrap();
            assert_eq!(mount_points(&shared).unwrap().len(), 1);
        }
        let root = open_root(&shared).unwrap();
        let copy = DetachedTree::of(&root, Extent::Whole, Propagation::FromSource).unwrap();
        // As in a jail's root directory: what is mounted nowhere gets no mounts.
        let point = MountPoint::make(open_root(rig.dir.path()).unwrap().as_fd(), "jail", true);
        copy.attach(&point.unwrap()).unwrap();
        let volume = MountPoint::make(root.as_fd(), "v0", true).unwrap();
        rig.tree().attach(&volume).unwrap();
        assert!(rig.path("jail/v0/file").exists());
        // Of the volume itself nothing is passed on.
        let below = MountPoint::make(open_root(&rig.path("data")).unwrap().as_fd(), "below", true);
        rig.tree().attach(&below.unwrap()).unwrap();
        assert!(!rig.path("jail/v0/below/file").exists());
        unmount(rig.path("shared/v0"), UnmountFlags::DETACH).unwrap();
        assert!(!rig.path("jail/v0/file").exists());
        for point in ["data/below", "jail", "shared"] {
            unmount(rig.path(point), UnmountFlags::DETACH).unwrap();
        }
    }
}
