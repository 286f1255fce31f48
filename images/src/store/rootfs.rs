//! What is known of the layers of a root file system that is there.
//!
//! An image's id is the digest of its configuration, which names its layers unpacked. Manifests can
//! name the same image with its layers packed in any way, or with layers that are none of it: what
//! a manifest says is only taken for true when the layers were unpacked.

use std::fs;

use super::Inner;
use super::database::{self, Record};
use super::work::WorkFile;
use crate::{Digest, Error, Result};

/// What there was of an image's root file system, for a manifest of the image.
#[derive(Debug)]
pub(super) enum Rootfs {
    /// Nothing: it was made of the manifest's layers.
    New,
    /// All of it, and it is made of the manifest's layers.
    There,
    /// All of it, with the layers of another manifest, which that record has.
    Other(Record),
}

impl Rootfs {
    pub(super) fn is_new(&self) -> bool {
        matches!(self, Self::New)
    }

    /// What to remember of the image when `record` is of the manifest: with its names it goes on
    /// to have the layers that the store has.
    pub(super) fn record(self, record: Record) -> Record {
        match self {
            Self::New | Self::There => record,
            Self::Other(known) => Record {
                manifest: known.manifest,
                indexes: known.indexes,
                ..record
            },
        }
    }
}

impl Inner {
    /// Keeps the image's root file system from those who remove it alone: for who has looked
    /// whether it is there, until the image has its record.
    pub(super) fn claim_image(&self, id: &Digest) -> Result<WorkFile> {
        let path = self.layout.image_claim(id);
        WorkFile::acquire(&path).map_err(|source| Error::io("create", &path, source))
    }

    /// Looks for an image's root file system and for layers of it, which are given by digest and
    /// size. `None` when something is missing.
    pub(super) fn find_rootfs(
        &self,
        id: Digest,
        layers: impl Iterator<Item = (Digest, u64)> + Clone,
    ) -> Result<Option<Rootfs>> {
        if !self.layout.rootfs(&id).exists() {
            return Ok(None);
        }
        let contents = database::read(&self.layout)?;
        let Some(record) = contents.record(&id) else {
            // Another process has just made it, and will say so: of these layers, as a rule.
            let here = layers.clone().all(|(digest, size)| self.has(&digest, size));
            return Ok(here.then_some(Rootfs::There));
        };
        let Ok(saved) = self.saved(&contents, id) else {
            return Ok(None);
        };
        let known = saved.manifest.layers.iter().map(|layer| layer.digest);
        Ok(Some(match known.eq(layers.map(|(digest, _)| digest)) {
            true => Rootfs::There,
            false => Rootfs::Other(record.clone()),
        }))
    }

    /// Whether a blob is here.
    pub(super) fn has(&self, digest: &Digest, size: u64) -> bool {
        fs::metadata(self.layout.blob(digest)).is_ok_and(|found| found.len() == size)
    }
}
