//! Bind mounts of the host's files on names in a directory that is served to a guest: the command
//! line and the CRI share volumes this way.
//!
//! A tree of mounts is copied, gets its attributes while it is detached, and is then attached to a
//! descriptor. So it is never visible without its final attributes, and no path that a guest might
//! have changed is followed.
#![allow(unsafe_code)] // mount_setattr

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Mode, OFlags, StatVfsMountFlags, StatxAttributes, StatxFlags, mkdirat, openat, statx,
};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// The mounts of a tree that an operation applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Only the top one.
    Top,
    /// The top one and all mounts below it.
    Whole,
}

/// How mounts and unmounts propagate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// Nothing propagates, in either direction.
    Private,
    /// Mounts in the source appear in the copy, too.
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

/// Opens a path with `O_PATH`, only to refer to it.
pub fn open_path(path: &Path) -> io::Result<File> {
    open(path, OFlags::PATH)
}

/// Opens what is to be mounted elsewhere. A directory on which something is mounted when it is used
/// has that done, as by mount(2), and not by `O_PATH` alone.
pub fn open_source(path: &Path) -> io::Result<File> {
    match open(path, OFlags::PATH | OFlags::DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => open_path(path),
        opened => opened,
    }
}

/// Opens a directory in which names are to be mounted on.
pub fn open_root(path: &Path) -> io::Result<File> {
    open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW)
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Turns a directory into a mount point, if it is not one yet, and makes it shared: what is mounted
/// in it from then on propagates to its copies, such as that of a
/// [jail](crate::jail::Share). Mounts that are already in it stay. It has to be unmounted
/// before it is removed.
///
/// # Errors
/// The kernel's: this needs `CAP_SYS_ADMIN`.
pub fn pass_on_mounts(dir: &Path) -> io::Result<()> {
    let mut root = open_root(dir)?;
    let about = statx(&root, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    if !about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        let copy = DetachedTree::of(&root, Extent::Whole, Propagation::Private)?;
        copy.attach(&MountPoint(root.into()))?;
        root = open_root(dir)?;
    }
    // In a peer group of its own: in its parent's group, others would receive its mounts, too.
    set(root.as_fd(), Extent::Top, 0, libc::MS_PRIVATE, None)?;
    set(root.as_fd(), Extent::Top, 0, libc::MS_SHARED, None)
}

