//! Moves unpacked files into a directory of the host that may contain files of the same names.
//!
//! The names and links came from a guest, and the directory may contain some from earlier copies.
//! Links are never followed, neither in the source nor below the directory; if a link is replaced,
//! it is the link itself.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, chmodat, fchmod, flock, openat,
    renameat, renameat_with, statat, statfs, syncfs,
};
use rustix::io::Errno;
use tempfile::TempDir;
use tracing::{debug, warn};

use crate::removal::{remove_tree, without_replacing};

/// Maximum depth of directories that exist on both sides.
const MAX_DEPTH: usize = 256;

/// The bits by which a program gets its file's owner or group.
const SET_ID: u32 = 0o6000;

/// How many times to try to remove a directory in which another process still creates files.
const ATTEMPTS: usize = 10;

/// Mode of temporary directories: nobody else gets at what was not checked yet.
const MODE: u32 = 0o700;

/// What the names of temporary directories begin with.
const TEMPORARY: &str = ".podvisor-cp-";

/// What such a directory may contain: what is unpacked, and, with a number, what is half removed.
const CONTENTS: &str = "contents";
const REMOVED: &[u8] = b".removed-";

/// A directory that is removed with its contents on drop, at any depth. If this process is killed,
/// the next one that creates such a directory beside it removes it.
#[derive(Debug)]
pub(super) struct Temporary {
    path: PathBuf,
    /// Locked, where the file system can: it is in use.
    _lock: File,
}

impl Temporary {
    /// Creates one in `parent`, accessible only by this user.
    pub(super) fn make_in(parent: &Path) -> anyhow::Result<Self> {
        remove_leftovers(parent);
        let make = || -> io::Result<Self> {
            for _ in 0..ATTEMPTS {
                let made = tempfile::Builder::new()
                    .prefix(TEMPORARY)
                    .permissions(fs::Permissions::from_mode(MODE))
                    .tempdir_in(parent)?;
                let path = TempDir::keep(made);
                let lock = match File::open(&path) {
                    Ok(lock) => lock,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
                // Otherwise another process took it for a leftover before it was locked.
                if locked != Err(Errno::WOULDBLOCK) && path.exists() {
                    return Ok(Self { path, _lock: lock });
                }
            }
            Err(io::ErrorKind::ResourceBusy.into())
        };
        make().with_context(|| format!("cannot create a directory in {}", parent.display()))
    }

    /// Where to unpack: in a directory that does not exist yet.
    pub(super) fn contents(&self) -> PathBuf {
        self.path.join(CONTENTS)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        remove_temporary(&self.path);
    }
}

fn remove_temporary(path: &Path) {
    for _ in 0..ATTEMPTS {
        match remove_tree(path) {
            // A killed process that was unpacking here may still create one more file.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            Err(error) => {
                let path = path.display();
                warn!(%path, %error, "failed to remove a temporary directory");
                return;
            }
            Ok(()) => return,
        }
    }
}

/// File systems that no other host uses, by the numbers of statfs(2): others show locks of
/// directories to the processes of their own host only.
const LOCAL: [i64; 6] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0x0102_1994, // tmpfs
    0x794c_7630, // overlayfs
];

/// Whether locks tell which temporary directories of `parent` are in use, and nobody but this user
/// can put something else in the place of one.
fn can_have_leftovers_removed(parent: &Path) -> bool {
    let is_local = statfs(parent).is_ok_and(|found| LOCAL.contains(&found.f_type));
    let is_own = fs::metadata(parent).is_ok_and(|found| {
        let is_sticky = found.mode() & 0o1000 != 0;
        let is_mine = found.uid() == rustix::process::geteuid().as_raw();
        is_sticky || is_mine && found.mode() & 0o022 == 0
    });
    is_local && is_own
}

