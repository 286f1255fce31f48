//! Loading images from archives and layout directories.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;

use sha2::{Digest as _, Sha256};

use super::database::Record;
use super::lookup::{canonical, names_of};
use super::repair::MAX_REPAIRS;
use super::rootfs::{Rootfs, Wanted};
use super::work::WorkFile;
use super::{Inner, PullOptions, Store};
use crate::archive::{Archive, ArchiveError, ArchiveImage, Member};
use crate::decompress::Compression;
use crate::error::parse_reference;
use crate::{Cancel, Digest, Error, Image, Limits, Result, TarError};

const CHUNK: usize = 256 << 10;

/// An image that was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedImage {
    /// The image, with all names that it has in the store.
    pub image: Image,
    /// Full names that this load gave it, in the order of the archive
    /// (`docker.io/library/busybox:latest`); none if it has no name there.
    pub names: Vec<String>,
}

impl Store {
    /// Loads all images of an archive (`docker save`, OCI layout as a tar, either also compressed)
    /// or of an OCI layout directory. They get the names that they have there, or `name` if there
    /// is only one image. Blocks until done; of `options`, the events and the cancellation are
    /// used.
    ///
    /// # Errors
    /// If the file is not an archive of images, or one of them cannot be used; the images before it
    /// are then loaded.
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Vec<LoadedImage>> {
        self.inner.load(name, options, |scratch, limits| {
            Archive::open(path.as_ref(), scratch, limits)
        })
    }

    /// As [`Store::load`], from an open file, which may also be a pipe: a pipe is copied to the
    /// store's disk first.
    ///
    /// # Errors
    /// As [`Store::load`].
    pub fn load_file(
        &self,
        file: File,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Vec<LoadedImage>> {
        self.inner.load(name, options, |scratch, limits| {
            Archive::read(file, scratch, limits)
        })
    }
}

impl Inner {
    fn load(
        self: &Arc<Self>,
        name: Option<&str>,
        options: &PullOptions,
        open: impl FnOnce(&Path, &Limits) -> Result<Archive, ArchiveError>,
    ) -> Result<Vec<LoadedImage>> {
        let outcome = self.hold_files().and_then(|_stay| {
            let scratch = self.layout.temporary();
            let archive = open(&scratch, &self.options.limits).map_err(|error| match error {
                ArchiveError::Tar(TarError::Read(source)) if is_full(&source) => {
                    Error::io("write", &scratch, source)
                }
                error => error.into(),
            })?;
            self.load_all(&archive, name, options)
        });
        self.clear_after(outcome)
    }

    /// Removes the files that were finished by work that failed.
    pub(super) fn clear_after<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err()
            && let Err(error) = self.collect()
        {
            tracing::warn!(%error, "cannot clear the store after work that failed");
        }
        outcome
    }

