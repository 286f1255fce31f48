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
use crate::jail::{MappedUsers, SHARE_IN_JAIL};

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
    /// Its user namespace, by which its volumes are mapped, unless it is the host's root.
    users: Option<MappedUsers>,
}

/// The reason why a volume was not mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The kernel cannot map the users of the volume's files to those of the process.
    #[error(
        "its users cannot be mapped to those of the machine's process: its file system, or that \
         of a mount below it, does not support this"
    )]
    Unmappable(#[source] io::Error),
    /// In a volume that follows the host mounts may appear whose users are not mapped.
    #[error(
        "later mounts of the host would appear in it, without the users of the machine's process"
    )]
    Follows,
    /// The kernel refused another step.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl AttachError {
    /// Whether a process that serves volumes as the host's root could have it.
    #[must_use]
    pub fn needs_host_users(&self) -> bool {
        matches!(self, Self::Unmappable(_) | Self::Follows)
    }
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

    /// The directory `dir` of the host as the process `pid`, which `pidfd` is open for, has it: by
    /// mounts of its own, in a namespace of its own, or as the host has it.
    ///
    /// # Errors
    /// The kernel's: the process has ended, or may not be looked at (that takes `CAP_SYS_PTRACE`).
    pub fn of_process(dir: &Path, pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        let namespace = |process: &str| {
            let meta = fs::metadata(format!("/proc/{process}/ns/mnt"))?;
            io::Result::Ok((meta.dev(), meta.ino()))
        };
        let mut process = JailedProcess {
            pid,
            pidfd,
            users: None,
        };
        let is_apart = namespace(&pid.to_string())? != namespace("self")?;
        let share = Path::new(SHARE_IN_JAIL);
        let has_mounts = || io::Result::Ok(process.mount_points()?.iter().any(|at| at == share));
        let is_jailed = is_apart && has_mounts()?;
        if is_jailed {
            process.users = MappedUsers::of_process(pid)?;
            process.check()?;
        }
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

    /// Whether its volumes are mapped to users that own nothing of the host.
    #[must_use]
    pub fn has_mapped_users(&self) -> bool {
        self.users().is_some()
    }

    fn users(&self) -> Option<&MappedUsers> {
        self.process.as_ref()?.users.as_ref()
    }

    /// Mounts a tree on a new name in the directory, with the users of the process.
    ///
    /// # Errors
    /// As [`Self::enter`], and the kernel's answer to the mount; there may be something of that
    /// name. [`AttachError::needs_host_users`]: this process cannot have the volume.
    pub fn attach(&self, tree: &DetachedTree, name: &str, is_dir: bool) -> Result<(), AttachError> {
        if let Some(users) = self.users() {
            if tree.follows_the_host() {
                return Err(AttachError::Follows);
            }
            tree.map_users(users).map_err(AttachError::Unmappable)?;
        }
        let attached = self.enter(|dir| {
            let root = open_root(dir)?;
            tree.attach(&MountPoint::make(root.as_fd(), name, is_dir)?)
        });
        Ok(attached??)
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
