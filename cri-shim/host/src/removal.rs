//! Removal of directories with untrusted contents, however deep and wide they are.
//!
//! The standard library's removal needs a descriptor and a stack frame for each level, and a guest
//! can create more levels than a process has of either. Here each directory that is found below the
//! top is moved into the top, so two are open at any time.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, openat, openat2,
    renameat_with, unlinkat,
};
use rustix::io::Errno;

/// Removes a directory and everything in it. Symbolic links are not followed; what is mounted in it
/// is not touched, and ends the removal with [`io::ErrorKind::ResourceBusy`] or
/// [`io::ErrorKind::CrossesDevices`]. A missing directory is an error.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    remove_until(path, None)
}

fn remove_until(path: &Path, deadline: Option<Instant>) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = rustix::fs::open(path, flags, Mode::empty())?;
    let mut moved = Moved::new(deadline);
    // The names include what an earlier, interrupted removal had moved.
    while empty(&top, &top, &mut moved)? {
        while let Some(name) = moved.next() {
            remove_below(&top, &name, &mut moved)?;
        }
    }
    std::fs::remove_dir(path)
}

/// As [`remove_tree`], without blocking this thread.
pub async fn remove_tree_aside(path: &Path) -> io::Result<()> {
    aside(path, None).await
}

/// As [`remove_tree_aside`], for a directory that a guest may still fill, which could take forever:
/// after `limit` it ends with [`io::ErrorKind::TimedOut`], and what was removed by then stays
/// removed.
pub async fn remove_tree_within(path: &Path, limit: Duration) -> io::Result<()> {
    aside(path, Instant::now().checked_add(limit)).await
}

async fn aside(path: &Path, deadline: Option<Instant>) -> io::Result<()> {
    let path = path.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove_until(&path, deadline)).await;
    removed.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Calls `rename`, which moves a directory to a name that is free, with `RENAME_NOREPLACE`, and
/// without it where the file system has no flags (NFS, 9p, ZFS before 2.2). A directory that is
/// moved then replaces at most an empty one: on anything else the kernel refuses to move it.
pub fn without_replacing(
    rename: impl Fn(RenameFlags) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    match rename(RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()),
        done => done,
    }
}

/// The names in the top of the directories that were moved there, of which only their range is
/// kept.
struct Moved {
    prefix: u64,
    first: u64,
    next: u64,
    deadline: Option<Instant>,
}

impl Moved {
    fn new(deadline: Option<Instant>) -> Self {
        use std::hash::{BuildHasher as _, RandomState};
        Self {
            // Random, so that the names do not clash with names that exist in the top.
            prefix: RandomState::new().hash_one(()),
            first: 0,
            next: 0,
            deadline,
        }
    }

