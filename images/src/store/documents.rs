//! Manifests and configurations of the store: small blobs that are read into memory.

use std::fs::{self, File};
use std::io::{Read, Write};

use super::Inner;
use crate::{Digest, Error, Result};

impl Inner {
    /// A manifest or configuration that is here. Nothing is read of a blob of another size, which
    /// may be a layer.
    pub(super) fn document(&self, digest: &Digest, size: u64) -> Option<Vec<u8>> {
        let file = File::open(self.layout.blob(digest)).ok()?;
        if file.metadata().ok()?.len() != size {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(size).read_to_end(&mut bytes).ok()?;
        (Digest::of(&bytes) == *digest).then_some(bytes)
    }

    /// A manifest or index that is here.
    pub(super) fn manifest_here(&self, digest: &Digest) -> Option<Vec<u8>> {
        let size = fs::metadata(self.layout.blob(digest)).ok()?.len();
        if size > self.options.limits.manifest_bytes {
            return None;
        }
        self.document(digest, size)
    }

    /// Stores a manifest or configuration.
    pub(super) fn put_document(&self, digest: &Digest, bytes: &[u8]) -> Result<()> {
        let target = self.layout.blob(digest);
        if self.document(digest, bytes.len() as u64).is_some() {
            return Ok(());
        }
        // Not the file of a registry that sends it as a layer, perhaps for hours.
        let work = self.unnamed_work()?;
        let _claim = self.claim_blob(digest)?;
        let put = || {
            work.handle()?.write_all(bytes)?;
            work.publish(&target)
        };
        put().map_err(|source| Error::io("store", &target, source))
    }
}