/// Removes the temporary directories of killed processes.
fn remove_leftovers(parent: &Path) {
    if !can_have_leftovers_removed(parent) {
        return;
    }
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry
            .file_name()
            .as_bytes()
            .starts_with(TEMPORARY.as_bytes())
        {
            continue;
        }
        let path = entry.path();
        match lock_leftover(&path) {
            Ok(Some(_lock)) => remove_temporary(&path),
            Ok(None) => {}
            Err(error) => debug!(path = %path.display(), %error, "not taken for a leftover"),
        }
    }
}

/// Locks a temporary directory of this user that no process uses; `None` if it is something else.
/// Others may be able to give a directory of this user such a name: one with other contents stays.
fn lock_leftover(path: &Path) -> io::Result<Option<File>> {
    let dir: File = open_dir(CWD, path.as_os_str())?.into();
    let found = dir.metadata()?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o777 == MODE;
    if !is_own || flock(&dir, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(None);
    }
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        let is_ours = name == CONTENTS.as_bytes() || name.starts_with(REMOVED);
        if !is_ours && name != b"." && name != b".." {
            return Ok(None);
        }
    }
    Ok(Some(dir))
}

/// Rejects a tree with anything but files, directories and links: a guest's device or pipe would be
/// one of the host if it is opened there, and so would a file of the host that a hard link is made
/// to. Set-user-ID and set-group-ID bits are removed. Not every `tar` sees to the last two.
pub(super) fn check(root: &Path) -> anyhow::Result<()> {
    let top: OwnedFd = open_top(root)?.into();
    // By paths from the top, which `tar` has kept short enough to open.
    let mut waiting = vec![PathBuf::from(".")];
    // Files with several names, by device and inode, with how many of them are not found yet.
    let mut linked: HashMap<(u64, u64), (u64, PathBuf)> = HashMap::new();
    let mut set_ids = Vec::new();
    while let Some(path) = waiting.pop() {
        let cannot = || format!("cannot read {} of what was copied", path.display());
        let dir = open_dir(top.as_fd(), path.as_os_str());
        let dir = dir.with_context(cannot)?;
        for entry in Dir::read_from(&dir).with_context(cannot)? {
            let entry = entry.with_context(cannot)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let stat = statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW);
            let stat = stat.map_err(io::Error::from).with_context(cannot)?;
            let file_type = FileType::from_raw_mode(stat.st_mode);
            match file_type {
                FileType::Directory => waiting.push(path.join(name)),
                FileType::RegularFile | FileType::Symlink => {}
                _ => bail!(
                    "{} is a device, a pipe or a socket, which are not copied to the host",
                    path.join(name).display()
                ),
            }
            if file_type != FileType::Directory && stat.st_nlink > 1 {
                let names = linked.entry((stat.st_dev, stat.st_ino));
                let (missing, _) = names.or_insert_with(|| (stat.st_nlink, path.join(name)));
                *missing = missing.saturating_sub(1);
            }
            if stat.st_mode & SET_ID != 0 {
                let mode = Mode::from_raw_mode(stat.st_mode & 0o7777 & !SET_ID);
                set_ids.push((path.join(name), mode));
            }
        }
    }
    if let Some((_, path)) = linked.into_values().find(|(missing, _)| *missing > 0) {
        bail!(
            "{} is a hard link to a file of the host, and not copied; the container's tar is not \
             to be trusted",
            path.display()
        );
    }
    // They are none of the host's now, and no other process uses the directory.
    for (path, mode) in set_ids {
        let changed = chmodat(&top, &path, mode, AtFlags::empty()).map_err(io::Error::from);
        changed.with_context(|| format!("cannot change the mode of {}", path.display()))?;
    }
    Ok(())
}

/// Moves `name` of the directory `from` into the directory `to`. Directories that exist on both
/// sides are merged; existing files and links are replaced.
pub(super) fn merge(from: &Path, name: &str, to: &Path) -> anyhow::Result<()> {
    let (from, to_dir): (OwnedFd, OwnedFd) = (open_top(from)?.into(), open_top(to)?.into());
    let name = OsStr::new(name);
    merge_at(
        from.as_fd(),
        to_dir.as_fd(),
        name,
        to,
        0,
        &Sync::new(&sync_all_of),
    )
}

