//! Lookup of images by any of their names.

use oci_spec::image::{Arch, Os};

use super::Inner;
use super::database::{self, Contents, Name, Record};
use super::work::is_lost;
use crate::error::parse_reference;
use crate::registry::is_amd64;
use crate::{Digest, Error, Image, ImageConfiguration, Reference, Result, rfc3339};

/// Minimum number of digits of an id prefix that is accepted as a name.
const MIN_ID_PREFIX: usize = 4;

/// What a name refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// A name of the database.
    Name(String, Digest),
    /// An image by its id.
    Id(Digest),
}

impl Lookup {
    pub(super) fn id(&self) -> Digest {
        match self {
            Self::Name(_, id) | Self::Id(id) => *id,
        }
    }
}

pub(super) fn find(contents: &Contents, name: &str) -> Result<Lookup> {
    if let Ok(reference) = parse_reference(name) {
        let full = canonical(&reference);
        if let Some(found) = contents.names.iter().find(|known| known.name == full) {
            return Ok(Lookup::Name(full, found.id));
        }
    }
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    let is_prefix = (MIN_ID_PREFIX..=64).contains(&digits.len())
        && digits
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let mut fitting = contents
        .images
        .iter()
        .map(|(id, _)| *id)
        .filter(|id| is_prefix && id.hex().starts_with(digits));
    match (fitting.next(), fitting.count()) {
        (Some(id), 0) => Ok(Lookup::Id(id)),
        (Some(_), others) => Err(Error::Ambiguous {
            name: name.to_owned(),
            count: others + 1,
        }),
        (None, _) => Err(Error::NotFound {
            name: name.chars().take(300).collect(),
        }),
    }
}

/// Returns the name under which a reference is stored. If it has a tag and a digest, the digest
/// decides.
pub(super) fn canonical(reference: &crate::Reference) -> String {
    match reference.digest() {
        Some(digest) => format!(
            "{}/{}@{digest}",
            reference.registry(),
            reference.repository()
        ),
        None => reference.to_string(),
    }
}

/// Returns the names that an image gets: the requested one, and the repository with the digest;
/// both are the same if that one was requested.
pub(super) fn names_of(reference: &Reference, manifest: &Digest, id: Digest) -> [Name; 2] {
    let repository = format!("{}/{}", reference.registry(), reference.repository());
    let names = [canonical(reference), format!("{repository}@{manifest}")];
    names.map(|name| Name { name, id })
}

/// Reads an image's configuration. One that names no platform, as of images that are made without
/// a base, is for this machine's. What builders in Go write for empty lists and sets (`null`) is
/// read as such.
pub(super) fn configuration(bytes: &[u8]) -> serde_json::Result<ImageConfiguration> {
    if let Ok(config) = serde_json::from_slice::<ImageConfiguration>(bytes)
        && (config.os(), config.architecture()) == (&Os::Linux, &Arch::Amd64)
    {
        return Ok(config);
    }
    let mut config: serde_json::Value = serde_json::from_slice(bytes)?;
    if let Some(members) = config.as_object_mut() {
        let mut read_as = |key: &str, usual: &str, same: fn(&str) -> bool| {
            let member = members.entry(key).or_insert_with(|| "".into());
            if member.is_null()
                || member
                    .as_str()
                    .is_some_and(|text| text.is_empty() || same(text))
            {
                *member = usual.into();
            }
        };
        read_as("os", "linux", |_| false);
        read_as("architecture", "amd64", is_amd64);
    }
    if let Some(diff_ids) = config.pointer_mut("/rootfs/diff_ids")
        && diff_ids.is_null()
    {
        *diff_ids = serde_json::json!([]);
    }
    for set in ["/config/Volumes", "/config/ExposedPorts"] {
        let members = config.pointer_mut(set).and_then(|set| set.as_object_mut());
        for (_, member) in members.into_iter().flatten() {
            if member.is_null() {
                *member = serde_json::json!({});
            }
        }
    }
    serde_json::from_value(config)
}

impl Inner {
    /// Assembles what is known about an image.
    pub(super) fn image(&self, contents: &Contents, id: Digest, record: &Record) -> Result<Image> {
        let path = self.layout.blob(&id);
        let damaged = || Error::Damaged { id };
        let config = std::fs::read(&path).map_err(|source| match is_lost(&source) {
            true => damaged(),
            false => Error::io("read", &path, source),
        })?;
        let config = configuration(&config).map_err(|_| damaged())?;
        let metadata = self.whole_rootfs(&id)?.ok_or_else(damaged)?;
        let (digests, tags) = contents
            .names_of(&id)
            .map(str::to_owned)
            .partition(|name: &String| name.contains('@'));
        Ok(Image {
            id,
            manifest: record.manifest,
            tags,
            digests,
            size: std::os::unix::fs::MetadataExt::blocks(&metadata) * 512,
            pulled: database::time(record.pulled),
            used: database::time(record.used),
            created: config.created().as_deref().and_then(rfc3339::parse),
            pinned: record.pinned,
            disk: record.disk,
            rootfs: self.layout.rootfs(&id),
            config,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_builder_leaves_empty_is_read_as_nothing() {
        let nothing = configuration(
            br#"{
                "os": "", "architecture": null, "created": null, "history": null,
                "config": null,
                "rootfs": {"type": "layers", "diff_ids": null}
            }"#,
        )
        .unwrap();
        assert_eq!(nothing.os(), &Os::Linux);
        assert!(nothing.config().is_none() && nothing.rootfs().diff_ids().is_empty());
        let empty = configuration(
            br#"{
                "os": "linux", "architecture": "amd64",
                "config": {
                    "Entrypoint": null, "Cmd": null, "Env": null, "User": "", "WorkingDir": "",
                    "Volumes": {"/data": null}, "ExposedPorts": {"80/tcp": null},
                    "Labels": null, "StopSignal": "", "OnBuild": null, "Shell": null
                },
                "rootfs": {"type": "layers", "diff_ids": []}
            }"#,
        )
        .unwrap();
        let config = empty.config().clone().unwrap();
        assert_eq!(config.volumes().as_deref().unwrap(), ["/data"]);
        assert!(config.entrypoint().is_none() && config.env().is_none());
    }
}
