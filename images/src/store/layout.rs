//! Paths of everything in the store's directory.

use std::path::{Path, PathBuf};

use super::private;
use crate::{Digest, Error, Result};

/// Paths of a store.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Directories that must exist.
    pub(super) fn directories(&self) -> [PathBuf; 4] {
        [self.blobs(), self.images(), self.disks(), self.temporary()]
    }

    /// Makes the directories that are missing: somebody may have removed them to free the disk.
    pub(super) fn create_directories(&self) -> Result<()> {
        for directory in self.directories() {
            private::create_directory(&directory)
                .map_err(|source| Error::io("create the directory", &directory, source))?;
        }
        Ok(())
    }

    /// Of what older versions made for all users to open, whatever leads to the rest.
    pub(super) fn private(&self) -> [PathBuf; 8] {
        [
            self.root.join("blobs"),
            self.blobs(),
            self.images(),
            self.disks(),
            self.temporary(),
            self.database(),
            self.lock(),
            self.gc_lock(),
        ]
    }

    pub(super) fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(super) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(super) fn image(&self, id: &Digest) -> PathBuf {
        self.images().join(id.hex())
    }

    pub(super) fn rootfs(&self, id: &Digest) -> PathBuf {
        self.image(id).join("rootfs.erofs")
    }

    pub(super) fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    pub(super) fn disk_directory(&self, id: &Digest) -> PathBuf {
        self.disks().join(id.hex())
    }

    pub(super) fn disk(&self, id: &Digest) -> PathBuf {
        self.disk_directory(id).join("disk.raw")
    }

    pub(super) fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// Path of a blob while it is fetched from `registry`. Each registry has a file of its own, so
    /// that none can keep another's from being fetched.
    pub(super) fn blob_work(&self, digest: &Digest, registry: &str) -> PathBuf {
        let registry = Digest::of(registry.as_bytes()).hex();
        self.temporary()
            .join(format!("blob-{}-{registry}", digest.hex()))
    }

    /// Lock held by whoever gives a blob its name or takes it away, just for that.
    pub(super) fn blob_claim(&self, digest: &Digest) -> PathBuf {
        self.temporary()
            .join(format!("claim-blob-{}", digest.hex()))
    }

    /// Path of a root file system while it is written from layers that come from `registry`;
    /// `None` if all of them are here.
    pub(super) fn rootfs_work(&self, id: &Digest, registry: Option<&str>) -> PathBuf {
        let source = match registry {
            Some(registry) => Digest::of(registry.as_bytes()).hex(),
            None => "here".to_owned(),
        };
        self.temporary()
            .join(format!("rootfs-{}-{source}", id.hex()))
    }

    /// Path of a disk image while it is created; `key` identifies its source.
    pub(super) fn disk_work(&self, key: &Digest) -> PathBuf {
        self.temporary().join(format!("disk-{}", key.hex()))
    }

    /// Lock held by whoever has found an image's root file system, or gives it its name, until the
    /// image has its record, and by a process that removes the file. Nobody waits for a registry
    /// with it.
    pub(super) fn image_claim(&self, id: &Digest) -> PathBuf {
        self.temporary().join(format!("claim-image-{}", id.hex()))
    }

    /// As [`Self::image_claim`], of a disk image.
    pub(super) fn disk_claim(&self, id: &Digest) -> PathBuf {
        self.temporary().join(format!("claim-disk-{}", id.hex()))
    }

    pub(super) fn database(&self) -> PathBuf {
        self.root.join("store.redb")
    }

    /// An unfinished database.
    pub(super) fn new_database(&self) -> PathBuf {
        self.root.join("store.redb.new")
    }

    /// Held for the length of a transaction.
    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// Held shared by work that needs the files that it found to stay, and exclusively while files
    /// are removed. It has a non-zero length if there are files that could not be removed because
    /// it was held.
    pub(super) fn gc_lock(&self) -> PathBuf {
        self.root.join("gc.lock")
    }
}
