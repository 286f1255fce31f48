//! Writing images to a tar as an OCI image layout, for Docker with the files that `docker load`
//! looks for in addition.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

use super::oci::{FULL_NAME, REF_NAME};
use super::{ArchiveError, ArchiveFormat};
use crate::registry::Manifest;
use crate::{Cancel, Digest, Error, Result};

const CHUNK: usize = 256 << 10;
/// Bytes of a tar's header, and the unit of its padding.
const RECORD: usize = 512;

/// An image to be written.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) id: Digest,
    /// Full names with tags.
    pub(crate) tags: Vec<String>,
    pub(crate) digest: Digest,
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
}

/// A blob to be written, and the image that needs it.
struct Blob {
    digest: Digest,
    size: u64,
    image: Digest,
}

/// Writes `images` to `out`, with their blobs as returned by `open`.
pub(crate) fn write(
    images: &[Saved],
    format: ArchiveFormat,
    open: impl Fn(&Digest) -> Result<File>,
    out: impl Write,
    cancel: &Cancel,
) -> Result<()> {
    let mut out = BufWriter::with_capacity(CHUNK, out);
    for directory in ["blobs/", "blobs/sha256/"] {
        entry(&mut out, EntryType::Directory, directory, 0)?;
    }
    let layout = json!({"imageLayoutVersion": "1.0.0"});
    document(&mut out, "oci-layout", &layout)?;
    document(&mut out, "index.json", &index(images))?;
    if format == ArchiveFormat::Docker {
        document(&mut out, "manifest.json", &docker_manifest(images))?;
    }
    let mut buffer = vec![0; CHUNK];
    for blob in blobs(images) {
        entry(&mut out, EntryType::Regular, &path(&blob.digest), blob.size)?;
        let mut file = open(&blob.digest)?.take(blob.size);
        let mut hasher = Sha256::new();
        let mut left = blob.size;
        loop {
            cancel.check()?;
            let got = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    let name = blob.digest.to_string();
                    return Err(ArchiveError::Read { name, source }.into());
                }
            };
            hasher.update(&buffer[..got]);
            out.write_all(&buffer[..got]).map_err(failed)?;
            left -= got as u64;
        }
        if left > 0 || Digest::finish(hasher) != blob.digest {
            return Err(Error::Damaged { id: blob.image });
        }
        pad(&mut out, blob.size)?;
    }
    // Two records of zeros mark the end.
    out.write_all(&[0; 2 * RECORD])
        .and_then(|()| out.flush())
        .map_err(failed)
}

fn failed(source: io::Error) -> Error {
    ArchiveError::Write { source }.into()
}

fn path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Writes a header that is always the same: without owner and time.
fn entry(out: &mut impl Write, kind: EntryType, name: &str, size: u64) -> Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_path(name).map_err(failed)?;
    header.set_mode(if kind.is_dir() { 0o755 } else { 0o644 });
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    out.write_all(header.as_bytes()).map_err(failed)
}

fn pad(out: &mut impl Write, size: u64) -> Result<()> {
    let rest = size.wrapping_neg() % RECORD as u64;
    out.write_all(&[0; RECORD][..rest as usize]).map_err(failed)
}

fn document(out: &mut impl Write, name: &str, document: &Value) -> Result<()> {
    let bytes = document.to_string().into_bytes();
    let size = bytes.len() as u64;
    entry(out, EntryType::Regular, name, size)?;
    out.write_all(&bytes).map_err(failed)?;
    pad(out, size)
}

/// Returns all blobs, each once: manifests and configurations first.
fn blobs(images: &[Saved]) -> Vec<Blob> {
    let documents = images.iter().flat_map(|image| {
        let manifest = (image.digest, image.bytes.len() as u64);
        let config = (image.id, image.manifest.config.size);
        [manifest, config].map(|(digest, size)| (digest, size, image.id))
    });
    let layers = images.iter().flat_map(|image| {
        let layers = image.manifest.layers.iter();
        layers.map(|layer| (layer.digest, layer.size, image.id))
    });
    let mut seen = HashSet::new();
    documents
        .chain(layers)
        .filter(|(digest, ..)| seen.insert(*digest))
        .map(|(digest, size, image)| Blob {
            digest,
            size,
            image,
        })
        .collect()
}

/// Creates the index, with an entry for each name because other tools look images up by it.
fn index(images: &[Saved]) -> Value {
    let mut manifests = Vec::new();
    for image in images {
        let descriptor = json!({
            "mediaType": image.manifest.media_type,
            "digest": image.digest,
            "size": image.bytes.len(),
            "platform": {"architecture": "amd64", "os": "linux"},
        });
        for tag in &image.tags {
            let mut named = descriptor.clone();
            named["annotations"] = json!({FULL_NAME: tag, REF_NAME: tag});
            manifests.push(named);
        }
        if image.tags.is_empty() {
            manifests.push(descriptor);
        }
    }
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    })
}

fn docker_manifest(images: &[Saved]) -> Value {
    let entry = |image: &Saved| {
        let layers = image.manifest.layers.iter();
        json!({
            "Config": path(&image.id),
            "RepoTags": (!image.tags.is_empty()).then_some(&image.tags),
            "Layers": layers.map(|layer| path(&layer.digest)).collect::<Vec<_>>(),
        })
    };
    images.iter().map(entry).collect()
}
