//! Applies layers to a tree and writes their file data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest as _, Sha256};

use super::ahead::ReadAhead;
use super::error::TarError;
use super::path::{PathFault, Target, components, target};
use super::tar::{EntryKind, FilePiece, TarEntry, TarReader};
use crate::decompress::Compression;
use crate::erofs::{WriteError, Writer, storable_xattr};
use crate::tree::{Leaf, Meta, Tree, TreeError, show};
use crate::{Digest, Limits};

const CHUNK: usize = 128 << 10;

/// Why a layer cannot be part of an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The archive is damaged.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// An entry's name, or its hard link's target, is not one that may be in an image.
    #[error("entry {path:?} has a name that is refused: {fault}")]
    Path {
        /// The name.
        path: String,
        /// What is wrong with it.
        fault: PathFault,
    },
    /// An entry contradicts the tree so far.
    #[error("entry {path:?} cannot be added to the image")]
    Tree {
        /// The entry.
        path: String,
        /// The contradiction.
        #[source]
        source: TreeError,
    },
    /// An entry has something that a Linux file system cannot hold.
    #[error("entry {path:?} has {what}")]
    Entry {
        /// The entry.
        path: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Too many entries.
    #[error("the image has more than {limit} entries; raise the limit if you trust it")]
    Entries {
        /// The bound.
        limit: u64,
    },
    /// Too much data.
    #[error("the image unpacks to more than {limit} bytes; raise the limit if you trust it")]
    Unpacked {
        /// The bound.
        limit: u64,
    },
    /// Too much metadata.
    #[error(
        "the names, links and attributes of the image take more than {limit} bytes of memory; \
         raise the limit if you trust it"
    )]
    Metadata {
        /// The bound.
        limit: u64,
    },
    /// The unpacked layer is not the one that the configuration names.
    #[error(
        "the unpacked layer has the digest {actual}, but the image configuration says {expected}"
    )]
    DiffId {
        /// From the configuration.
        expected: Digest,
        /// Computed.
        actual: Digest,
    },
    /// The file system could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The pull was cancelled.
    #[error("the pull was cancelled")]
    Cancelled,
}

impl LayerError {
    /// Returns the error of the file that is written, if it is one.
    pub(crate) fn into_io(self) -> Result<io::Error, Self> {
        match self {
            Self::Write(WriteError::Io(error)) => Ok(error),
            other => Err(other),
        }
    }
}

/// Turns layers, base first, into one file system image.
#[derive(Debug)]
pub(crate) struct Unpacker {
    tree: Tree,
    writer: Writer,
    limits: Limits,
    entries: u64,
    /// Bytes that may still be unpacked.
    budget: u64,
    cancelled: Arc<AtomicBool>,
}

impl Unpacker {
    /// Starts an image in `file`. Setting `cancelled` ends the work soon.
    pub(crate) fn new(file: File, limits: Limits, cancelled: Arc<AtomicBool>) -> Self {
        let budget = limits.unpacked_bytes;
        Self {
            tree: Tree::new(),
            writer: Writer::new(file),
            limits,
            entries: 0,
            budget,
            cancelled,
        }
    }

    /// Returns the bytes of memory that names and metadata take.
    pub(crate) fn memory(&self) -> u64 {
        self.tree.memory()
    }

    /// Applies the layer in `blob`, whose uncompressed digest must be `diff_id`.
    pub(crate) fn layer(&mut self, blob: File, diff_id: Digest) -> Result<(), LayerError> {
        let input = Hashing {
            input: Compression::open(blob)
                .and_then(ReadAhead::new)
                .map_err(TarError::Read)?,
            hasher: Sha256::new(),
            budget: self.budget,
            over: false,
        };
        let mut tar = TarReader::new(input);
        self.tree.begin_layer();
        let mut outcome = self.entries(&mut tar);
        if outcome.is_ok() {
            outcome = tar.drain().map_err(LayerError::from);
        }
        let input = tar.into_input();
        // Whatever the reader reported for the truncated stream: this is the cause.
        if input.over {
            return Err(LayerError::Unpacked {
                limit: self.limits.unpacked_bytes,
            });
        }
        outcome?;
        self.budget = self.budget.min(input.budget);
        let actual = Digest::finish(input.hasher);
        if actual != diff_id {
            return Err(LayerError::DiffId {
                expected: diff_id,
                actual,
            });
        }
        Ok(())
    }

    /// Writes the tree; returns the length of the image in bytes.
    pub(crate) fn finish(self, uuid: [u8; 16]) -> Result<u64, LayerError> {
        Ok(self.writer.finish(&self.tree, uuid)?)
    }