/// Like [`merge`], for all members of `from`.
pub(super) fn merge_contents(from: &Path, to: &Path) -> anyhow::Result<()> {
    let (from, to_dir): (OwnedFd, OwnedFd) = (open_top(from)?.into(), open_top(to)?.into());
    merge_all(
        from.as_fd(),
        to_dir.as_fd(),
        to,
        0,
        &Sync::new(&sync_all_of),
    )
}

/// What is copied is synced to the disk before it takes the place of anything: a power loss leaves
/// the old file or the new one. All at once, as each file of many would wait for the disk.
struct Sync<'a> {
    sync: &'a dyn Fn(BorrowedFd<'_>) -> io::Result<()>,
    is_done: Cell<bool>,
}

impl<'a> Sync<'a> {
    fn new(sync: &'a dyn Fn(BorrowedFd<'_>) -> io::Result<()>) -> Self {
        Self {
            sync,
            is_done: Cell::new(false),
        }
    }

    fn before_replacing(&self, copied: BorrowedFd<'_>) -> io::Result<()> {
        match self.is_done.replace(true) {
            true => Ok(()),
            false => (self.sync)(copied),
        }
    }
}

fn sync_all_of(dir: BorrowedFd<'_>) -> io::Result<()> {
    Ok(syncfs(dir)?)
}

fn merge_all(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    shown: &Path,
    depth: usize,
    sync: &Sync<'_>,
) -> anyhow::Result<()> {
    let list = || -> io::Result<Vec<_>> {
        let names = Dir::read_from(from)?.map(|entry| Ok(entry?.file_name().to_owned()));
        names.collect()
    };
    for name in list().context("cannot read what was copied")? {
        let name = OsStr::from_bytes(name.to_bytes());
        if name != "." && name != ".." {
            merge_at(from, to, name, shown, depth, sync)?;
        }
    }
    Ok(())
}

fn merge_at(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    name: &OsStr,
    shown: &Path,
    depth: usize,
    sync: &Sync<'_>,
) -> anyhow::Result<()> {
    let path = shown.join(name);
    let cannot = || format!("cannot create {}", path.display());
    let is_dir = kind(from, name).with_context(cannot)? == Some(FileType::Directory);
    match (is_dir, kind(to, name).with_context(cannot)?) {
        (true, Some(FileType::Directory)) => {
            ensure!(
                depth < MAX_DEPTH,
                "{} is below more than {MAX_DEPTH} directories",
                path.display()
            );
            let inner = open_dir(from, name).with_context(cannot)?;
            let outer = open_dir(to, name).with_context(cannot)?;
            merge_all(inner.as_fd(), outer.as_fd(), &path, depth + 1, sync)
        }
        (true, Some(_)) => bail!("{} is no directory to copy into", path.display()),
        (false, Some(FileType::Directory)) => {
            bail!(
                "{} is a directory, and what is copied is none",
                path.display()
            )
        }
        (true, None) => move_dir(from, to, name).with_context(cannot),
        (false, existing) => {
            if existing.is_some() {
                sync.before_replacing(from).with_context(cannot)?;
            }
            renameat(from, name, to, name).with_context(cannot)
        }
    }
}

/// Moves a directory to a free name. Without root, this requires write permission for the
/// directory.
fn move_dir(from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let rename = || without_replacing(|flags| renameat_with(from, name, to, name, flags));
    match rename() {
        Err(Errno::ACCESS) => {}
        done => return Ok(done?),
    }
    let mode = Mode::from_raw_mode(statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode & 0o7777);
    // No other process uses the parent directory: the name still refers to this directory.
    chmodat(from, name, mode | Mode::RWXU, AtFlags::empty())?;
    let dir = open_dir(from, name)?;
    rename()?;
    Ok(fchmod(dir, mode)?)
}

