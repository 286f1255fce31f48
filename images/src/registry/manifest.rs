//! Manifests and indexes (OCI image-spec; Docker image manifest v2, schema 2).

use serde::Deserialize;

use crate::{Digest, Limits};

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// The value of the `Accept` header.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// Why a manifest or configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// It is not JSON of the expected form.
    #[error("the manifest is not valid")]
    Json(#[source] serde_json::Error),
    /// The configuration is not JSON of the expected form.
    #[error(
        "the image configuration is not valid; the reference may name an artifact that is no container image"
    )]
    Config(#[source] serde_json::Error),
    /// A kind of manifest that is not an image's.
    #[error("the manifest's type {0:?} is not a container image's")]
    Type(String),
    /// Docker's old format.
    #[error(
        "the manifest has schema version {0}; only version 2 is supported, so build or push the image anew"
    )]
    Schema(u64),
    /// No manifest for this machine.
    #[error("the image is not made for linux/amd64 but for {available}")]
    Platform {
        /// The platforms that it is available for.
        available: String,
    },
    /// Indexes within indexes.
    #[error("the index nests other indexes more than {limit} deep")]
    IndexDepth {
        /// The bound.
        limit: usize,
    },
    /// No layers, so that there is nothing to run.
    #[error("the image has no layers, so there is no root file system to boot from")]
    NoLayers,
    /// Too many layers.
    #[error("the image has {count} layers, more than {limit}")]
    TooManyLayers {
        /// Layers of the image.
        count: usize,
        /// The bound.
        limit: usize,
    },
    /// A layer that has to be fetched from elsewhere.
    #[error("layer {0} is foreign (to be fetched from other servers), which is refused")]
    ForeignLayer(Digest),
    /// A layer that is not a tar.
    #[error("layer {digest} has the type {media_type:?}, which is no file system layer")]
    LayerType {
        /// The layer.
        digest: Digest,
        /// Its type.
        media_type: String,
    },
    /// A size beyond the limit.
    #[error("{what} {digest} has {size} bytes, more than {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its digest.
        digest: Digest,
        /// Its size.
        size: u64,
        /// The bound.
        limit: u64,
    },
    /// Manifest and configuration disagree.
    #[error("the manifest has {layers} layers, but the configuration speaks of {diff_ids}")]
    LayerCount {
        /// In the manifest.
        layers: usize,
        /// In the configuration.
        diff_ids: usize,
    },
    /// A layer digest in the configuration is invalid.
    #[error("the configuration has an invalid layer digest")]
    DiffId(#[source] crate::DigestError),
}

impl ManifestError {
    /// Returns whether it is said of something else than an image for this machine, and not of an
    /// image that is refused.
    pub(crate) fn is_of_no_image(&self) -> bool {
        matches!(
            self,
            Self::Json(_)
                | Self::Config(_)
                | Self::Type(_)
                | Self::Schema(_)
                | Self::Platform { .. }
                | Self::NoLayers
                | Self::LayerType { .. }
        )
    }
}

/// A pointer to content.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    urls: Option<Vec<String>>,
    #[serde(default)]
    platform: Option<Platform>,
}

/// The platform that an index has for one of its entries.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    /// Of amd64: the level of the instruction set (x86-64 psABI) that the programs need.
    #[serde(default)]
    variant: String,
}

impl Platform {
    /// The level of x86-64 that a Linux image needs; `None` for other platforms and unknown levels.
    fn level(&self) -> Option<u8> {
        if self.os != "linux" || !is_amd64(&self.architecture) {
            return None;
        }
        match self.variant.as_str() {
            "" | "v1" => Some(1),
            "v2" => Some(2),
            "v3" => Some(3),
            "v4" => Some(4),
            _ => None,
        }
    }

    /// Its level of x86-64, if a CPU of `cpu_level` has it.
    fn level_for(&self, cpu_level: u8) -> Option<u8> {
        self.level().filter(|level| *level <= cpu_level)
    }

    /// For messages: `OS/ARCHITECTURE[/VARIANT]`, cut.
    fn shown(&self) -> String {
        let cut = |text: &String| text.chars().take(20).collect::<String>();
        let parts = [&self.os, &self.architecture, &self.variant].map(cut);
        parts.join("/").trim_end_matches('/').to_owned()
    }
}

