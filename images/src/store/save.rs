//! Saving images to archives.

use std::fs::{self, File};
use std::io::Write;

use super::database::{self, Contents};
use super::lookup::{Lookup, find};
use super::{Inner, Store};
use crate::archive::ArchiveFormat;
use crate::archive::save::{self, Saved};
use crate::registry::{Manifest, Parsed};
use crate::{Cancel, Digest, Error, Result};

impl Store {
    /// Writes images to an archive that [`Store::load`] and other tools can load, with the same
    /// ids: manifests, configurations and layers as received. An image that is requested by a name
    /// has that name in the archive; one that is requested by id or digest has none. Blocks until
    /// done; the output is a stream.
    ///
    /// # Errors
    /// As [`Store::resolve`]; [`Error::Damaged`]; [`Error::Archive`] if writing to `out` fails;
    /// [`Error::Cancelled`].
    pub fn save(
        &self,
        images: &[impl AsRef<str>],
        format: ArchiveFormat,
        out: impl Write,
        cancel: &Cancel,
    ) -> Result<()> {
        let _stay = self.inner.hold_files()?;
        let contents = database::read(&self.inner.layout)?;
        let mut all: Vec<Saved> = Vec::new();
        for name in images {
            let found = find(&contents, name.as_ref())?;
            let id = found.id();
            let at = match all.iter().position(|saved| saved.id == id) {
                Some(at) => at,
                None => {
                    all.push(self.inner.saved(&contents, id)?);
                    all.len() - 1
                }
            };
            if let Lookup::Name(name, _) = found
                && !name.contains('@')
                && !all[at].tags.contains(&name)
            {
                all[at].tags.push(name);
            }
        }
        let open = |digest: &Digest| {
            let path = self.inner.layout.blob(digest);
            File::open(&path).map_err(|source| Error::io("read", &path, source))
        };
        save::write(&all, format, open, out, cancel)
    }
}

impl Inner {
    /// Returns an image if all its blobs are in the store.
    pub(super) fn saved(&self, contents: &Contents, id: Digest) -> Result<Saved> {
        let (digest, bytes, manifest) = self.manifest(contents, id)?;
        let complete = [&manifest.config]
            .into_iter()
            .chain(&manifest.layers)
            .all(|part| self.has(&part.digest, part.size));
        if !complete || manifest.config.digest != id {
            return Err(Error::Damaged { id });
        }
        Ok(Saved {
            id,
            tags: Vec::new(),
            digest,
            bytes,
            manifest,
        })
    }

    /// Returns the digest of an image's manifest and the manifest itself, as received and parsed.
    pub(super) fn manifest(
        &self,
        contents: &Contents,
        id: Digest,
    ) -> Result<(Digest, Vec<u8>, Manifest)> {
        let damaged = || Error::Damaged { id };
        let digest = contents.record(&id).ok_or_else(damaged)?.manifest;
        let bytes = fs::read(self.layout.blob(&digest)).map_err(|_| damaged())?;
        match Parsed::parse(&bytes, "", &self.options.limits) {
            Ok(Parsed::Image(manifest)) => Ok((digest, bytes, manifest)),
            _ => Err(damaged()),
        }
    }
}
