//! The store: one directory with everything that was pulled.
//!
//! ```text
//! ROOT/store.redb           state that cannot be derived: names, times of use, pins
//! ROOT/blobs/sha256/<hex>   manifests, configurations and layers as the registry sent them
//! ROOT/images/<hex of id>/  rootfs.erofs, the image's file system
//! ROOT/disks/<hex of id>/   disk.raw, sparse; the id is the digest of the file that it came from
//! ROOT/tmp/                 unfinished files; a crash's are removed at the next open
//! ROOT/lock, ROOT/gc.lock   flock: short transactions; work that needs its blobs to stay
//! ```
//!
//! Data enters through [`Store::pull`] and [`Store::load`], and leaves as [`Image`]s and through
//! [`Store::save`]. A file gets its final name only when it is complete, verified and on disk, and
//! an image gets its record only when all its files have theirs, so that a crash at any moment
//! leaves either the old or the new state. Several processes may use one store at the same time.

mod arrivals;
mod container_disk;
mod database;
mod disk_file;
mod disk_records;
mod disks;
mod documents;
mod flights;
mod gc;
mod import;
mod inspect;
mod layout;
mod load;
mod lookup;
mod maintain;
mod options;
mod places;
mod private;
mod pull;
mod repair;
mod rootfs;
mod save;
mod signatures;
mod work;

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub use database::create_database;
pub use inspect::{HistoryEntry, ImageDetails, Layer};
pub use load::LoadedImage;
pub use maintain::{Prune, StoreUsage};
pub use options::{PullOptions, PullPolicy, StoreOptions};

use flights::SingleFlight;
use layout::Layout;
use places::UnpackSlots;

use crate::{Digest, Error, Image, Result};

/// A directory of images. Cheap to clone; clones share their work.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    layout: Layout,
    options: StoreOptions,
    flights: SingleFlight,
    places: UnpackSlots,
    /// Serial numbers for unfinished files.
    serial: AtomicU64,
}

/// A pull that is under way. It is boxed because the body of an `async fn` is compiled in each
/// program that awaits it, and this one is large.
pub type Pulling<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Result of [`Store::remove`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovedImages {
    /// Names that were removed.
    pub names: Vec<String>,
    /// The image, if its last name was removed and its files with it.
    pub image: Option<Digest>,
    /// Bytes of disk space freed.
    pub bytes: u64,
    /// Files that nothing needs any longer were left, because a pull, load or save is running. They
    /// are removed when it ends. An image's root file system and its disk image are removed
    /// immediately all the same.
    pub deferred: bool,
}

impl Store {
    /// Opens the store at `root` with the default options; the directory is created if it is
    /// missing. Leftovers of a crash are removed. A created directory, and what the store has in
    /// it, is accessible only to its owner.
    ///
    /// # Errors
    /// If the directory cannot be created or written.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store at `root`.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_with(root: impl AsRef<Path>, options: StoreOptions) -> Result<Self> {
        let layout = Layout::new(root.as_ref());
        layout.create_directories()?;
        for path in layout.private() {
            private::take_from_others(&path)
                .map_err(|source| Error::io("look at", &path, source))?;
        }
        let temporary = layout.temporary();
        work::clear(&temporary).map_err(|source| Error::io("clear", &temporary, source))?;
        database::clear(&layout)?;
        Ok(Self {
            inner: Arc::new(Inner {
                layout,
                options,
                flights: SingleFlight::default(),
                places: UnpackSlots::default(),
                serial: AtomicU64::new(0),
            }),
        })
    }

    /// The store's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.inner.layout.root()
    }

    /// Pulls `reference` (short forms allowed), unpacks it into one EROFS file and gives it its
    /// name. Two pulls of one image, also by different processes, share the work. Dropping the
    /// future stops the pull and leaves the store as it was, except for complete layers.
    ///
    /// # Errors
    /// Failures of the registry, the image or the disk; the store is then as it was before.
    pub fn pull<'a>(&'a self, reference: &'a str, options: &'a PullOptions) -> Pulling<'a, Image> {
        Box::pin(self.pull_image(reference, options))
    }

    /// All images, by the time of their pull, newest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn list(&self) -> Result<Vec<Image>> {
        let contents = database::read(&self.inner.layout)?;
        let mut images = Vec::new();
        for (id, record) in &contents.images {
            match self.inner.image(&contents, *id, record) {
                Ok(image) => images.push(image),
                // One bad image must not hide the others; it is reported when it is requested by
                // name.
                Err(error @ Error::Damaged { .. }) => {
                    tracing::warn!(%id, %error, "skipping a damaged image")
                }
                Err(error) => return Err(error),
            }
        }
        images.sort_by_key(|image| std::cmp::Reverse((image.pulled, image.id)));
        Ok(images)
    }

    /// Finds an image by name (short forms allowed, with tag or digest), by id (`sha256:…` or its
    /// digits), or by a prefix of its id (at least 4 digits); a name takes precedence over a
    /// prefix.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Ambiguous`], or the store cannot be read.
    pub fn resolve(&self, name: &str) -> Result<Image> {
        let contents = database::read(&self.inner.layout)?;
        let id = lookup::find(&contents, name)?.id();
        let record = contents.record(&id).ok_or(Error::Damaged { id })?;
        self.inner.image(&contents, id, record)
    }

    /// Removes a name, also of a disk image, or by id all of an image's names; the image is removed
    /// with its last name.
    ///
    /// # Errors
    /// As [`Store::resolve`], and [`Error::InUse`] if the image's file is open somewhere.
    pub fn remove(&self, name: &str) -> Result<RemovedImages> {
        let mut removed = RemovedImages::default();
        self.remove_into(name, &mut removed)?;
        Ok(removed)
    }

    /// As [`Self::remove`]; `removed` says what was removed, also where that fails in part.
    ///
    /// # Errors
    /// As [`Self::remove`].
    pub fn remove_into(&self, name: &str, removed: &mut RemovedImages) -> Result<()> {
        match self.is_disk(name)? {
            true => self.inner.remove_disk(name, removed),
            false => self.inner.remove(name, removed),
        }
    }
}
