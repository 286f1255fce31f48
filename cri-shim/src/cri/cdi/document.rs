//! The documents in files: their form, and what the CDI specification demands of it.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::names;

/// Versions of the CDI specification.
const VERSIONS: [&str; 10] = [
    "0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];

/// How a document is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Json,
    Yaml,
}

/// What is wrong with a document.
#[derive(Debug, thiserror::Error)]
pub(super) enum DocumentFault {
    #[error("it is not the JSON of a CDI specification")]
    Json(#[from] serde_json::Error),
    #[error("it is not the YAML of a CDI specification: {0}")]
    Yaml(String),
    #[error("cdiVersion {0:?} is not 0.1.0 to 1.1.0")]
    Version(String),
    #[error("kind {0:?} is not VENDOR/CLASS")]
    Kind(String),
    #[error("it has no devices")]
    NoDevices,
    #[error("the device name {0:?} is not made of letters, digits and, between them, `_-.:`")]
    Name(String),
    #[error("it has two devices {0:?}")]
    Twice(String),
    #[error("the device {0:?} has no containerEdits")]
    NoEdits(String),
    #[error("the variable {0:?} is not NAME=VALUE, or holds a NUL byte")]
    Variable(String),
}

/// A document.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Document {
    cdi_version: String,
    pub(super) kind: String,
    #[serde(rename = "annotations")]
    _annotations: Option<IgnoredAny>,
    pub(super) devices: Vec<Device>,
    /// For each container that has one of the devices.
    pub(super) container_edits: Option<Edits>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    pub(super) name: String,
    #[serde(rename = "annotations")]
    _annotations: Option<IgnoredAny>,
    pub(super) container_edits: Edits,
}

/// Changes of a container. What no virtual machine can have is not read, only seen.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Edits {
    pub(super) env: Option<Vec<String>>,
    pub(super) device_nodes: Option<Vec<DeviceNode>>,
    pub(super) net_devices: Option<Vec<IgnoredAny>>,
    pub(super) hooks: Option<Vec<IgnoredAny>>,
    pub(super) mounts: Option<Vec<Mount>>,
    pub(super) intel_rdt: Option<IgnoredAny>,
    pub(super) additional_gids: Option<Vec<u32>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct DeviceNode {
    /// In the container.
    pub(super) path: String,
    /// On the node; the same by default.
    pub(super) host_path: Option<String>,
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) major: Option<i64>,
    pub(super) minor: Option<i64>,
    pub(super) file_mode: Option<u32>,
    pub(super) permissions: Option<String>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) options: Option<Vec<String>>,
}

impl Document {
    /// Reads and checks a document.
    pub(super) fn parse(bytes: &[u8], format: Format) -> Result<Self, DocumentFault> {
        let document: Self = match format {
            Format::Json => serde_json::from_slice(bytes)?,
            Format::Yaml => {
                // As Go's library reads them: `0660` is octal.
                let options = serde_saphyr::options! { legacy_octal_numbers: true };
                let read = serde_saphyr::from_slice_with_options(bytes, options);
                read.map_err(|error| DocumentFault::Yaml(error.without_snippet().to_string()))?
            }
        };
        document.check()?;
        Ok(document)
    }

    fn check(&self) -> Result<(), DocumentFault> {
        let version = self.cdi_version.strip_prefix('v');
        let version = version.unwrap_or(&self.cdi_version);
        if !VERSIONS.contains(&version) {
            return Err(DocumentFault::Version(shown(&self.cdi_version)));
        }
        if !names::is_kind(&self.kind) {
            return Err(DocumentFault::Kind(shown(&self.kind)));
        }
        if self.devices.is_empty() {
            return Err(DocumentFault::NoDevices);
        }
        let mut known = BTreeSet::new();
        for device in &self.devices {
            let name = || shown(&device.name);
            if !names::is_device(&device.name) {
                return Err(DocumentFault::Name(name()));
            }
            if !known.insert(&device.name) {
                return Err(DocumentFault::Twice(name()));
            }
            if device.container_edits.is_empty() {
                return Err(DocumentFault::NoEdits(name()));
            }
        }
        let edits = self.devices.iter().map(|device| &device.container_edits);
        let edits = edits.chain(&self.container_edits);
        let mut variables = edits.flat_map(|edits| edits.env.iter().flatten());
        let is_wrong = |variable: &&String| {
            let name = variable.split_once('=').map_or("", |(name, _)| name);
            name.is_empty() || variable.contains('\0')
        };
        match variables.find(is_wrong) {
            Some(variable) => Err(DocumentFault::Variable(shown(variable))),
            None => Ok(()),
        }
    }
}

impl Edits {
    fn is_empty(&self) -> bool {
        fn no<T>(list: &Option<Vec<T>>) -> bool {
            list.as_ref().is_none_or(Vec::is_empty)
        }
        no(&self.env)
            && no(&self.device_nodes)
            && no(&self.net_devices)
            && no(&self.hooks)
            && no(&self.mounts)
            && no(&self.additional_gids)
            && self.intel_rdt.is_none()
    }
}

/// Returns a text of a document for a message.
fn shown(text: &str) -> String {
    text.chars().take(256).collect()
}
