//! An image of the store.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use oci_spec::image::ImageConfiguration;

use crate::erofs::{FileSystem, Inode};
use crate::pin::pin;
use crate::{Digest, Error, Result};

/// An image of the store, as it was when it was looked up.
#[derive(Clone, Debug)]
pub struct Image {
    pub(crate) id: Digest,
    pub(crate) manifest: Digest,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    pub(crate) size: u64,
    pub(crate) pulled: SystemTime,
    pub(crate) used: SystemTime,
    pub(crate) created: Option<SystemTime>,
    pub(crate) pinned: bool,
    pub(crate) disk: Option<Digest>,
    pub(crate) rootfs: PathBuf,
    pub(crate) config: ImageConfiguration,
}

impl Image {
    /// The image's id: the digest of its configuration, as in Docker and the CRI.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Digest of the manifest that the image was pulled by.
    #[must_use]
    pub fn manifest_digest(&self) -> Digest {
        self.manifest
    }

    /// Full names with tags, sorted (`docker.io/library/busybox:latest`); the CRI's `RepoTags`.
    #[must_use]
    pub fn tags(&self) -> &[String] {
        &self.tags
    }

    /// Full names with digests, sorted (`docker.io/library/busybox@sha256:…`); the CRI's
    /// `RepoDigests`.
    #[must_use]
    pub fn digests(&self) -> &[String] {
        &self.digests
    }

    /// Bytes that the image's root file system takes on disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// When the image was created, as claimed by its configuration.
    #[must_use]
    pub fn created(&self) -> Option<SystemTime> {
        self.created
    }

    /// When the image was added to this store.
    #[must_use]
    pub fn pulled(&self) -> SystemTime {
        self.pulled
    }

    /// When the image was last used ([`Store::touch`](crate::Store::touch)); pruning depends on it.
    #[must_use]
    pub fn used(&self) -> SystemTime {
        self.used
    }

    /// Whether the image is protected from pruning.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.pinned
    }

    /// Id of the image's disk image if it is a containerDisk: if pulling or loading found a single
    /// disk image in `/disk`.
    #[must_use]
    pub fn disk(&self) -> Option<Digest> {
        self.disk
    }

    /// The OCI image configuration: entrypoint, environment, user, working directory, …
    #[must_use]
    pub fn config(&self) -> &ImageConfiguration {
        &self.config
    }

    /// Path of the root file system: one read-only EROFS file.
    #[must_use]
    pub fn rootfs(&self) -> &Path {
        &self.rootfs
    }

    /// Opens the root file system for reading. While the returned file, or a duplicate of it in
    /// another process, is open, the image can be neither removed nor pruned.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the image was removed after it was looked up; [`Error::Io`].
    pub fn open_rootfs(&self) -> Result<File> {
        let file = File::open(&self.rootfs).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound {
                name: self.id.to_string(),
            },
            _ => Error::io("open", &self.rootfs, source),
        })?;
        pin(&file).map_err(|source| Error::io("lock", &self.rootfs, source))?;
        Ok(file)
    }

    /// Copies a file of the root file system, of at most `most` bytes, and returns its length. Links
    /// are not followed.
    ///
    /// # Errors
    /// [`Error::NoFile`] if there is no such file; [`Error::FileTooLarge`]; [`Error::NotFound`] if
    /// the image was removed; [`Error::Io`].
    pub fn copy_file(&self, path: &str, to: &mut impl Write, most: u64) -> Result<u64> {
        let shown = || path.chars().take(256).collect();
        let read = |source| Error::io("read", &self.rootfs, source);
        let files = FileSystem::new(self.open_rootfs()?).map_err(read)?;
        let found = files.find(path).map_err(read)?.filter(Inode::is_file);
        let inode = found.ok_or_else(|| Error::NoFile {
            image: self.id.to_string(),
            path: shown(),
        })?;
        if inode.size() > most {
            return Err(Error::FileTooLarge {
                path: shown(),
                size: inode.size(),
                most,
            });
        }
        let mut content = files.open(&inode).map_err(read)?;
        std::io::copy(&mut content, to).map_err(|source| Error::io("copy", path.as_ref(), source))
    }
}