    fn load_all(
        &self,
        archive: &Archive,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Vec<LoadedImage>> {
        let limits = &self.options.limits;
        let check = |config: &[u8], layers| self.diff_ids(config, layers).map(drop);
        let found = archive.images(limits, &check)?;
        if let (Some(name), 2..) = (name, found.len()) {
            return Err(Error::SeveralImages {
                name: name.to_owned(),
                count: found.len(),
            });
        }
        found
            .into_iter()
            .map(|found| self.load_image(archive, found, name, options))
            .collect()
    }

    fn load_image(
        &self,
        archive: &Archive,
        found: ArchiveImage,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<LoadedImage> {
        let id = Digest::of(&found.config);
        let given: Vec<&str> = match name {
            Some(name) => vec![name],
            None => found.names.iter().map(String::as_str).collect(),
        };
        let references = given
            .into_iter()
            .map(parse_reference)
            .collect::<Result<Vec<_>>>()?;
        let diff_ids = self
            .diff_ids(&found.config, found.layers.len())
            .map_err(ArchiveError::from)?;
        let mut digests = Vec::new();
        for layer in &found.layers {
            digests.push(self.load_blob(archive, layer, &options.cancel)?);
        }
        let manifest = found.manifest.unwrap_or_else(|| {
            let layers = digests.iter().zip(&found.layers);
            let layers = layers.map(|(digest, layer)| self.layer_descriptor(digest, layer.size));
            synthesise(id, found.config.len(), layers.collect())
        });
        let digest = Digest::of(&manifest);
        let _claim = self.claim_image(&id, options)?;
        let sizes = found.layers.iter().map(|layer| layer.size);
        let wanted = Wanted {
            id,
            target: digest,
            layers: digests.into_iter().zip(sizes).collect(),
        };
        let mut repairs = 0;
        let rootfs = loop {
            match self.load_rootfs(&wanted, &diff_ids, options) {
                Err(Error::DamagedLayer { .. }) if repairs < MAX_REPAIRS => {
                    repairs += 1;
                    for layer in &found.layers {
                        self.load_blob(archive, layer, &options.cancel)?;
                    }
                }
                outcome => break outcome?,
            }
        };
        let new = rootfs.is_new();
        let mut loaded_names: Vec<String> = Vec::new();
        let mut names = Vec::new();
        for reference in &references {
            let name = canonical(reference);
            if !loaded_names.contains(&name) {
                names.extend(names_of(reference, &digest, id));
                loaded_names.push(name);
            }
        }
        let record = rootfs.record(Record::new(digest));
        let documents = [(digest, manifest), (id, found.config)];
        let cancelled = options.cancel.flag();
        let image = self.commit(id, record, names, &documents, &cancelled)?;
        options.emit(crate::PullEvent::Done { id, new });
        Ok(LoadedImage {
            image,
            names: loaded_names,
        })
    }

    /// Writes the file system unless it exists; all layers are in the store, and the image is
    /// claimed. Layers that turn out not to be needed are removed when the load ends.
    pub(super) fn load_rootfs(
        &self,
        wanted: &Wanted,
        diff_ids: &[Digest],
        options: &PullOptions,
    ) -> Result<Rootfs> {
        if let Some(found) = self.find_rootfs(wanted)? {
            if let Rootfs::Other(_) = &found {
                self.defer_removal()?;
            }
            return Ok(found);
        }
        let path = self.layout.rootfs_work(&wanted.id, None);
        let work = WorkFile::acquire(&path).map_err(|source| Error::io("create", &path, source))?;
        let layers = wanted.layers.iter().map(|(digest, _)| *digest);
        let layers: Vec<_> = layers.zip(diff_ids.iter().copied()).collect();
        let mut ready = 0..layers.len();
        self.unpack(
            &work,
            wanted.id,
            &layers,
            |_| ready.next().ok_or(RecvTimeoutError::Disconnected),
            options.cancel.flag(),
            options,
        )?;
        self.keep_rootfs(work, wanted)
    }

    /// Copies a layer into the store and returns its digest.
    fn load_blob(&self, archive: &Archive, member: &Member, cancel: &Cancel) -> Result<Digest> {
        let limit = self.options.limits.layer_bytes;
        if member.size > limit {
            return Err(ArchiveError::Limit {
                what: "bytes in a layer",
                limit,
            }
            .into());
        }
        let read = |source| {
            Error::from(ArchiveError::Read {
                name: "a layer".to_owned(),
                source,
            })
        };
        let work = self.unnamed_work()?;
        let fault = |source| Error::io("write", work.path(), source);
        let mut out = work.handle().map_err(fault)?;
        let mut input = archive.reader(member).map_err(read)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; CHUNK];
        let mut left = member.size;
        while left > 0 {
            cancel.check()?;
            let got = input.read(&mut buffer).map_err(read)?;
            if got == 0 {
                return Err(read(io::ErrorKind::UnexpectedEof.into()));
            }
            left = left.saturating_sub(got as u64);
            hasher.update(&buffer[..got]);
            out.write_all(&buffer[..got]).map_err(fault)?;
        }
        let actual = Digest::finish(hasher);
        if let Some(expected) = member.digest.filter(|expected| *expected != actual) {
            return Err(ArchiveError::Digest { expected, actual }.into());
        }
        self.publish_blob(work, &actual)?;
        Ok(actual)
    }

    /// Creates a file for a blob whose name is not known yet, so that no other work can use it.
    pub(super) fn unnamed_work(&self) -> Result<WorkFile> {
        let name = format!("load-{}-{}", std::process::id(), self.serial());
        let path = self.layout.temporary().join(name);
        WorkFile::acquire(&path).map_err(|source| Error::io("write", &path, source))
    }

    /// Moves a verified blob to its name, unless the store has it.
    pub(super) fn publish_blob(&self, work: WorkFile, digest: &Digest) -> Result<()> {
        let target = self.layout.blob(digest);
        let length = work.handle().and_then(|file| file.metadata());
        let length = length.map_err(|source| Error::io("look at", work.path(), source))?;
        if self.has(digest, length.len()) {
            return Ok(());
        }
        let _claim = self.claim_blob(digest)?;
        work.publish(&target)
            .map_err(|source| Error::io("store", &target, source))
    }

    /// Waits until nobody else moves a blob to its name or removes it.
    pub(super) fn claim_blob(&self, digest: &Digest) -> Result<WorkFile> {
        let path = self.layout.blob_claim(digest);
        WorkFile::acquire(&path).map_err(|source| Error::io("create", &path, source))
    }

    /// Returns the descriptor of a layer in the store, as in a manifest.
    pub(super) fn layer_descriptor(&self, digest: &Digest, size: u64) -> serde_json::Value {
        let mut head = Vec::new();
        // If it cannot be read, the unpacking fails with its own error.
        if let Ok(blob) = File::open(self.layout.blob(digest)) {
            let _ = blob.take(6).read_to_end(&mut head);
        }
        let suffix = match Compression::detect(&head) {
            // The specification has no type for xz.
            Compression::None | Compression::Xz => "",
            Compression::Gzip => "+gzip",
            Compression::Zstd => "+zstd",
        };
        serde_json::json!({
            "mediaType": format!("application/vnd.oci.image.layer.v1.tar{suffix}"),
            "digest": digest,
            "size": size,
        })
    }

    /// Returns a number that is unique among the unfinished files of this process.
    fn serial(&self) -> u64 {
        self.serial
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Creates the manifest that an image from `docker save` would have been pushed with.
pub(super) fn synthesise(
    id: Digest,
    config_bytes: usize,
    layers: Vec<serde_json::Value>,
) -> Vec<u8> {
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": id,
            "size": config_bytes,
        },
        "layers": layers,
    });
    manifest.to_string().into_bytes()
}
