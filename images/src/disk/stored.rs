//! A disk image of the store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{DiskFormat, Source};
use crate::pin::pin;
use crate::{Digest, Error, Result};

/// A disk image of the store, as it was when it was looked up: a sparse raw file, whatever its
/// source format.
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
    /// Returns whether a name is the URL of a disk image (`https://…`, `http://…`) and not the name
    /// of an OCI image.
    #[must_use]
    pub fn is_url(name: &str) -> bool {
        Source::is_meant(name)
    }

    /// The SHA-256 digest of the file that it was created from, as it was served.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    /// URLs that it was fetched from, sorted; empty if it came out of an OCI image or its URL now
    /// has a newer one.
    #[must_use]
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    /// Format of the file that it was created from; `None` if the format is not known to this
    /// version.
    #[must_use]
    pub fn source_format(&self) -> Option<DiskFormat> {
        self.format
    }

    /// Bytes of the disk as seen by its guest; a multiple of 512.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Bytes that it takes on the host's disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// When it was added to this store.
    #[must_use]
    pub fn fetched(&self) -> SystemTime {
        self.fetched
    }

    /// Whether it is protected from pruning.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.pinned
    }

    /// Path of the raw file. It must not be written to: writes of guests go elsewhere.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A directory, which may not be there yet, for files that are derived from the disk image and
    /// may be lost: they are removed with it. Whoever creates some has the disk image open.
    #[must_use]
    pub fn derived_directory(&self) -> PathBuf {
        Self::derived_directory_of(&self.path)
    }

    pub(crate) fn derived_directory_of(path: &Path) -> PathBuf {
        path.with_file_name("derived")
    }

    /// Opens the raw file for reading. While the returned file, or a duplicate of it in another
    /// process, is open, the disk image can be neither removed nor pruned.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it was removed after it was looked up; [`Error::Io`].
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
