//! Images from files and to files: OCI image layouts, as a directory or as a tar, and archives of
//! `docker save`.
//!
//! A tar is indexed once, by name, and read in place; nothing of it is unpacked. A compressed one
//! is decompressed into an unnamed temporary file first. Names within are only compared and never
//! used as paths of the host, except for the blobs of a layout directory, whose names are digests.

mod docker;
mod error;
mod index;
mod oci;
pub(crate) mod save;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

pub use error::ArchiveError;
use index::TarIndex;

use crate::{Digest, Limits, ManifestError};

/// The format that images are saved in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArchiveFormat {
    /// The format that `docker save` writes now: an OCI layout with a `manifest.json` that older
    /// tools look for. Docker, Podman, containerd and Skopeo all load it.
    #[default]
    Docker,
    /// Only the OCI image layout.
    Oci,
}

/// Bytes of an archive that are kept in memory.
#[derive(Debug)]
struct Held {
    bytes: u64,
    limit: u64,
}

impl Held {
    fn new(limits: &Limits) -> Self {
        Self {
            bytes: 0,
            limit: limits.metadata_bytes,
        }
    }

    fn add(&mut self, bytes: usize) -> Result<(), ArchiveError> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        match self.bytes <= self.limit {
            true => Ok(()),
            false => Err(ArchiveError::Limit {
                what: "bytes of names, links, manifests and configurations",
                limit: self.limit,
            }),
        }
    }
}

/// Whether a configuration, with so many layers, is one of an image for this machine.
pub(crate) type CheckImage<'a> = dyn Fn(&[u8], usize) -> Result<(), ManifestError> + 'a;

/// An image found in an archive.
#[derive(Debug)]
pub(crate) struct ArchiveImage {
    /// Names that it has in the archive; not yet checked.
    pub(crate) names: Vec<String>,
    /// Its manifest, if the archive has one.
    pub(crate) manifest: Option<Vec<u8>>,
    pub(crate) config: Vec<u8>,
    /// Layers, base first.
    pub(crate) layers: Vec<Member>,
}

/// A file in an archive, and its digest if that is known beforehand.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    place: Place,
    pub(crate) size: u64,
    pub(crate) digest: Option<Digest>,
}

#[derive(Clone, Debug)]
enum Place {
    /// A blob of a layout directory.
    Blob(Digest),
    /// A range of the tar.
    Range(u64),
}

/// An archive or a layout directory.
#[derive(Debug)]
pub(crate) enum Archive {
    Directory(std::path::PathBuf),
    Tar { file: File, index: TarIndex },
}

impl Archive {
    /// Opens the archive at `path`; `scratch` is a directory for a temporary file.
    pub(crate) fn open(path: &Path, scratch: &Path, limits: &Limits) -> Result<Self, ArchiveError> {
        let fault = |source| ArchiveError::Open {
            path: path.to_owned(),
            source,
        };
        if std::fs::metadata(path).map_err(fault)?.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        Self::read(File::open(path).map_err(fault)?, scratch, limits)
    }

    /// Reads a tar. A file that cannot be read twice, such as a pipe, is copied to a temporary
    /// file.
    pub(crate) fn read(file: File, scratch: &Path, limits: &Limits) -> Result<Self, ArchiveError> {
        let (file, index) = TarIndex::read(file, scratch, limits)?;
        Ok(Self::Tar { file, index })
    }

    /// Returns all images in it. What `check` refuses, by its configuration and the number of its
    /// layers, may be left out.
    pub(crate) fn images(
        &self,
        limits: &Limits,
        check: &CheckImage<'_>,
    ) -> Result<Vec<ArchiveImage>, ArchiveError> {
        // Archives of newer versions of Docker are both; the layout has the digests.
        if self.member("index.json").is_some() {
            return oci::images(self, limits, check);
        }
        if self.member("manifest.json").is_some() {
            return docker::images(self, limits);
        }
        Err(ArchiveError::Unknown)
    }

    /// Reads a member from its start.
    pub(crate) fn reader(&self, member: &Member) -> io::Result<Box<dyn Read + '_>> {
        match (self, &member.place) {
            (Self::Directory(root), Place::Blob(digest)) => Ok(Box::new(
                File::open(blob_path(root, digest))?.take(member.size),
            )),
            (Self::Tar { file, .. }, Place::Range(start)) => {
                Ok(Box::new(index::Range::new(file, *start, member.size)))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn member(&self, name: &str) -> Option<Member> {
        match self {
            // In a directory, only these two are looked up by name.
            Self::Directory(root) => {
                let size = std::fs::metadata(root.join(name)).ok()?.len();
                Some(Member {
                    place: Place::Range(0),
                    size,
                    digest: None,
                })
            }
            Self::Tar { index, .. } => index.find(name.as_bytes()),
        }
    }

    fn blob(&self, digest: &Digest) -> Result<Member, ArchiveError> {
        let found = match self {
            Self::Directory(root) => std::fs::metadata(blob_path(root, digest))
                .ok()
                .map(|found| Member {
                    place: Place::Blob(*digest),
                    size: found.len(),
                    digest: None,
                }),
            Self::Tar { index, .. } => {
                index.find(format!("blobs/sha256/{}", digest.hex()).as_bytes())
            }
        };
        let found = found.ok_or_else(|| ArchiveError::Missing {
            name: digest.to_string(),
        })?;
        Ok(Member {
            digest: Some(*digest),
            ..found
        })
    }

    /// Reads all of a small file.
    fn document(&self, name: &str, member: &Member, limit: u64) -> Result<Vec<u8>, ArchiveError> {
        if member.size > limit {
            return Err(ArchiveError::TooLarge {
                name: name.to_owned(),
                size: member.size,
                limit,
            });
        }
        let fault = |source| ArchiveError::Read {
            name: name.to_owned(),
            source,
        };
        let mut bytes = Vec::new();
        match (self, &member.place) {
            (Self::Directory(root), Place::Range(_)) => File::open(root.join(name))
                .map_err(fault)?
                .take(limit)
                .read_to_end(&mut bytes),
            _ => self.reader(member).map_err(fault)?.read_to_end(&mut bytes),
        }
        .map_err(fault)?;
        match member.digest {
            Some(expected) if Digest::of(&bytes) != expected => Err(ArchiveError::Digest {
                expected,
                actual: Digest::of(&bytes),
            }),
            _ => Ok(bytes),
        }
    }
}

fn blob_path(root: &Path, digest: &Digest) -> std::path::PathBuf {
    root.join("blobs/sha256").join(digest.hex())
}
