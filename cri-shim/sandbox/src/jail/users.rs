//! The users of volumes, mapped to users that own nothing of the host.
//!
//! A process that serves volumes creates and changes files for any user of its guest, so it has to
//! be root in some user namespace. In the host's it could do so with every file that it reaches. In
//! one of its own, whose users are others of the host, it can do so in mounts that are mapped by
//! that namespace (`mount_setattr(2)`, MOUNT_ATTR_IDMAP), and nowhere else: a file has the owner on
//! the disk that the guest gave it, and the process is nobody to all other files.
//!
//! Its root is a user of the host that no other process has. All other users of guests have one
//! range for all processes: a process is one of them only while one of its threads creates a file,
//! and its real user stays its root.
#![allow(unsafe_code)] // clone

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, waitpid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::own_user::UID_BASE;
use crate::bind::{DetachedTree, Extent, Propagation};

/// The host's user 0 of the range for users other than root: beyond all that a host gives to its
/// own users, to containers and to jails.
const COMMON: u32 = 1 << 31;

/// The first user of a guest that has none of the host. Programs that take a user for a signed
/// number do not have these either.
const END: u32 = (1 << 31) - (1 << 16);

/// A user namespace for a process that serves volumes, and for the mounts of these.
#[derive(Debug)]
pub struct MappedUsers(OwnedFd);

impl MappedUsers {
    /// Makes one in which root is the user `root` of the host. This starts a process, which ends
    /// before it returns.
    ///
    /// # Errors
    /// The kernel's: it has no user namespaces, or this process is not the host's root.
    pub fn new(root: u32) -> io::Result<Self> {
        let (waits, holds) = pipe_with(PipeFlags::CLOEXEC)?;
        let (pid, pidfd) = start_in_namespace(&waits, &holds)?;
        let made = || {
            let process = host_pid(&pidfd)?;
            let map = format!("0 {root} 1\n1 {} {}\n", COMMON + 1, END - 1);
            for name in ["gid_map", "uid_map"] {
                let mut file = OpenOptions::new()
                    .write(true)
                    .open(format!("/proc/{process}/{name}"))?;
                file.write_all(map.as_bytes())?;
            }
            Ok(Self(
                fs::File::open(format!("/proc/{process}/ns/user"))?.into(),
            ))
        };
        let made = made();
        // Another thread's process may have inherited what this one waits for.
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        while let Err(rustix::io::Errno::INTR) = waitpid(Some(pid), WaitOptions::empty()) {}
        made
    }

    /// Returns that of a process; `None` if it has this process's own.
    ///
    /// # Errors
    /// The kernel's: the process has ended, or may not be looked at.
    pub fn of_process(pid: u32) -> io::Result<Option<Self>> {
        let theirs = fs::File::open(format!("/proc/{pid}/ns/user"))?;
        let own = fs::metadata("/proc/self/ns/user")?;
        let meta = theirs.metadata()?;
        let is_own = (own.dev(), own.ino()) == (meta.dev(), meta.ino());
        Ok((!is_own).then(|| Self(theirs.into())))
    }

    /// Makes this process a member of the namespace, with all capabilities in it. It has one
    /// thread.
    pub(super) fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(
            self.0.as_fd(),
            Some(LinkNameSpaceType::User),
        )?)
    }
}

impl AsFd for MappedUsers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tries whether the host maps users in a mount of the file system of `path`.
///
/// # Errors
/// The kernel's answer.
pub fn try_mapped_users(path: &Path) -> io::Result<()> {
    let users = MappedUsers::new(UID_BASE)?;
    let top = open_tree(rustix::fs::CWD, path, OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    DetachedTree::of(top, Extent::Top, Propagation::Private)?.map_users(&users)
}

/// Starts a process in a new user namespace, which ends with whoever has `holds`. Returns
/// its pid for its parent, and a descriptor of it.
fn start_in_namespace(waits: &OwnedFd, holds: &OwnedFd) -> io::Result<(Pid, OwnedFd)> {
    let mut pidfd: libc::c_int = -1;
    let flags = libc::CLONE_NEWUSER | libc::CLONE_PIDFD | libc::SIGCHLD;
    let (waits, holds) = (waits.as_raw_fd(), holds.as_raw_fd());
    // SAFETY: without CLONE_VM it is a fork. The child makes system calls and nothing else until it
    // ends, as other threads may have held locks.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            flags,
            std::ptr::null::<libc::c_void>(),
            &raw mut pidfd,
            std::ptr::null::<libc::c_void>(),
            0,
        )
    };
    match pid {
        0 => {
            // SAFETY: calls that a signal handler may make, with a buffer on the stack.
            unsafe {
                libc::close(holds);
                let mut byte = 0_u8;
                libc::read(waits, (&raw mut byte).cast(), 1);
                libc::_exit(0)
            }
        }
        -1 => Err(io::Error::last_os_error()),
        pid => {
            // SAFETY: the kernel has made the descriptor for this call (CLONE_PIDFD).
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            Ok((pid.ok_or(io::ErrorKind::InvalidData)?, pidfd))
        }
    }
}

/// Returns a process's pid in the namespace that `/proc` shows: this process may have another one.
fn host_pid(pidfd: &OwnedFd) -> io::Result<u32> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"));
    pid.and_then(|pid| pid.trim().parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// What tests of mapped users need of the directory of temporary files.
#[cfg(test)]
pub(crate) const NEEDED: &str =
    "TMPDIR is on a file system that maps users, such as ext4, xfs or btrfs";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_of_a_guest_is_one_of_the_hosts_own() {
        // Users of jails are below, and -1 is none.
        const { assert!(UID_BASE + (1 << 22) < COMMON) };
        assert!(
            COMMON
                .checked_add(END)
                .is_some_and(|end| end < u32::MAX - 1)
        );
    }

    /// These need root, and a kernel that maps users on this file system.
    #[test]
    fn a_namespace_has_the_users_that_it_is_made_with() {
        let users = MappedUsers::new(2_000_000_123).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let top = fs::File::open(dir.path()).unwrap();
        let tree = DetachedTree::of(&top, Extent::Top, Propagation::Private).unwrap();
        tree.map_users(&users).expect(NEEDED);
        // As the host sees it.
        let owner = rustix::fs::fstat(tree.as_fd()).unwrap().st_uid;
        assert_eq!(owner, 2_000_000_123);
        std::os::unix::fs::chown(dir.path(), Some(1000), None).unwrap();
        let owner = rustix::fs::fstat(tree.as_fd()).unwrap().st_uid;
        assert_eq!(owner, COMMON + 1000);
    }

    #[test]
    fn a_file_system_without_mapped_users_is_told_by_a_try() {
        try_mapped_users(Path::new("/proc")).unwrap_err();
        let dir = tempfile::tempdir().unwrap();
        try_mapped_users(dir.path()).expect(NEEDED);
        assert!(
            MappedUsers::of_process(std::process::id())
                .unwrap()
                .is_none()
        );
    }
}
