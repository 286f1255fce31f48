//! What a search for an entry knows of the disks, and asks of them.

use thiserror::Error;

use crate::signature::Kind;

/// The place of a file system in [`Volumes::volumes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub usize);

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// The disk's number, in the order in which the machine has its disks.
    pub disk: usize,
    /// The partition's number, from 1; `None` if the file system has the whole disk.
    pub partition: Option<u32>,
    /// The device's name in Linux, such as `vda1`.
    pub device: String,
    /// What it is.
    pub kind: Kind,
    /// Its UUID, as Linux's `root=UUID=` and GRUB's `search --fs-uuid` have it.
    pub uuid: Option<String>,
    /// Its label.
    pub label: Option<String>,
    /// Set if an operating system's root is in it.
    pub root: Option<Root>,
}

/// The root of an operating system in a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// What the kernel has to mount it with, such as `subvol=@`.
    pub flags: Option<String>,
}

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// What it is, links followed.
    pub kind: FileKind,
    /// The bytes of a regular file.
    pub size: u64,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A device, a socket, a pipe: never opened.
    Other,
}

/// A file that exists and cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot read {path}: {reason}")]
pub struct FileError {
    /// The path.
    pub path: String,
    /// What the file system said.
    pub reason: String,
}

/// Access to mounted file systems.
///
/// Paths come without a leading `/`, `.` and `..` ([`crate::normalize`]). Symbolic links are the
/// implementation's to follow, within the file system.
pub trait Volumes {
    /// The file systems: disks in the machine's order, partitions in theirs.
    fn volumes(&self) -> &[Volume];

    /// Returns what a path leads to; `None` if to nothing.
    ///
    /// # Errors
    ///
    /// If the file system cannot tell.
    fn stat(&self, volume: VolumeId, path: &str) -> Result<Option<FileStat>, FileError>;

    /// Reads at most `len` bytes of a regular file from `offset`; fewer at its end.
    ///
    /// # Errors
    ///
    /// If the file system cannot read them, or the file is gone.
    fn read_at(
        &self,
        volume: VolumeId,
        path: &str,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, FileError>;

    /// Lists at most `max` names in a directory, in any order; none if there is no such directory.
    ///
    /// # Errors
    ///
    /// If the file system cannot read the directory.
    fn list(&self, volume: VolumeId, directory: &str, max: usize)
    -> Result<Vec<String>, FileError>;
}