/// How well an entry of an index fits this machine, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fitness {
    /// It is made for a level of x86-64 that the CPU has: the lowest one comes first, so that all
    /// machines have the same.
    Level(u8),
    /// It has no platform: it can only be the one manifest of a plain export.
    Bare,
}

impl Fitness {
    /// Tells it by what the index says of the entry.
    pub(crate) fn of(
        media_type: &str,
        artifact_type: Option<&str>,
        platform: Option<&Platform>,
    ) -> Result<Self, ManifestError> {
        // What lists artifacts may have the type of an image's configuration here.
        let artifact = artifact_type.filter(|kind| !kind.is_empty() && !is_config(kind));
        let other = (!media_type.is_empty() && !is_manifest(media_type)).then_some(media_type);
        if let Some(kind) = artifact.or(other) {
            return Err(ManifestError::Type(kind.chars().take(100).collect()));
        }
        let Some(platform) = platform else {
            return Ok(Self::Bare);
        };
        match platform.level_for(cpu_level()) {
            Some(level) => Ok(Self::Level(level)),
            None => Err(ManifestError::Platform {
                available: platform.shown(),
            }),
        }
    }
}

/// Whether an architecture is this machine's, by the names that tools have for it.
pub(crate) fn is_amd64(architecture: &str) -> bool {
    matches!(architecture, "amd64" | "x86_64" | "x86-64")
}

/// The level of x86-64 that this machine's CPU has (x86-64 psABI, section 3.1.1).
fn cpu_level() -> u8 {
    use std::is_x86_feature_detected as has;
    let v2 = has!("cmpxchg16b")
        && has!("popcnt")
        && has!("sse3")
        && has!("ssse3")
        && has!("sse4.1")
        && has!("sse4.2");
    let v3 = has!("avx")
        && has!("avx2")
        && has!("bmi1")
        && has!("bmi2")
        && has!("f16c")
        && has!("fma")
        && has!("lzcnt")
        && has!("movbe");
    let v4 = has!("avx512f")
        && has!("avx512bw")
        && has!("avx512cd")
        && has!("avx512dq")
        && has!("avx512vl");
    match (v2, v3, v4) {
        (false, ..) => 1,
        (_, false, _) => 2,
        (.., false) => 3,
        _ => 4,
    }
}

