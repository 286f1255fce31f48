//! Archives in the format of `docker save` and `skopeo copy docker-archive:`.

use serde::Deserialize;

use super::{Archive, ArchiveError, ArchiveImage, Held, Member};
use crate::{Limits, ManifestError};

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

pub(super) fn images(
    archive: &Archive,
    limits: &Limits,
) -> Result<Vec<ArchiveImage>, ArchiveError> {
    let name = "manifest.json";
    let member = archive.member(name).ok_or(ArchiveError::Unknown)?;
    let document = archive.document(name, &member, limits.manifest_bytes)?;
    let entries: Vec<Entry> =
        serde_json::from_slice(&document).map_err(|source| ArchiveError::Json { name, source })?;
    let mut found = Vec::new();
    let mut held = Held::new(limits);
    for entry in entries {
        let (count, limit) = (entry.layers.len(), limits.layers);
        if count == 0 {
            return Err(ManifestError::NoLayers.into());
        }
        if count > limit {
            return Err(ManifestError::TooManyLayers { count, limit }.into());
        }
        let missing = |name: &str| ArchiveError::Missing {
            name: name.chars().take(200).collect(),
        };
        let config = archive
            .member(&entry.config)
            .ok_or_else(|| missing(&entry.config))?;
        let config = archive.document("the configuration", &config, limits.config_bytes)?;
        held.add(config.len() + count * size_of::<Member>())?;
        let layers = entry
            .layers
            .iter()
            .map(|name| archive.member(name).ok_or_else(|| missing(name)));
        found.push(ArchiveImage {
            names: entry.repo_tags.unwrap_or_default(),
            manifest: None,
            config,
            layers: layers.collect::<Result<_, _>>()?,
        });
    }
    Ok(found)
}
