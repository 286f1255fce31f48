//! Layers of the store that are not what their names say any more.

use std::fs::{self, File};
use std::io::{self, Read};

use sha2::{Digest as _, Sha256};

use super::Inner;
use super::work::is_at;
use crate::layer::LayerError;
use crate::{Digest, Error, Result};

/// How often a pull or load fetches damaged layers of an image anew.
pub(super) const MAX_REPAIRS: usize = 4;

/// Bytes that are hashed at a time.
const CHUNK: usize = 128 << 10;

impl Inner {
    /// The error of a layer that cannot be unpacked. Its blob goes when that is the reason.
    pub(super) fn layer_fault(&self, layer: Digest, source: LayerError) -> Error {
        let may_be_damage = matches!(source, LayerError::Tar(_) | LayerError::DiffId { .. });
        match may_be_damage.then(|| self.remove_if_damaged(&layer)) {
            Some(Ok(true)) => Error::DamagedLayer { layer, source },
            Some(Err(error)) => {
                tracing::warn!(%layer, %error, "failed to verify a layer of the store");
                Error::Layer { layer, source }
            }
            _ => Error::Layer { layer, source },
        }
    }

    /// Removes a blob that has another digest than its name, or cannot be read; whether it did.
    fn remove_if_damaged(&self, digest: &Digest) -> Result<bool> {
        let path = self.layout.blob(digest);
        let blob = File::open(&path).map_err(|source| Error::io("read", &path, source))?;
        if digest_of(&blob).is_ok_and(|actual| actual == *digest) {
            return Ok(false);
        }
        let _claim = self.claim_blob(digest)?;
        // Another may have replaced it meanwhile.
        let remove = || match is_at(&blob, &path)? {
            true => fs::remove_file(&path),
            false => Ok(()),
        };
        remove().map_err(|source| Error::io("remove", &path, source))?;
        tracing::warn!(layer = %digest, "removed a damaged layer from the store");
        Ok(true)
    }
}

fn digest_of(mut file: &File) -> io::Result<Digest> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Digest::finish(hasher)),
            length => hasher.update(&buffer[..length]),
        }
    }
}