    fn check_time(&self) -> io::Result<()> {
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    fn name(&self, number: u64) -> CString {
        let name = format!(".removed-{:016x}-{number}", self.prefix);
        CString::new(name).unwrap_or_default()
    }

    fn next(&mut self) -> Option<CString> {
        if self.first == self.next {
            return None;
        }
        let name = self.name(self.first);
        self.first += 1;
        Some(name)
    }

    /// Moves a directory into the top.
    fn take(&mut self, top: &OwnedFd, parent: &OwnedFd, name: &CStr) -> io::Result<()> {
        let free = self.name(self.next);
        without_replacing(|flags| renameat_with(parent, name, top, &free, flags))?;
        self.next += 1;
        Ok(())
    }
}

/// Removes a directory in the top; directories below it are moved into the top.
fn remove_below(top: &OwnedFd, name: &CStr, moved: &mut Moved) -> io::Result<()> {
    // Only directories that were moved, and no mount: neither a link nor another file system.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    let dir = openat2(top, name, flags, Mode::empty(), resolve)?;
    while empty(top, &dir, moved)? {}
    Ok(unlinkat(top, name, AtFlags::REMOVEDIR)?)
}

/// Removes everything from a directory, in one pass through its list. False if it was empty.
fn empty(top: &OwnedFd, dir: &OwnedFd, moved: &mut Moved) -> io::Result<bool> {
    // A descriptor of its own, which reads the list from the beginning.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let list = openat(dir.as_fd(), c".", flags, Mode::empty())?;
    let mut any = false;
    for entry in Dir::new(list)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        any = true;
        moved.check_time()?;
        if entry.file_type() != FileType::Directory {
            match unlinkat(dir, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                // The type was unknown, or has changed since.
                Err(Errno::ISDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        match unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => moved.take(top, dir, name)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, mkdirat};
    use rustix::mount::{UnmountFlags, mount_bind, unmount};
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Creates nested directories.
    fn nest(path: &Path, depth: usize) {
        fs::create_dir_all(path).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut at: OwnedFd = fs::File::open(path).unwrap().into();
        for _ in 0..depth {
            mkdirat(&at, c"d", Mode::from_raw_mode(0o755)).unwrap();
            at = openat(&at, c"d", flags, Mode::empty()).unwrap();
        }
        openat(&at, c"file", OFlags::CREATE, Mode::from_raw_mode(0o644)).unwrap();
    }

    #[test]
    fn directories_nest_as_deep_as_a_guest_likes() {
        // In memory: the depth matters here, not a disk.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let top = dir.path().join("top");
        nest(&top, 50_000);
        // Neither a large stack nor many descriptors are needed.
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        let top_too = top.clone();
        let removal = thread.spawn(move || remove_tree(&top_too)).unwrap();
        removal.join().unwrap().unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn a_tree_goes_and_what_its_links_lead_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (top, kept) = (dir.path().join("top"), dir.path().join("kept"));
        nest(&kept, 2);
        for way in ["a/b/c", "a/d", "e"] {
            nest(&top.join(way), 3);
            symlink(&kept, top.join(way).join("link")).unwrap();
        }
        for number in 0..2000 {
            fs::create_dir_all(top.join(format!("wide/{number}/x"))).unwrap();
        }
        remove_tree(&top).unwrap();
        assert!(!top.exists());
        assert!(kept.join("d/d/file").exists());
        let again = remove_tree(&top).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::NotFound);
        symlink(&kept, &top).unwrap();
        assert!(remove_tree(&top).is_err());
        assert!(kept.join("d/d/file").exists());
    }

    #[test]
    fn a_file_system_without_flags_moves_directories_over_nothing_but_empty_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let rename = |from: &str, to: &str| {
            let (from, to) = (path(from), path(to));
            without_replacing(|flags| match flags.is_empty() {
                true => renameat_with(CWD, &from, CWD, &to, flags),
                // As such a file system answers.
                false => Err(Errno::INVAL),
            })
        };
        fs::create_dir_all(path("from/inner")).unwrap();
        fs::create_dir_all(path("full/inner")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        fs::write(path("file"), "").unwrap();
        assert_eq!(rename("from", "full"), Err(Errno::NOTEMPTY));
        assert_eq!(rename("from", "file"), Err(Errno::NOTDIR));
        assert_eq!(rename("from", "empty"), Ok(()));
        assert_eq!(rename("empty", "free"), Ok(()));
        assert!(path("free/inner").is_dir());
    }

    #[tokio::test]
    async fn a_removal_ends_in_time_and_the_next_one_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        nest(&top.join("a"), 3);
        let cut = remove_tree_within(&top, Duration::ZERO).await.unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::TimedOut);
        remove_tree_within(&top, Duration::from_secs(600))
            .await
            .unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn a_mount_in_a_tree_keeps_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (top, kept) = (dir.path().join("top"), dir.path().join("kept"));
        nest(&kept, 2);
        for (way, point) in [("a/b/mount", "a/b/mount"), ("mount", "mount")] {
            let point = top.join(point);
            fs::create_dir_all(top.join(way)).unwrap();
            mount_bind(&kept, &point).unwrap();
            assert!(remove_tree(&top).is_err());
            assert!(kept.join("d/d/file").exists());
            unmount_all_below(&top);
        }
        remove_tree(&top).unwrap();
    }

    /// The mount may have been moved with the directory that it is in.
    fn unmount_all_below(top: &Path) {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let points = table.lines().filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(top)) {
            unmount(point, UnmountFlags::DETACH).unwrap();
        }
    }
}
