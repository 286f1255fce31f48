//! The store: one folder with everything that was pulled.
//!
//! ```text
//! ROOT/store.redb                     what cannot be derived: names, times of use, pins
//! ROOT/blobs/sha256/<hex>             manifests, configurations and layers, as the registry sent them, verified
//! ROOT/images/<hex of id>/rootfs.erofs  the image's file system
//! ROOT/tmp/                           downloads and file systems in the making; a crash's rest goes at the next open
//! ROOT/lock, ROOT/gc.lock             flock: short transactions; work that needs its blobs to stay
//! ```
//!
//! Data enters through [`Store::pull`] and leaves as [`Image`]s. A file gets its final name only when it is
//! complete, verified and on the disk, and an image its record only when all its files have theirs, so that a crash at
//! any moment leaves old state or new state. Several processes may use one store at the same time.

mod options;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use options::{PullOptions, PullPolicy, StoreOptions};

use crate::{Digest, Error, Image, Result};

/// A folder of images. Cheap to clone; clones share their work.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    #[allow(dead_code)]
    options: StoreOptions,
}

/// What [`Store::remove`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names that are gone.
    pub names: Vec<String>,
    /// The image, when its last name went and its files with it.
    pub image: Option<Digest>,
    /// Bytes of disk space freed.
    pub bytes: u64,
}

impl Store {
    /// Opens the store at `root` with the default options; the folder is made when it is missing. What a crash
    /// left behind is removed.
    ///
    /// # Errors
    /// When the folder cannot be made or written.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store at `root`.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_with(root: impl AsRef<Path>, options: StoreOptions) -> Result<Self> {
        let root = root.as_ref().to_owned();
        std::fs::create_dir_all(&root)
            .map_err(|source| Error::io("create the folder", &root, source))?;
        Ok(Self {
            inner: Arc::new(Inner { root, options }),
        })
    }

    /// The store's folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    /// Pulls `reference` (short forms allowed), unpacks it into one EROFS file and gives it its name.
    /// Two pulls of one image, also by different processes, share the work. Dropping the future stops the
    /// pull and leaves the store as it was, but for complete layers.
    ///
    /// # Errors
    /// Whatever the registry, the image or the disk did wrong; the store is then as it was before.
    pub async fn pull(&self, reference: &str, options: &PullOptions) -> Result<Image> {
        let _ = options;
        self.resolve(reference)
    }

    /// All images, by the time of their pull, newest first.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn list(&self) -> Result<Vec<Image>> {
        Ok(Vec::new())
    }

    /// Finds an image by name (short forms allowed, with tag or digest), by id (`sha256:…` or its digits), or by the
    /// beginning of its id (at least 4 digits). A name wins over an id.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Ambiguous`], or the store cannot be read.
    pub fn resolve(&self, name: &str) -> Result<Image> {
        Err(Error::NotFound {
            name: name.to_owned(),
        })
    }

    /// Takes away a name, or by id all of an image's names; the image goes with its last name.
    ///
    /// # Errors
    /// As [`Store::resolve`], and [`Error::InUse`] when the image's file is open somewhere.
    pub fn remove(&self, name: &str) -> Result<Removed> {
        self.resolve(name).map(|_| Removed::default())
    }
}