/// Adds attributes to mounts, whose others stay as they are, and sets their propagation. With
/// `users` they are mapped by that user namespace.
fn set(
    mount: BorrowedFd<'_>,
    extent: Extent,
    attributes: u64,
    propagation: u64,
    users: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let wanted = libc::mount_attr {
        attr_set: attributes | users.map_or(0, |_| libc::MOUNT_ATTR_IDMAP),
        attr_clr: 0,
        propagation,
        userns_fd: users.map_or(0, |users| u64::from(users.as_raw_fd().unsigned_abs())),
    };
    let mut flags = libc::AT_EMPTY_PATH;
    if extent == Extent::Whole {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the path is a C string, the structure has the size that is passed, and the kernel
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

/// A detached copy of mounts. It is dropped with its descriptor, unless it is attached.
#[derive(Debug)]
pub struct DetachedTree {
    tree: OwnedFd,
    propagation: Propagation,
}

impl DetachedTree {
    /// Copies the mount of an open file or directory, from there downwards.
    pub fn of(source: impl AsFd, extent: Extent, propagation: Propagation) -> io::Result<Self> {
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

    /// Sets `nodev` and `nosuid`: in this copy devices cannot be opened, and set-user-ID programs
    /// gain no rights. Where its source is mounted they do, as the guest's root can make some.
    pub fn make_harmless(&self) -> io::Result<()> {
        let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        self.set(Extent::Whole, attributes)
    }

    /// Makes these mounts read-only.
    pub fn make_read_only(&self, extent: Extent) -> io::Result<()> {
        self.set(extent, libc::MOUNT_ATTR_RDONLY)
    }

    /// Maps the owners of all files in it: who is one of `users` inside sees and sets the owners on
    /// the disk.
    ///
    /// # Errors
    /// The kernel's: one of its file systems does not support this, or a mount is mapped already.
    pub fn map_users(&self, users: impl AsFd) -> io::Result<()> {
        let propagation = self.propagation.flag();
        let tree = self.tree.as_fd();
        set(tree, Extent::Whole, 0, propagation, Some(users.as_fd()))
    }

    /// Whether mounts that the host makes later appear in it.
    #[must_use]
    pub fn follows_the_host(&self) -> bool {
        self.propagation == Propagation::FromSource
    }

    fn set(&self, extent: Extent, attributes: u64) -> io::Result<()> {
        let propagation = self.propagation.flag();
        set(self.tree.as_fd(), extent, attributes, propagation, None)
    }

    /// Mounts the tree on `point`.
    pub fn attach(&self, point: &MountPoint) -> io::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&self.tree, c"", &point.0, c"", flags)?;
        // A tree that is attached below a shared mount becomes shared itself.
        match self.propagation {
            Propagation::Private => self.set(Extent::Whole, 0),
            Propagation::FromSource => Ok(()),
        }
    }
}

/// The directory at the top, whether or not the tree is attached.
impl AsFd for DetachedTree {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

/// Options for the guest's mount of a volume, whose source is in a mount with `flags`: programs in
/// it then run as in a bind mount of the host, which has its source's attributes. What
/// [`DetachedTree::make_harmless`] adds holds on the host, where no program of the guest runs.
/// Linux gives them to what it mounts below by itself, and so has what is mounted there already.
pub fn guest_options(flags: StatVfsMountFlags) -> impl Iterator<Item = &'static str> {
    let all = [
        (StatVfsMountFlags::NOSUID, "rnosuid"),
        (StatVfsMountFlags::NOEXEC, "rnoexec"),
    ];
    let set = move |(flag, option)| flags.contains(flag).then_some(option);
    all.into_iter().filter_map(set)
}

/// What was made to be mounted on.
#[derive(Debug)]
pub struct MountPoint(OwnedFd);

impl MountPoint {
    /// Creates a file or directory `name` in `root`; it must not exist yet.
    pub fn make(root: BorrowedFd<'_>, name: &str, is_dir: bool) -> io::Result<Self> {
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

/// Returns the private mount that a file or directory is on, by its mount point: what the host
/// mounts below it later never appears in copies. `None`: it does.
///
/// # Errors
/// The kernel's.
pub fn private_mount_of(source: &File) -> io::Result<Option<PathBuf>> {
    let flags = StatxFlags::from_bits_retain(libc::STATX_MNT_ID);
    let about = statx(source, c"", AtFlags::EMPTY_PATH, flags)?;
    let table = fs::read(MOUNTINFO)?;
    Ok(private_mount_in(&table, about.stx_mnt_id))
}

/// Returns the mount point of the mount `id` of a table if it is there and private.
fn private_mount_in(table: &[u8], id: u64) -> Option<PathBuf> {
    let mut lines = table.split(|byte| *byte == b'\n');
    let id = id.to_string();
    let fields = lines.find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        (fields.first() == Some(&id.as_bytes())).then_some(fields)
    })?;
    // The optional fields: `shared:GROUP`, `master:GROUP` and others, up to a hyphen.
    let optional = fields.get(6..)?.iter().take_while(|field| **field != b"-");
    let follows = |field: &&[u8]| field.starts_with(b"shared:") || field.starts_with(b"master:");
    match optional.clone().any(follows) {
        true => None,
        false => Some(unescape(fields.get(4)?)),
    }
}

/// The mounts of this process.
pub const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Returns the mount points at and below `dir`, in the order in which they were mounted. Symbolic
/// links on the way to `dir` are resolved, as in the kernel's names. One at `dir` itself is not
/// followed: nothing is mounted on a link, and a guest may have created it.
pub fn mount_points(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = match resolved(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        dir => dir?,
    };
    Ok(mount_points_in(&fs::read(MOUNTINFO)?, &dir))
}

/// Returns the mount points at and below `dir`, by the mount table of a process.
pub(crate) fn mount_points_in(table: &[u8], dir: &Path) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| {
        let point = line.split(|byte| *byte == b' ').nth(4)?;
        Some(unescape(point))
    });
    points.filter(|point| point.starts_with(dir)).collect()
}

fn resolved(dir: &Path) -> io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) => Ok(fs::canonicalize(parent)?.join(name)),
        // `/`, or a path that ends with `..`.
        _ => fs::canonicalize(dir),
    }
}

/// Decodes the octal escapes that the kernel writes for blanks and backslashes.
pub fn unescape(text: &[u8]) -> PathBuf {
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

    #[test]
    fn a_mount_that_nothing_propagates_from_is_told_by_its_point() {
        let table = b"21 1 0:19 / / rw - 9p root rw\n\
            30 21 0:25 / /a\\040b rw,nosuid - tmpfs x rw\n\
            31 21 0:26 / /c rw shared:3 - tmpfs x rw\n\
            32 21 0:27 / /d rw unbindable master:3 - tmpfs x rw\n";
        let private = |id| private_mount_in(table, id);
        assert_eq!(private(30).as_deref(), Some(Path::new("/a b")));
        assert_eq!(private(21).as_deref(), Some(Path::new("/")));
        assert_eq!([31, 32, 33].map(private), [None, None, None]);
        let rig = Rig::new();
        let data = open_source(&rig.path("data")).unwrap();
        pass_on_mounts(&rig.path("data")).unwrap();
        // The directory below the new mount is on the old one.
        let below = private_mount_of(&data).unwrap();
        assert!(below.is_none_or(|point| rig.path("data").starts_with(point)));
        let data = open_source(&rig.path("data")).unwrap();
        assert_eq!(private_mount_of(&data).unwrap(), None);
        unmount(rig.path("data"), UnmountFlags::DETACH).unwrap();
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
        // A writer in the source does not keep its copy from becoming read-only.
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
        // As in a jail's root directory: mounts do not propagate to a detached tree.
        let point = MountPoint::make(open_root(rig.dir.path()).unwrap().as_fd(), "jail", true);
        copy.attach(&point.unwrap()).unwrap();
        let volume = MountPoint::make(root.as_fd(), "v0", true).unwrap();
        rig.tree().attach(&volume).unwrap();
        assert!(rig.path("jail/v0/file").exists());
        // Mounts in the volume itself do not propagate.
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
