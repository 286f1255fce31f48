//! Loading images from archives and layout folders.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::database::{self, Name, Record};
use super::lookup::canonical;
use super::work::WorkFile;
use super::{Inner, PullOptions, Store};
use crate::archive::{Archive, ArchiveError, Found, Member};
use crate::error::parse_reference;
use crate::{Digest, Error, Image, Result};

const CHUNK: usize = 256 << 10;

impl Store {
    /// Loads all images of an archive (`docker save`, OCI layout as a tar, either also compressed) or of an OCI layout
    /// folder. They get the names that they have in there, or `name` when there is one image. Blocks until done; of
    /// `options` only the events are used.
    ///
    /// # Errors
    /// When the file is no archive of images, or one of them cannot be used; those before it are then loaded.
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Vec<Image>> {
        let outcome = {
            let _stay = self.inner.hold_files()?;
            self.inner.load(path.as_ref(), name, options)
        };
        if outcome.is_err()
            && let Err(error) = self.inner.collect()
        {
            tracing::warn!(%error, "cannot clear the store after a failed load");
        }
        outcome
    }
}

impl Inner {
    fn load(&self, path: &Path, name: Option<&str>, options: &PullOptions) -> Result<Vec<Image>> {
        let limits = &self.options.limits;
        let archive = Archive::open(path, &self.layout.temporary(), limits)?;
        let found = archive.images(limits)?;
        if let (Some(name), 2..) = (name, found.len()) {
            return Err(Error::SeveralImages {
                name: name.to_owned(),
                count: found.len(),
            });
        }
        found
            .into_iter()
            .map(|found| self.load_image(&archive, found, name, options))
            .collect()
    }

    fn load_image(
        &self,
        archive: &Archive,
        found: Found,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Image> {
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
            digests.push(self.load_blob(archive, layer)?);
        }
        let manifest = found.manifest.unwrap_or_else(|| {
            let layers = digests
                .iter()
                .copied()
                .zip(&found.layers)
                .map(|(digest, layer)| (digest, layer.size));
            synthesise(id, found.config.len(), layers)
        });
        let new = self.load_rootfs(id, digests.into_iter().zip(diff_ids).collect(), options)?;
        let digest = Digest::of(&manifest);
        let mut names: Vec<String> = Vec::new();
        for reference in &references {
            names.push(canonical(reference));
            names.push(format!(
                "{}/{}@{digest}",
                reference.registry(),
                reference.repository()
            ));
        }
        let names = names.into_iter().map(|name| Name { name, id }).collect();
        let now = database::now();
        let record = Record {
            manifest: digest,
            indexes: Vec::new(),
            pulled: now,
            used: now,
            pinned: false,
        };
        let documents = [(digest, manifest), (id, found.config)];
        let image = self.commit(id, record, names, &documents)?;
        options.emit(crate::PullEvent::Done { id, new });
        Ok(image)
    }

    /// Writes the file system unless it is there; all layers are.
    fn load_rootfs(
        &self,
        id: Digest,
        layers: Vec<(Digest, Digest)>,
        options: &PullOptions,
    ) -> Result<bool> {
        let target = self.layout.rootfs(&id);
        let path = self.layout.rootfs_work(&id);
        if target.exists() {
            return Ok(false);
        }
        let work = WorkFile::acquire(&path).map_err(|source| Error::io("create", &path, source))?;
        if target.exists() {
            return Ok(false);
        }
        let mut ready = 0..layers.len();
        self.unpack(work, id, &layers, || ready.next(), Arc::default(), options)?;
        Ok(true)
    }

    /// Copies a layer into the store and returns its digest.
    fn load_blob(&self, archive: &Archive, member: &Member) -> Result<Digest> {
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
        // Without a name for it yet, so nobody else can be at it.
        let path =
            self.layout
                .temporary()
                .join(format!("load-{}-{}", std::process::id(), self.serial()));
        let fault = |source| Error::io("write", &path, source);
        let work = WorkFile::acquire(&path).map_err(fault)?;
        let mut out = work.handle().map_err(fault)?;
        let mut input = archive.reader(member).map_err(read)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; CHUNK];
        let mut left = member.size;
        while left > 0 {
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
        let target = self.layout.blob(&actual);
        if !target.exists() {
            work.publish(&target)
                .map_err(|source| Error::io("store", &target, source))?;
        }
        Ok(actual)
    }

    /// A number that no other file in the making of this process has.
    fn serial(&self) -> u64 {
        self.serial
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }
}

/// The manifest that an image from `docker save` would have been pushed with.
fn synthesise(
    id: Digest,
    config_bytes: usize,
    layers: impl Iterator<Item = (Digest, u64)>,
) -> Vec<u8> {
    let layers: Vec<_> = layers
        .map(|(digest, size)| {
            serde_json::json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": digest,
                "size": size,
            })
        })
        .collect();
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