/// Opens a directory that the user named, possibly through a link.
fn open_top(path: &Path) -> anyhow::Result<File> {
    let opened = File::open(path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

fn open_dir(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// Returns the type of the file of a name; `None` if it does not exist.
fn kind(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<FileType>> {
    match statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Rig {
        dir: TempDir,
    }

    impl Rig {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["from/tree/sub", "to", "victim"] {
                fs::create_dir_all(dir.path().join(name)).unwrap();
            }
            fs::write(dir.path().join("from/tree/sub/file"), "new").unwrap();
            Self { dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn merge(&self) -> anyhow::Result<()> {
            merge(&self.path("from"), "tree", &self.path("to"))
        }
    }

    #[test]
    fn links_that_are_in_the_directory_already_lead_nowhere() {
        let rig = Rig::new();
        // A file from an earlier copy.
        fs::create_dir(rig.path("to/tree")).unwrap();
        symlink(rig.path("victim"), rig.path("to/tree/sub")).unwrap();
        let error = rig.merge().unwrap_err();
        assert!(error.to_string().contains("no directory"), "{error}");
        assert_eq!(fs::read_dir(rig.path("victim")).unwrap().count(), 0);

        let rig = Rig::new();
        fs::create_dir_all(rig.path("to/tree/sub")).unwrap();
        fs::write(rig.path("victim/file"), "old").unwrap();
        symlink(rig.path("victim/file"), rig.path("to/tree/sub/file")).unwrap();
        rig.merge().unwrap();
        assert_eq!(fs::read_to_string(rig.path("victim/file")).unwrap(), "old");
        let copied = rig.path("to/tree/sub/file");
        assert!(!copied.is_symlink());
        assert_eq!(fs::read_to_string(copied).unwrap(), "new");
    }

    #[test]
    fn directories_are_merged_and_files_replaced() {
        let rig = Rig::new();
        fs::create_dir_all(rig.path("to/tree/sub")).unwrap();
        fs::write(rig.path("to/tree/sub/file"), "old").unwrap();
        fs::write(rig.path("to/tree/other"), "kept").unwrap();
        fs::create_dir(rig.path("from/tree/more")).unwrap();
        merge_contents(&rig.path("from"), &rig.path("to")).unwrap();
        let read = |name| fs::read_to_string(rig.path(name)).unwrap();
        assert_eq!(
            (read("to/tree/sub/file"), read("to/tree/other")),
            ("new".to_owned(), "kept".to_owned())
        );
        assert!(rig.path("to/tree/more").is_dir());
        let rig = Rig::new();
        fs::create_dir_all(rig.path("to/tree/sub/file")).unwrap();
        assert!(rig.merge().is_err(), "a file does not replace a directory");
    }

    #[test]
    fn what_replaces_files_is_on_the_disk_before_that() {
        let rig = Rig::new();
        let count = Cell::new(0);
        let synced = |_: BorrowedFd<'_>| -> io::Result<()> {
            let file = rig.path("to/tree/sub/file");
            assert_ne!(fs::read(file).unwrap_or_default(), b"new");
            count.set(count.get() + 1);
            Ok(())
        };
        let merge = || {
            let [from, to] = ["from", "to"].map(|name| File::open(rig.path(name)).unwrap());
            let sync = Sync::new(&synced);
            merge_all(from.as_fd(), to.as_fd(), &rig.path("to"), 0, &sync).unwrap();
        };
        merge();
        assert_eq!(count.get(), 0, "nothing was replaced");
        fs::create_dir_all(rig.path("from/tree/sub")).unwrap();
        for name in ["file", "other"] {
            fs::write(rig.path("to/tree/sub").join(name), "old").unwrap();
            fs::write(rig.path("from/tree/sub").join(name), "new").unwrap();
        }
        merge();
        assert_eq!(count.get(), 1);
        let failing = |_: BorrowedFd<'_>| Err(io::ErrorKind::StorageFull.into());
        fs::write(rig.path("from/tree/sub/file"), "newer").unwrap();
        let [from, to] = ["from", "to"].map(|name| File::open(rig.path(name)).unwrap());
        let sync = Sync::new(&failing);
        merge_all(from.as_fd(), to.as_fd(), &rig.path("to"), 0, &sync).unwrap_err();
        assert_eq!(fs::read(rig.path("to/tree/sub/file")).unwrap(), b"new");
    }

    #[test]
    fn what_a_killed_process_left_is_removed_by_the_next_one_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap().flatten();
            let mut names: Vec<_> = entries.map(|entry| entry.path()).collect();
            names.sort();
            names
        };
        // A killed process's lock is gone, and its directory is not.
        let killed = Temporary::make_in(dir.path()).unwrap();
        fs::create_dir_all(killed.contents().join("some/files")).unwrap();
        let left = killed.path.clone();
        flock(&killed._lock, FlockOperation::Unlock).unwrap();
        std::mem::forget(killed);
        // Of another process, of everybody, and of something else.
        let used = Temporary::make_in(dir.path()).unwrap();
        assert!(!left.exists());
        let mode = fs::metadata(&used.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, MODE);
        let [open, other] =
            ["open", "other"].map(|name| dir.path().join(format!("{TEMPORARY}{name}")));
        for (path, mode) in [(&open, 0o755), (&other, 0o700)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::write(other.join("important"), "").unwrap();
        let link = dir.path().join(format!("{TEMPORARY}link"));
        symlink(&left, &link).unwrap();
        let mut expected = vec![used.path.clone(), open, other, link];
        expected.sort();
        drop(Temporary::make_in(dir.path()).unwrap());
        assert_eq!(names(), expected);
        let path = used.path.clone();
        drop(used);
        assert!(!path.exists());
    }

    #[test]
    fn nothing_is_taken_for_a_leftover_where_others_could_have_put_it() {
        let dir = tempfile::tempdir().unwrap();
        for (mode, expected) in [
            (0o700, true),
            (0o755, true),
            (0o775, false),
            (0o777, false),
            (0o1777, true),
        ] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let can_be = can_have_leftovers_removed(dir.path());
            assert_eq!(can_be, expected, "{mode:o}");
        }
        // A file system whose locks nobody vouches for.
        assert!(!can_have_leftovers_removed(Path::new("/proc/self")));
    }

    #[test]
    fn a_hard_link_to_a_file_of_the_host_is_refused_and_the_file_stays_as_it_is() {
        let rig = Rig::new();
        let set_mode = |name, mode| {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(rig.path(name), mode).unwrap();
        };
        let mode = |name| fs::metadata(rig.path(name)).unwrap().permissions().mode() & 0o7777;
        let file = rig.path("from/tree/sub/file");
        fs::hard_link(&file, rig.path("from/tree/twin")).unwrap();
        set_mode("from/tree/twin", 0o6755);
        set_mode("from/tree/sub", 0o2750);
        check(&rig.path("from")).unwrap();
        assert_eq!(
            (mode("from/tree/twin"), mode("from/tree/sub")),
            (0o755, 0o750)
        );

        fs::write(rig.path("victim/su"), "").unwrap();
        set_mode("victim/su", 0o4755);
        fs::hard_link(rig.path("victim/su"), rig.path("from/tree/su")).unwrap();
        let error = check(&rig.path("from")).unwrap_err().to_string();
        assert!(error.contains("tree/su is a hard link"), "{error}");
        assert_eq!(mode("victim/su"), 0o4755);
    }

    #[test]
    fn devices_and_pipes_are_refused() {
        let rig = Rig::new();
        symlink("/dev/null", rig.path("from/tree/link")).unwrap();
        check(&rig.path("from")).unwrap();
        let kinds = [
            (FileType::Fifo, 0),
            (FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
        ];
        for (kind, device) in kinds {
            let path = rig.path("from/tree/sub/special");
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, device).unwrap();
            let error = check(&rig.path("from")).unwrap_err().to_string();
            assert!(error.contains("tree/sub/special is a device"), "{error}");
            fs::remove_file(path).unwrap();
        }
    }
}
