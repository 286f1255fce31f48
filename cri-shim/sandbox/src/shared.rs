//! The directory that a sandbox shares with its guest, as it is where volumes are mounted in it.
//!
//! A jailed process has the directory as mounts of its own, in its mount namespace, and volumes are
//! mounted there. In the host's namespace a copy of a directory's mounts would keep each directory
//! below which one of them is from being removed (`rmdir` says EBUSY), as long as the pod is there:
//! for a volume that shows `/`, those of all other pods. Mounts in another namespace go with the
//! directory that they are on. They also go with their process, however that ends, and with their
//! name in the directory, whoever removes it: nothing has to be unmounted.
//!
//! Only this module enters another process's namespace, with a thread that does nothing else.
#![allow(unsafe_code)] // unshare

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::{
    ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe,
};

use crate::bind::{self, DetachedTree, MountPoint, open_root};
use crate::jail::SHARE_IN_JAIL;

/// A sandbox's shared directory; see the module's documentation.
#[derive(Debug)]
pub struct SharedDirectory {
    dir: PathBuf,
    /// The process that has mounts of its own of it.
    process: Option<JailedProcess>,
}

#[derive(Debug)]
struct JailedProcess {
    pid: u32,
    pidfd: OwnedFd,
}

impl SharedDirectory {
    /// A directory in which volumes are mounted where the host sees them: that of a process without
    /// a jail.
    #[must_use]
    pub fn of_host(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            process: None,
        }
    }

    /// The directory `dir` of the host as the process has it: by mounts of its own, in a namespace
    /// of its own, or as the host has it.
    pub(crate) fn of_process(dir: &Path, pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        let namespace = |process: &str| {
            let meta = fs::metadata(format!("/proc/{process}/ns/mnt"))?;
            io::Result::Ok((meta.dev(), meta.ino()))
        };
        let process = JailedProcess { pid, pidfd };
        let is_apart = namespace(&pid.to_string())? != namespace("self")?;
        let share = Path::new(SHARE_IN_JAIL);
        let has_mounts = || io::Result::Ok(process.mount_points()?.iter().any(|at| at == share));
        let is_jailed = is_apart && has_mounts()?;
        Ok(Self {
            dir: dir.to_owned(),
            process: is_jailed.then_some(process),
        })
    }

    /// The directory's path on the host, without what is mounted in it for a jailed process.
    #[must_use]
    pub fn host_path(&self) -> &Path {
        &self.dir
    }

    /// Calls `look` with the path of the directory where volumes are mounted in it. Other paths
    /// must not be used there, nor `/proc`. This blocks.
    ///
    /// # Errors
    /// The kernel's: the process has ended, or its namespace may not be entered (that takes
    /// `CAP_SYS_ADMIN`, `CAP_SYS_CHROOT` and `CAP_SYS_PTRACE`).
    pub fn enter<T: Send>(&self, look: impl FnOnce(&Path) -> T + Send) -> io::Result<T> {
        let Some(process) = &self.process else {
            return Ok(look(&self.dir));
        };
        let entered = || {
            // SAFETY: of what threads share, this one leaves only root and working directory, which
            // no code of its uses before it ends.
            unsafe { unshare_unsafe(UnshareFlags::FS)? };
            move_into_thread_name_spaces(process.pidfd.as_fd(), ThreadNameSpaceType::MOUNT)?;
            io::Result::Ok(look(Path::new(SHARE_IN_JAIL)))
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("volumes".to_owned());
            let done = thread.spawn_scoped(scope, entered)?.join();
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Mounts a tree on a new name in the directory.
    ///
    /// # Errors
    /// As [`Self::enter`], and the kernel's answer to the mount; there may be something of that
    /// name.
    pub fn attach(&self, tree: &DetachedTree, name: &str, is_dir: bool) -> io::Result<()> {
        self.enter(|dir| {
            let root = open_root(dir)?;
            tree.attach(&MountPoint::make(root.as_fd(), name, is_dir)?)
        })?
    }

    /// Returns what is mounted below the directory, relative to it, in the order in which it was
    /// mounted.
    ///
    /// # Errors
    /// The kernel's: the process has ended.
    pub fn mount_points(&self) -> io::Result<Vec<PathBuf>> {
        let (dir, points) = match &self.process {
            None => match self.dir.canonicalize() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                dir => {
                    let dir = dir?;
                    let points = bind::mount_points(&dir)?;
                    (dir, points)
                }
            },
            Some(process) => (PathBuf::from(SHARE_IN_JAIL), process.mount_points()?),
        };
        let below = points.iter().filter_map(|point| {
            let below = point.strip_prefix(&dir).ok()?;
            (!below.as_os_str().is_empty()).then(|| below.to_owned())
        });
        Ok(below.collect())
    }

    /// Returns how many mounts there are at and below a name in the directory.
    ///
    /// # Errors
    /// As [`Self::mount_points`].
    pub fn mounts_at(&self, name: &str) -> io::Result<usize> {
        let points = self.mount_points()?;
        Ok(points
            .iter()
            .filter(|point| point.starts_with(name))
            .count())
    }
}

impl JailedProcess {
    /// Returns where something is mounted in its directory.
    fn mount_points(&self) -> io::Result<Vec<PathBuf>> {
        let table = fs::read(format!("/proc/{}/mountinfo", self.pid))?;
        self.check()?;
        Ok(bind::mount_points_in(&table, Path::new(SHARE_IN_JAIL)))
    }

    /// Returns an error if it has ended: its pid may be another one's.
    fn check(&self) -> io::Result<()> {
        let now = Timespec::default();
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match poll(&mut ended, Some(&now))? {
            0 => Ok(()),
            _ => Err(Errno::SRCH.into()),
        }
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
