//! Named network namespaces: each is kept by a bind mount of its file.
#![allow(unsafe_code)] // a network namespace for one thread

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use podvisor_host::blocking::in_thread;
use rustix::fs::statfs;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use super::error::CniError;

/// The file system of namespaces, `NSFS_MAGIC` of linux/magic.h.
const NSFS: rustix::fs::FsWord = 0x6e73_6673;

/// Creates a network namespace at `path`, and replaces one that was left there by a crash.
pub(super) fn create(path: &Path) -> Result<(), CniError> {
    remove(path)?;
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(CniError::io("create the directory", dir))?;
    }
    let failed = || CniError::io("create the network namespace", path);
    File::create_new(path).map_err(failed())?;
    let made = in_thread(|| -> io::Result<()> {
        // SAFETY: the new network namespace is only this thread's, which ends right after;
        // descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
        Ok(mount_bind("/proc/thread-self/ns/net", path)?)
    });
    let made = made.and_then(|made| made);
    if made.is_err() {
        // Nothing is mounted on it.
        let _ = fs::remove_file(path);
    }
    made.map_err(failed())
}

/// Runs `work` in the network namespace at `path`, in a thread of its own.
pub(super) fn enter<T: Send>(
    path: &Path,
    work: impl FnOnce() -> Result<T, CniError> + Send,
) -> Result<T, CniError> {
    let failed = || CniError::io("enter the network namespace", path);
    let done = in_thread(|| {
        let file = File::open(path).map_err(failed())?;
        let kind = Some(LinkNameSpaceType::Network);
        let entered = move_into_link_name_space(file.as_fd(), kind);
        entered.map_err(|error| failed()(error.into()))?;
        work()
    });
    done.map_err(failed())?
}

/// Removes the network namespace at `path`; a missing one is not an error.
pub(super) fn remove(path: &Path) -> Result<(), CniError> {
    let failed = || CniError::io("remove the network namespace", path);
    loop {
        match unmount(path, UnmountFlags::DETACH) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            // It is not a mount point, or no longer one.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(failed()(error.into())),
        }
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed()(error)),
        _ => Ok(()),
    }
}

/// Removes the file at `path` unless a network namespace is mounted on it: the file stays when the
/// namespace ends in another way than by [`remove`], such as a reboot. Plugins accept a missing
/// namespace as removed, but fail on another file in its place.
pub(super) fn remove_bare(path: &Path) -> Result<(), CniError> {
    let failed = CniError::io("remove what is left of the network namespace", path);
    match statfs(path) {
        Ok(found) if found.f_type == NSFS => Ok(()),
        Ok(_) => fs::remove_file(path).map_err(failed),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(failed(error.into())),
    }
}

/// Lists the names of the namespaces in `dir`.
pub(super) fn list(dir: &Path) -> Result<Vec<String>, CniError> {
    let failed = || CniError::io("read the directory", PathBuf::from(dir));
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed()(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        if let Ok(name) = entry.map_err(failed())?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}
