//! A boot entry.

use std::fmt;

use crate::volumes::VolumeId;

/// What to boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootEntry {
    /// The entry's name, as a menu would show it.
    pub title: String,
    /// The format that it was found in.
    pub format: Format,
    /// The file that names it.
    pub config: FileRef,
    /// The kernel.
    pub kernel: FileRef,
    /// The initial file systems, which the kernel gets one after the other.
    pub initrds: Vec<FileRef>,
    /// The kernel's command line.
    pub cmdline: String,
}

/// A file, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRef {
    /// Where it is.
    pub volume: VolumeId,
    /// Its path there, from the root, without `.`, `..` and empty parts.
    pub path: String,
    /// The part of it that is meant; `None` is all.
    pub part: Option<FilePart>,
}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// Bytes before it.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

impl FileRef {
    /// All of a file.
    #[must_use]
    pub fn whole(volume: VolumeId, path: impl Into<String>) -> Self {
        Self {
            volume,
            path: path.into(),
            part: None,
        }
    }
}

/// A format of boot entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// `grub.cfg`.
    Grub,
    /// Boot Loader Specification, type 1.
    Bls,
    /// Boot Loader Specification, type 2: a unified kernel image.
    Uki,
    /// `extlinux.conf` and its kind.
    Extlinux,
    /// The newest kernel of the disk, because nothing says which to boot.
    Newest,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grub => "grub.cfg",
            Self::Bls => "Boot Loader Specification",
            Self::Uki => "unified kernel image",
            Self::Extlinux => "extlinux",
            Self::Newest => "newest kernel",
        })
    }
}
