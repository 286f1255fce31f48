//! Scans a tar before it becomes a layer.

use std::fs::File;
use std::io::{self, Read};

use sha2::{Digest as _, Sha256};

use super::ImportError;
use crate::decompress::Compression;
use crate::layer::{EntryKind, TarReader, components};
use crate::{ArchiveError, Cancel, Digest, Error, Limits, Result};

/// The result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TarSummary {
    /// Digest of the uncompressed tar.
    pub(crate) diff_id: Digest,
    /// Modification time of the newest file, in seconds since 1970.
    pub(crate) newest: i64,
}

/// Reads all of a tar.
pub(crate) fn survey(file: File, limits: &Limits, cancel: &Cancel) -> Result<TarSummary> {
    let broken = |error| Error::Archive(ArchiveError::Tar(error));
    let input = Compression::open(file).map_err(|error| broken(error.into()))?;
    let mut tar = TarReader::new(Hashing {
        input,
        hasher: Sha256::new(),
        left: limits.unpacked_bytes,
        cancel,
    });
    let (mut entries, mut newest) = (0, 0);
    let mut names = TopNames::default();
    let outcome = loop {
        match tar.next_entry() {
            Ok(Some(entry)) => {
                entries += 1;
                if entries > limits.entries {
                    let (what, limit) = ("entries", limits.entries);
                    return Err(ImportError::Limit { what, limit }.into());
                }
                newest = newest.max(entry.mtime.0);
                if let Ok(path) = components(&entry.path, limits) {
                    names.add(&path, entry.kind);
                }
            }
            Ok(None) => break tar.drain(),
            Err(error) => break Err(error),
        }
    };
    let input = tar.into_input();
    cancel.check()?;
    // Whatever the reader reported for the truncated stream: this is the cause.
    if input.left == 0 {
        let (what, limit) = ("bytes", limits.unpacked_bytes);
        return Err(ImportError::Limit { what, limit }.into());
    }
    outcome.map_err(broken)?;
    names.check()?;
    let diff_id = Digest::finish(input.hasher);
    Ok(TarSummary { diff_id, newest })
}

/// Distinguishes a root file system from other archives.
#[derive(Debug, Default)]
struct TopNames {
    any: bool,
    of_images: bool,
    of_systems: bool,
}

impl TopNames {
    fn add(&mut self, path: &[&[u8]], kind: EntryKind) {
        let Some(first) = path.first() else {
            return;
        };
        self.any = true;
        let is_document = path.len() == 1 && kind == EntryKind::File;
        self.of_images |= is_document && matches!(*first, b"oci-layout" | b"manifest.json");
        self.of_systems |= matches!(*first, b"bin" | b"etc" | b"lib" | b"sbin" | b"usr");
    }

    fn check(&self) -> Result<(), ImportError> {
        match self {
            Self { any: false, .. } => Err(ImportError::Empty),
            Self {
                of_images: true,
                of_systems: false,
                ..
            } => Err(ImportError::Images),
            _ => Ok(()),
        }
    }
}

/// Computes the digest of the bytes that pass through, and ends the stream when it gets too long.
struct Hashing<'a, R> {
    input: R,
    hasher: Sha256,
    left: u64,
    cancel: &'a Cancel,
}

impl<R: Read> Read for Hashing<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
        let got = self.input.read(buffer)?;
        self.hasher.update(&buffer[..got]);
        self.left = self.left.saturating_sub(got as u64);
        match self.left {
            0 if got > 0 => Err(io::Error::other("the tar is too large")),
            _ => Ok(got),
        }
    }
}
