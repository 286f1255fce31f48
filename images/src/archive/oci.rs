//! OCI image layouts (OCI image-spec, image-layout.md).

use std::collections::HashMap;

use serde::Deserialize;

use super::{Archive, ArchiveError, ArchiveImage, Held, Member};
use crate::registry::{Manifest, Parsed};
use crate::{Digest, Limits, ManifestError};

/// containerd's annotation for the full name of an image.
pub(super) const FULL_NAME: &str = "io.containerd.image.name";
/// The specification's annotation for the name, often only a tag.
pub(super) const REF_NAME: &str = "org.opencontainers.image.ref.name";

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    digest: Digest,
    #[serde(default)]
    annotations: HashMap<String, String>,
}

pub(super) fn images(
    archive: &Archive,
    limits: &Limits,
) -> Result<Vec<ArchiveImage>, ArchiveError> {
    let name = "index.json";
    let member = archive.member(name).ok_or(ArchiveError::Unknown)?;
    let document = archive.document(name, &member, limits.manifest_bytes)?;
    let index: Index =
        serde_json::from_slice(&document).map_err(|source| ArchiveError::Json { name, source })?;
    if index.manifests.is_empty() {
        return Err(ArchiveError::Missing {
            name: "every image: its index is empty".to_owned(),
        });
    }
    let mut found: Vec<ArchiveImage> = Vec::new();
    let mut held = Held::new(limits);
    let mut places: HashMap<Digest, usize> = HashMap::new();
    for entry in index.manifests.iter().take(limits.layers) {
        let full = entry.annotations.get(FULL_NAME);
        // A tag without a repository is not a name.
        let name = full.or(entry
            .annotations
            .get(REF_NAME)
            .filter(|name| name.contains([':', '/'])));
        // An image has an entry for each of its names.
        if let Some(place) = places.get(&entry.digest) {
            found[*place].names.extend(name.cloned());
            continue;
        }
        places.insert(entry.digest, found.len());
        let (bytes, manifest) = manifest(archive, entry.digest, limits)?;
        let mut layers = Vec::new();
        for layer in &manifest.layers {
            let member = archive.blob(&layer.digest)?;
            layers.push(member);
        }
        let config = archive.blob(&manifest.config.digest)?;
        let config = archive.document("the configuration", &config, limits.config_bytes)?;
        held.add(bytes.len() + config.len() + layers.len() * size_of::<Member>())?;
        found.push(ArchiveImage {
            names: name.into_iter().cloned().collect(),
            manifest: Some(bytes),
            config,
            layers,
        });
    }
    Ok(found)
}

fn manifest(
    archive: &Archive,
    mut digest: Digest,
    limits: &Limits,
) -> Result<(Vec<u8>, Manifest), ArchiveError> {
    for _ in 0..=limits.index_depth {
        let bytes = archive.document(
            "the manifest",
            &archive.blob(&digest)?,
            limits.manifest_bytes,
        )?;
        match Parsed::parse(&bytes, "", limits)? {
            Parsed::Image(manifest) => return Ok((bytes, manifest)),
            Parsed::Index(entry) => digest = entry.digest,
        }
    }
    Err(ManifestError::IndexDepth {
        limit: limits.index_depth,
    }
    .into())
}