    fn entries<R: Read>(&mut self, tar: &mut TarReader<R>) -> Result<(), LayerError> {
        let mut buffer = vec![0; CHUNK];
        while let Some(entry) = tar.next_entry()? {
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(LayerError::Entries {
                    limit: self.limits.entries,
                });
            }
            self.check_cancelled()?;
            self.entry(tar, entry, &mut buffer)?;
            if self.tree.memory() > self.limits.metadata_bytes {
                return Err(LayerError::Metadata {
                    limit: self.limits.metadata_bytes,
                });
            }
            for content in self.tree.take_freed() {
                self.writer.release(content);
            }
        }
        Ok(())
    }

    fn entry<R: Read>(
        &mut self,
        tar: &mut TarReader<R>,
        entry: TarEntry,
        buffer: &mut [u8],
    ) -> Result<(), LayerError> {
        let shown = show(&[&entry.path]);
        let refuse = |fault| LayerError::Path {
            path: shown.clone(),
            fault,
        };
        let path = components(&entry.path, &self.limits).map_err(refuse)?;
        let placed = match target(&path).map_err(refuse)? {
            Target::Ignored => Ok(()),
            Target::Opaque(dir) => {
                self.tree.opaque(dir);
                Ok(())
            }
            Target::Whiteout(parents, name) => {
                self.tree.whiteout(&[parents, &[name]].concat());
                Ok(())
            }
            Target::Entry if entry.kind == EntryKind::Hardlink => {
                let link = components(&entry.link, &self.limits).map_err(refuse)?;
                self.tree.put_link(&path, &link)
            }
            Target::Entry => {
                let meta = meta(&entry, &self.limits).map_err(|what| LayerError::Entry {
                    path: shown.clone(),
                    what,
                })?;
                if entry.kind == EntryKind::Dir {
                    self.tree.put_dir(&path, meta)
                } else {
                    let leaf = self.leaf(tar, &entry, &meta, buffer)?;
                    self.tree.put_leaf(&path, meta, leaf)
                }
            }
        };
        placed.map_err(|source| LayerError::Tree {
            path: shown,
            source,
        })
    }

    fn leaf<R: Read>(
        &mut self,
        tar: &mut TarReader<R>,
        entry: &TarEntry,
        meta: &Meta,
        buffer: &mut [u8],
    ) -> Result<Leaf, LayerError> {
        let fault = |what| {
            Err(LayerError::Entry {
                path: show(&[&entry.path]),
                what,
            })
        };
        let device = |major, minor| major < 1 << 12 && minor < 1 << 20;
        match entry.kind {
            EntryKind::File => self.file(tar, entry, meta, buffer),
            EntryKind::Symlink => match entry.link.len() {
                0 => fault("a symbolic link to nothing"),
                1..=4095 => Ok(Leaf::Symlink(entry.link.as_slice().into())),
                _ => fault("a symbolic link of more than 4095 bytes"),
            },
            EntryKind::Char(..) | EntryKind::Block(..) if !self.limits.devices => {
                fault("a device node, which this store does not allow")
            }
            EntryKind::Char(major, minor) if device(major, minor) => {
                Ok(Leaf::Char { major, minor })
            }
            EntryKind::Block(major, minor) if device(major, minor) => {
                Ok(Leaf::Block { major, minor })
            }
            EntryKind::Char(..) | EntryKind::Block(..) => {
                fault("a device number that Linux cannot have")
            }
            EntryKind::Fifo => Ok(Leaf::Fifo),
            EntryKind::Dir | EntryKind::Hardlink | EntryKind::Unknown(_) => {
                fault("a type that files in images do not have")
            }
        }
    }

    fn file<R: Read>(
        &mut self,
        tar: &mut TarReader<R>,
        entry: &TarEntry,
        meta: &Meta,
        buffer: &mut [u8],
    ) -> Result<Leaf, LayerError> {
        // Holes are not in the stream, so the stream's own limit does not include them.
        self.budget = self
            .budget
            .checked_sub(entry.size)
            .ok_or(LayerError::Unpacked {
                limit: self.limits.unpacked_bytes,
            })?;
        let mut file = self.writer.add_file(entry.size, meta)?;
        while let Some(piece) = tar.read_data(buffer)? {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(LayerError::Cancelled);
            }
            match piece {
                FilePiece::Data(length) => file.write(&buffer[..length])?,
                FilePiece::Hole(length) => file.skip(length)?,
            }
        }
        Ok(Leaf::File(file.finish()?))
    }

    fn check_cancelled(&self) -> Result<(), LayerError> {
        if self.cancelled.load(Ordering::Relaxed) {
            Err(LayerError::Cancelled)
        } else {
            Ok(())
        }
    }
}

fn meta(entry: &TarEntry, limits: &Limits) -> Result<Meta, &'static str> {
    let id = |id: u64| u32::try_from(id).map_err(|_| "an owner beyond 32 bits");
    let mut xattrs = BTreeMap::new();
    let mut bytes = 0;
    for (name, value) in &entry.xattrs {
        // Overlayfs in the guest would obey its own attributes; EROFS cannot store the others.
        if name.starts_with(b"trusted.overlay.") || !storable_xattr(name) {
            continue;
        }
        bytes += name.len() + value.len() + 8;
        if value.len() > usize::from(u16::MAX) || bytes > limits.xattr_bytes {
            return Err("more extended attributes than allowed");
        }
        xattrs.insert(name.clone(), value.clone());
    }
    Ok(Meta {
        mode: entry.mode,
        uid: id(entry.uid)?,
        gid: id(entry.gid)?,
        mtime: entry.mtime.0,
        mtime_nsec: entry.mtime.1,
        xattrs,
    })
}

/// Computes the digest of the bytes that pass through, and ends the stream when it gets too long.
struct Hashing<R> {
    input: R,
    hasher: Sha256,
    budget: u64,
    over: bool,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.hasher.update(&buffer[..got]);
        match self.budget.checked_sub(got as u64) {
            Some(rest) => self.budget = rest,
            None => {
                self.over = true;
                return Err(io::Error::other("the layer is too large"));
            }
        }
        Ok(got)
    }
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
