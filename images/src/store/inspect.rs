//! Details of one image.

use std::fs;
use std::time::SystemTime;

use super::database;
use super::lookup::find;
use super::{Inner, Store};
use crate::{Digest, Error, Image, ImageConfiguration, Result, rfc3339};

/// An image with the details that only an inspection needs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ImageDetails {
    /// The image.
    pub image: Image,
    /// Its configuration as received: JSON, of which [`Image::config`] has the fields that the OCI
    /// specification names.
    pub config: Vec<u8>,
    /// Its layers, base first.
    pub layers: Vec<Layer>,
    /// How it was created, oldest step first.
    pub history: Vec<HistoryEntry>,
}

/// A layer of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layer {
    /// Digest of the layer as received, possibly compressed.
    pub digest: Digest,
    /// Digest of its tar.
    pub diff_id: Digest,
    /// Bytes as received.
    pub size: u64,
    /// Media type in the manifest.
    pub media_type: String,
}

/// A step in the creation of an image, as claimed by its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryEntry {
    /// When.
    pub created: Option<SystemTime>,
    /// The command.
    pub created_by: Option<String>,
    /// A remark.
    pub comment: Option<String>,
    /// The layer that the step created, as an index into [`ImageDetails::layers`]; `None` if it
    /// created none.
    pub layer: Option<usize>,
}

impl Store {
    /// Finds an image as [`Store::resolve`] does and returns all its details.
    ///
    /// # Errors
    /// As [`Store::resolve`]; [`Error::Damaged`] also if the manifest is.
    pub fn inspect(&self, name: &str) -> Result<ImageDetails> {
        self.inner.inspect(name)
    }
}

impl Inner {
    fn inspect(&self, name: &str) -> Result<ImageDetails> {
        let contents = database::read(&self.layout)?;
        let id = find(&contents, name)?.id();
        let damaged = || Error::Damaged { id };
        let record = contents.record(&id).ok_or_else(damaged)?;
        let image = self.image(&contents, id, record)?;
        let (_, _, manifest) = self.manifest(&contents, id)?;
        let config = fs::read(self.layout.blob(&id)).map_err(|_| damaged())?;
        let diff_ids = image.config.rootfs().diff_ids().iter();
        let layers = manifest.layers.into_iter().zip(diff_ids);
        let layers = layers.map(|(layer, diff_id)| {
            Ok(Layer {
                digest: layer.digest,
                diff_id: diff_id.parse().map_err(|_| damaged())?,
                size: layer.size,
                media_type: layer.media_type,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok(ImageDetails {
            history: history(&image.config, layers.len()),
            image,
            config,
            layers,
        })
    }
}

/// Matches the configuration's steps with the layers. A configuration need not have steps for all
/// of them.
fn history(config: &ImageConfiguration, layers: usize) -> Vec<HistoryEntry> {
    let mut next = 0..layers;
    let steps = config.history().iter().flatten();
    let mut entries: Vec<_> = steps
        .map(|step| HistoryEntry {
            created: step.created().as_deref().and_then(rfc3339::parse),
            created_by: step.created_by().clone(),
            comment: step.comment().clone(),
            layer: match step.empty_layer() {
                Some(true) => None,
                _ => next.next(),
            },
        })
        .collect();
    entries.extend(next.map(|layer| HistoryEntry {
        layer: Some(layer),
        ..HistoryEntry::default()
    }));
    entries
}

#[cfg(test)]
mod tests {
    fn steps(history: serde_json::Value, layers: usize) -> Vec<Option<usize>> {
        let config = serde_json::json!({
            "os": "linux",
            "architecture": "amd64",
            "rootfs": {"type": "layers", "diff_ids": []},
            "history": history,
        });
        let config = serde_json::from_value(config).unwrap();
        let steps = super::history(&config, layers);
        steps.iter().map(|step| step.layer).collect()
    }

    #[test]
    fn steps_get_the_layers_that_they_made_and_none_is_left_out() {
        let some = serde_json::json!([{}, {"empty_layer": true}, {"empty_layer": false}]);
        assert_eq!(steps(some.clone(), 2), [Some(0), None, Some(1)]);
        assert_eq!(steps(some.clone(), 1), [Some(0), None, None]);
        assert_eq!(steps(some, 4), [Some(0), None, Some(1), Some(2), Some(3)]);
        assert_eq!(steps(serde_json::json!(null), 1), [Some(0)]);
    }
}
