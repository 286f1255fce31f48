//! OCI image layouts (OCI image-spec, image-layout.md).

use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use super::{Archive, ArchiveError, ArchiveImage, CheckImage, Held, Member};
use crate::registry::{Fitness, Manifest, Parsed, Platform};
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
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    media_type: String,
    #[serde(default)]
    artifact_type: Option<String>,
    digest: Digest,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: HashMap<String, String>,
}

impl Entry {
    fn name(&self) -> Option<&String> {
        let full = self.annotations.get(FULL_NAME);
        // A tag without a repository is not a name.
        let short = self.annotations.get(REF_NAME);
        full.or(short.filter(|name| name.contains([':', '/'])))
    }

    /// How well it fits this machine, by what the index says of it.
    fn fitness(&self) -> Result<Fitness, ManifestError> {
        Fitness::of(
            &self.media_type,
            self.artifact_type.as_deref(),
            self.platform.as_ref(),
        )
    }
}

/// Returns the images for this machine; of those with the same name, the one that a registry's
/// index would give. `check` tells by its configuration whether it is one. Other entries, such as
/// signatures, are left out, unless there is nothing else.
pub(super) fn images(
    archive: &Archive,
    limits: &Limits,
    check: &CheckImage<'_>,
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
    let entries = index.manifests.iter().take(limits.layers).enumerate();
    let mut fitting = Vec::new();
    let mut refused = Vec::new();
    for (place, entry) in entries {
        match entry.fitness() {
            Ok(fitness) => fitting.push((fitness, place, entry)),
            Err(error) => refused.push((place, error)),
        }
    }
    fitting.sort_by_key(|(fitness, place, _)| (*fitness, *place));
    let mut found: Vec<(usize, ArchiveImage)> = Vec::new();
    let mut held = Held::new(limits);
    let mut indices: HashMap<Digest, usize> = HashMap::new();
    let mut names: HashSet<&String> = HashSet::new();
    for (_, place, entry) in fitting {
        let name = entry.name();
        if name.is_some_and(|name| names.contains(name)) {
            continue;
        }
        // An image has an entry for each of its names.
        if let Some(index) = indices.get(&entry.digest) {
            found[*index].1.names.extend(name.cloned());
        } else {
            match image(archive, entry, limits, &mut held, check) {
                Ok(image) => {
                    indices.insert(entry.digest, found.len());
                    found.push((place, image));
                }
                Err(ArchiveError::Manifest(error)) if error.is_of_no_image() => {
                    refused.push((place, error));
                    continue;
                }
                Err(error) => return Err(error),
            }
        }
        names.extend(name);
    }
    refused.sort_by_key(|(place, _)| *place);
    for (place, error) in &refused {
        tracing::info!(entry = place, %error, "left out an entry of the index");
    }
    match refused.into_iter().next() {
        Some((_, error)) if found.is_empty() => return Err(error.into()),
        _ => {}
    }
    found.sort_by_key(|(place, _)| *place);
    Ok(found.into_iter().map(|(_, image)| image).collect())
}

fn image(
    archive: &Archive,
    entry: &Entry,
    limits: &Limits,
    held: &mut Held,
    check: &CheckImage<'_>,
) -> Result<ArchiveImage, ArchiveError> {
    let (bytes, manifest) = manifest(archive, entry.digest, limits)?;
    let config = archive.blob(&manifest.config.digest)?;
    let config = archive.document("the configuration", &config, limits.config_bytes)?;
    check(&config, manifest.layers.len())?;
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        let member = archive.blob(&layer.digest)?;
        layers.push(member);
    }
    held.add(bytes.len() + config.len() + layers.len() * size_of::<Member>())?;
    Ok(ArchiveImage {
        names: entry.name().into_iter().cloned().collect(),
        manifest: Some(bytes),
        config,
        layers,
    })
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