/// An image's manifest, checked.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// What a registry may return for a reference.
#[derive(Clone, Debug)]
pub(crate) enum Parsed {
    Image(Manifest),
    /// An index, and the entry for this machine in it.
    Index(Descriptor),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    schema_version: u64,
    media_type: Option<String>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

impl Parsed {
    /// Reads a manifest or index. `content_type` is the server's; it is used if the document does
    /// not tell its type.
    pub(crate) fn parse(
        bytes: &[u8],
        content_type: &str,
        limits: &Limits,
    ) -> Result<Self, ManifestError> {
        let raw: Raw = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        if raw.schema_version != 2 {
            return Err(ManifestError::Schema(raw.schema_version));
        }
        // A document without a type is classified by its members; a type in the document takes
        // precedence over the server's.
        let media_type = match &raw.media_type {
            Some(media_type) => media_type.as_str(),
            None if raw.manifests.is_some() && raw.layers.is_none() => OCI_INDEX,
            None if raw.layers.is_some() && raw.manifests.is_none() => OCI_MANIFEST,
            None => content_type,
        };
        match media_type {
            OCI_MANIFEST | DOCKER_MANIFEST => {
                let layers = raw.layers.unwrap_or_default();
                let config = raw
                    .config
                    .ok_or_else(|| ManifestError::Type(media_type.to_owned()))?;
                let manifest = Manifest {
                    media_type: media_type.to_owned(),
                    config,
                    layers,
                };
                manifest.check(limits).map(Self::Image)
            }
            OCI_INDEX | DOCKER_LIST => {
                let manifests = raw.manifests.unwrap_or_default();
                choose(&manifests, cpu_level()).map(Self::Index)
            }
            other => Err(ManifestError::Type(other.chars().take(100).collect())),
        }
    }
}

impl Manifest {
    fn check(self, limits: &Limits) -> Result<Self, ManifestError> {
        let count = self.layers.len();
        if count == 0 {
            return Err(ManifestError::NoLayers);
        }
        if count > limits.layers {
            return Err(ManifestError::TooManyLayers {
                count,
                limit: limits.layers,
            });
        }
        check_size("the configuration", &self.config, limits.config_bytes)?;
        for layer in &self.layers {
            let media_type = layer.media_type.as_str();
            let foreign = media_type.contains("foreign") || media_type.contains("nondistributable");
            if foreign || layer.urls.as_ref().is_some_and(|urls| !urls.is_empty()) {
                return Err(ManifestError::ForeignLayer(layer.digest));
            }
            if !is_layer(media_type) {
                let media_type = media_type.chars().take(100).collect();
                return Err(ManifestError::LayerType {
                    digest: layer.digest,
                    media_type,
                });
            }
            check_size("layer", layer, limits.layer_bytes)?;
        }
        Ok(self)
    }
}

fn check_size(
    what: &'static str,
    descriptor: &Descriptor,
    limit: u64,
) -> Result<(), ManifestError> {
    let Descriptor { digest, size, .. } = *descriptor;
    if size > limit {
        Err(ManifestError::TooLarge {
            what,
            digest,
            size,
            limit,
        })
    } else {
        Ok(())
    }
}

fn is_layer(media_type: &str) -> bool {
    [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
    ]
    .iter()
    .any(|known| {
        matches!(
            media_type.strip_prefix(known),
            Some("" | "+gzip" | "+zstd" | ".gzip" | ".zstd")
        )
    })
}

/// The entry for a CPU of a level of x86-64: the lowest one, so that all machines have the same.
fn choose(manifests: &[Descriptor], cpu_level: u8) -> Result<Descriptor, ManifestError> {
    let level = |descriptor: &Descriptor| descriptor.platform.as_ref()?.level_for(cpu_level);
    // A manifest without a platform can only be the one manifest of a plain export.
    let is_bare = |descriptor: &Descriptor| {
        descriptor.platform.is_none() && is_manifest(&descriptor.media_type)
    };
    let fitting = manifests.iter().filter(|found| level(found).is_some());
    let chosen = fitting.min_by_key(|descriptor| level(descriptor));
    let chosen = chosen.or_else(|| manifests.iter().find(|descriptor| is_bare(descriptor)));
    if let Some(descriptor) = chosen {
        return Ok(descriptor.clone());
    }
    let platforms = manifests.iter().filter_map(|found| found.platform.as_ref());
    let available: Vec<_> = platforms.take(16).map(Platform::shown).collect();
    let available = if available.is_empty() {
        "nothing".to_owned()
    } else {
        available.join(", ")
    };
    Err(ManifestError::Platform { available })
}

fn is_config(media_type: &str) -> bool {
    matches!(
        media_type,
        "application/vnd.oci.image.config.v1+json"
            | "application/vnd.docker.container.image.v1+json"
    )
}

fn is_manifest(media_type: &str) -> bool {
    matches!(
        media_type,
        OCI_MANIFEST | DOCKER_MANIFEST | OCI_INDEX | DOCKER_LIST
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parse(text: &str) -> Result<Parsed, ManifestError> {
        Parsed::parse(
            text.replace("DIGEST", DIGEST).as_bytes(),
            OCI_MANIFEST,
            &Limits::default(),
        )
    }

    fn image(layer: &str) -> String {
        format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"c","digest":"DIGEST","size":2}},"layers":[{layer}]}}"#
        )
    }

    #[test]
    fn manifests_without_a_type_are_told_by_their_members() {
        let layer = r#"{"mediaType":"application/vnd.oci.image.layer.v1.tar+zstd","digest":"DIGEST","size":9}"#;
        assert!(
            matches!(parse(&image(layer)), Ok(Parsed::Image(manifest)) if manifest.layers[0].size == 9)
        );
        let index = r#"{"schemaVersion":2,"manifests":[
            {"mediaType":"m","digest":"DIGEST","size":1,"platform":{"os":"linux","architecture":"arm64"}},
            {"mediaType":"m","digest":"DIGEST","size":2,"platform":{"os":"linux","architecture":"amd64"}}]}"#;
        assert!(matches!(parse(index), Ok(Parsed::Index(entry)) if entry.size == 2));
    }

    #[test]
    fn the_manifest_for_this_machine_comes_before_one_for_any() {
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[
            {{"mediaType":"{OCI_MANIFEST}","digest":"DIGEST","size":1}},
            {{"mediaType":"m","digest":"DIGEST","size":2,
                "platform":{{"os":"linux","architecture":"amd64"}}}}]}}"#
        );
        assert!(matches!(parse(&index), Ok(Parsed::Index(entry)) if entry.size == 2));
        let index = index.replace("amd64", "arm64");
        assert!(matches!(parse(&index), Ok(Parsed::Index(entry)) if entry.size == 1));
    }

    #[test]
    fn the_lowest_level_of_x86_64_is_chosen_and_what_the_cpu_lacks_is_refused() {
        let entries = |variants: &[&str]| -> Vec<Descriptor> {
            let entries = variants.iter().map(|variant| {
                let platform = serde_json::json!({
                    "os": "linux", "architecture": "amd64", "variant": variant,
                });
                let platform = Some(serde_json::from_value(platform).unwrap());
                Descriptor {
                    media_type: (*variant).to_owned(),
                    digest: DIGEST.parse().unwrap(),
                    size: 1,
                    urls: None,
                    platform,
                }
            });
            entries.collect()
        };
        for (variants, cpu, expected) in [
            (&["v3", ""][..], 4, ""),
            (&["", "v3"], 4, ""),
            (&["v4", "v3", "v2"], 3, "v2"),
            (&["v2", "v1"], 1, "v1"),
            (&["v3"], 3, "v3"),
        ] {
            let chosen = choose(&entries(variants), cpu).unwrap();
            assert_eq!(chosen.media_type, expected, "{variants:?}");
        }
        for (variants, cpu, named) in [
            (&["v3", "v4"][..], 2, "linux/amd64/v3, linux/amd64/v4"),
            (&["v9"], 4, "linux/amd64/v9"),
        ] {
            let refused = choose(&entries(variants), cpu).unwrap_err();
            let ManifestError::Platform { available } = refused else {
                panic!("{refused}");
            };
            assert_eq!(available, named);
        }
        assert!((1..=4).contains(&cpu_level()));
    }

    #[test]
    fn what_is_no_runnable_image_is_refused() {
        let none = image("");
        assert!(matches!(parse(&none), Err(ManifestError::NoLayers)));
        let foreign = image(
            r#"{"mediaType":"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip","digest":"DIGEST","size":9}"#,
        );
        assert!(matches!(
            parse(&foreign),
            Err(ManifestError::ForeignLayer(_))
        ));
        let urls = image(
            r#"{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"DIGEST","size":9,"urls":["http://10.0.0.1/"]}"#,
        );
        assert!(matches!(parse(&urls), Err(ManifestError::ForeignLayer(_))));
        let chart = image(
            r#"{"mediaType":"application/vnd.cncf.helm.chart.content.v1.tar+gzip","digest":"DIGEST","size":9}"#,
        );
        assert!(matches!(
            parse(&chart),
            Err(ManifestError::LayerType { .. })
        ));
        let huge = image(
            r#"{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"DIGEST","size":9999999999999}"#,
        );
        assert!(matches!(parse(&huge), Err(ManifestError::TooLarge { .. })));
        let arm = r#"{"schemaVersion":2,"manifests":[{"mediaType":"m","digest":"DIGEST","size":1,"platform":{"os":"linux","architecture":"arm64"}}]}"#;
        assert!(
            matches!(parse(arm), Err(ManifestError::Platform { available }) if available == "linux/arm64")
        );
        assert!(matches!(
            parse(r#"{"schemaVersion":1}"#),
            Err(ManifestError::Schema(1))
        ));
        assert!(matches!(parse("{"), Err(ManifestError::Json(_))));
    }
}
