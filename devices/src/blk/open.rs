//! Opens files as disks, and checks which may be one and who may write to it.
#![allow(unsafe_code)] // fcntl(F_OFD_SETLK), which rustix does not have

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::file::FileDisk;
use super::uring;

/// Who carries out a disk's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// The device's thread, one after the other: the lowest latency for one request at a time.
    #[default]
    Sync,
    /// The kernel, many at a time (`io_uring`); the device's thread if the host does not permit
    /// `io_uring`.
    Uring,
}

/// Opens a file as a disk.
///
/// # Errors
/// If its length cannot be determined.
pub fn open_disk(file: File, engine: IoEngine) -> io::Result<Box<dyn Disk>> {
    match engine {
        IoEngine::Sync => Ok(Box::new(FileDisk::new(file)?)),
        IoEngine::Uring => uring::open_if_permitted(file),
    }
}

/// Opens a file that is open for reading and writing as a disk that a guest may write to. It is
/// locked against all other writers for the lifetime of the disk. (A [`BlockDevice`] that is
/// created from a file does this itself.)
///
/// # Errors
/// [`BlockDeviceError::NotADisk`], [`BlockDeviceError::NotWritable`] and
/// [`BlockDeviceError::InUse`].
///
/// [`BlockDevice`]: super::BlockDevice
pub fn open_disk_for_writing(
    file: File,
    engine: IoEngine,
) -> Result<Box<dyn Disk>, BlockDeviceError> {
    let path = path_of(&file);
    check_kind(&file, &path)?;
    for_writing(file, path, engine)
}

/// As [`open_disk_for_writing`], for a file that was checked already.
pub(super) fn for_writing(
    file: File,
    path: PathBuf,
    engine: IoEngine,
) -> Result<Box<dyn Disk>, BlockDeviceError> {
    if !is_writable(&file) {
        let source = io::Error::from_raw_os_error(libc::EBADF);
        return Err(BlockDeviceError::NotWritable { path, source });
    }
    lock(&file, &path, Access::Write)?;
    open_disk(file, engine).map_err(|source| BlockDeviceError::Size { path, source })
}

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockDeviceError {
    /// It could not be opened.
    #[error("failed to open the disk {}", path.display())]
    Open {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Its length could not be determined.
    #[error("failed to find the size of the disk {}", path.display())]
    Size {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A directory, a socket, a terminal…
    #[error("the disk {} is neither a regular file nor a block device", path.display())]
    NotADisk {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be used as the overlay of an image.
    #[error("failed to use the overlay {}", path.display())]
    Overlay {
        /// The overlay's path.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: super::Qcow2Error,
    },
    /// A descriptor for its rate limits could not be created.
    #[error("failed to limit the rate of a disk")]
    Rate(#[source] io::Error),
    /// The file cannot be opened for writing, and the device was not created read-only.
    #[error("the disk {} cannot be written{}", path.display(), advice(source))]
    NotWritable {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer to opening it for writing.
        #[source]
        source: io::Error,
    },
    /// Another process or device writes to it: two guests with one writable disk destroy its
    /// contents.
    #[error("the disk {} is in use: stop the VM that has it, or attach it read-only to both", path.display())]
    InUse {
        /// The disk's path.
        path: PathBuf,
    },
}

/// Returns what to do about a file that cannot be opened for writing, if that is known.
fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => ": add `.read_only()`, or change its permissions",
        Some(libc::EROFS) => ": add `.read_only()`, or make its file system writable",
        Some(libc::EBADF) => ": add `.read_only()`, or open the file for reading and writing",
        _ => "",
    }
}

/// Checks that `file` may be a disk.
pub(super) fn check_kind(file: &File, path: &Path) -> Result<(), BlockDeviceError> {
    let kind = file
        .metadata()
        .map_err(|source| BlockDeviceError::Open {
            path: path.into(),
            source,
        })?
        .file_type();
    if kind.is_file() || kind.is_block_device() {
        Ok(())
    } else {
        Err(BlockDeviceError::NotADisk { path: path.into() })
    }
}

/// Opens `path` for reading, without waiting for the writer of a FIFO.
pub(super) fn open(path: &Path) -> Result<File, BlockDeviceError> {
    let open_error = |source| BlockDeviceError::Open {
        path: path.into(),
        source,
    };
    // Checked first: opening a device that is not a disk may have side effects.
    let kind = std::fs::metadata(path).map_err(open_error)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(BlockDeviceError::NotADisk { path: path.into() });
    }
    let file = File::open(path).map_err(open_error)?;
    check_kind(&file, path)?;
    Ok(file)
}

/// Opens for writing the file that was opened from `path` for reading.
pub(super) fn reopen_for_writing(file: &File, path: &Path) -> Result<File, BlockDeviceError> {
    let refused = |source| BlockDeviceError::NotWritable {
        path: path.into(),
        source,
    };
    let writable = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(refused)?;
    let identity = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
    if identity(&writable).map_err(refused)? != identity(file).map_err(refused)? {
        return Err(refused(io::Error::other("the file was replaced meanwhile")));
    }
    Ok(writable)
}

/// Whether `file` was opened for writing.
pub(super) fn is_writable(file: &File) -> bool {
    use rustix::fs::{OFlags, fcntl_getfl};
    fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDWR)
}

/// Returns a path to an open file.
pub(super) fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The kind of a lock: one exclusive writer, or many readers without a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// Takes the lock that [`open_disk_for_writing`] takes, for a disk that was opened without it
/// because another host's VM had it: one that moves takes its lock when the VM there has ended. It
/// belongs to all duplicates of this descriptor.
///
/// # Errors
/// [`BlockDeviceError::InUse`].
pub fn lock_disk(file: &File) -> Result<(), BlockDeviceError> {
    lock(file, &path_of(file), Access::Write)
}

/// Gives the lock of a disk back before the file is closed.
///
/// # Errors
/// The operating system's answer.
pub fn unlock_disk(file: &File) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK)
}

/// Takes the lock of all that write to `file`, or that need that no other process does, until this
/// open file description is closed.
pub(super) fn lock(file: &File, path: &Path, access: Access) -> Result<(), BlockDeviceError> {
    let kind = match access {
        Access::Read => libc::F_RDLCK,
        Access::Write => libc::F_WRLCK,
    };
    let Err(source) = set_lock(file, kind) else {
        return Ok(());
    };
    match source.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Err(BlockDeviceError::InUse { path: path.into() }),
        // File systems without locks: then no other process can hold one either.
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS) => Ok(()),
        _ => Err(BlockDeviceError::Open {
            path: path.into(),
            source,
        }),
    }
}

fn set_lock(file: &File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: a flock of zeroes is a valid one: the whole file, no process.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the kernel reads one `struct flock` from a valid pointer.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
