//! A disk image of the store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{DiskFormat, Source};
use crate::pin::pin;
use crate::{Digest, Error, Result};

/// A disk image of the store, as it was when it was looked up: a sparse raw file, whatever it came
/// from.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(crate) id: Digest,
    pub(crate) urls: Vec<String>,
    pub(crate) format: Option<DiskFormat>,
    pub(crate) virtual_size: u64,
    pub(crate) size: u64,
    pub(crate) fetched: SystemTime,
    pub(crate) pinned: bool,
    pub(crate) path: PathBuf,
}

impl Disk {
    /// Whether a name is meant to be the URL of a disk image (`https://…`, `http://…`) and not an
    /// OCI image's.
    #[must_use]
    pub fn is_url(name: &str) -> bool {
        Source::is_meant(name)
    }

    /// The SHA-256 digest of the file that it came from, as that was served.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Addresses that it was fetched from, sorted; none when it came out of an OCI image or its
    /// address has a newer one.
    #[must_use]
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    /// Format of the file that it came from, when that is one that is known here.
    #[must_use]
    pub fn source_format(&self) -> Option<DiskFormat> {
        self.format
    }

    /// Bytes of the disk, as its guest sees it; whole sectors of 512.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Bytes that it takes on the host's disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// When it came into this store.
    #[must_use]
    pub fn fetched(&self) -> SystemTime {
        self.fetched
    }

    /// Whether pruning leaves it alone.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.pinned
    }

    /// Path of the raw file. It is not to be written: what guests write goes elsewhere.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the raw file for reading. While the returned file, or a duplicate of it in another
    /// process, is open, the disk image can be neither removed nor pruned.
    ///
    /// # Errors
    /// [`Error::NotFound`] when it has been removed since it was looked up; [`Error::Io`].
    pub fn open(&self) -> Result<File> {
        let file = File::open(&self.path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound {
                name: self.id.to_string(),
            },
            _ => Error::io("open", &self.path, source),
        })?;
        pin(&file).map_err(|source| Error::io("lock", &self.path, source))?;
        Ok(file)
    }
}
