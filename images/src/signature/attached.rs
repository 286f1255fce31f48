//! How registries store the signatures of a manifest, and their content.
//!
//! - cosign's tag: `sha256-<hex>.sig` names a manifest of which each layer is a payload, its
//!   signature in an annotation.
//! - OCI 1.1 referrers: an index of the artifacts that refer to the manifest; a bundle is an
//!   artifact of one layer.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::claim::Claim;
use super::key::Key;
use super::{bundle, simple};
use crate::Digest;
use crate::registry::Descriptor;

const SIMPLE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// Prefix of the media types of bundles: version 0.3 and its compatible successors.
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle";

/// Maximum number of signatures of one manifest that are looked at, of each form.
const MAX_SIGNATURES: usize = 32;
/// Bytes of a payload.
const MAX_PAYLOAD_SIZE: u64 = 64 << 10;
/// Bytes of a bundle, which may hold certificates and log entries.
const BUNDLE_BYTES: u64 = 1 << 20;

/// How a signature is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Simple,
    Bundle,
}

/// Returns the tag of the signatures of a manifest, or of its referrers if the registry has no list
/// of them.
pub(crate) fn tag_of(manifest: &Digest, form: Form) -> String {
    match form {
        Form::Simple => format!("sha256-{}.sig", manifest.hex()),
        Form::Bundle => format!("sha256-{}", manifest.hex()),
    }
}

/// Where to fetch a signature.
#[derive(Clone, Debug)]
pub(crate) struct Pointer {
    pub(crate) blob: Descriptor,
    /// Maximum number of bytes.
    pub(crate) limit: u64,
    signature: Option<String>,
}

impl Pointer {
    /// Adds the content that it points to.
    pub(crate) fn with(self, content: Vec<u8>) -> Attached {
        Attached {
            content,
            signature: self.signature,
        }
    }
}

/// A signature as received from a registry, not verified.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    /// The payload, or the bundle.
    content: Vec<u8>,
    /// Of a payload: the signature, in base64.
    signature: Option<String>,
}

impl Attached {
    #[cfg(test)]
    pub(super) fn content(&self) -> &[u8] {
        &self.content
    }

    /// Replaces the content, under the same signature.
    #[cfg(test)]
    pub(super) fn with_content(mut self, content: Vec<u8>) -> Self {
        self.content = content;
        self
    }

    /// Returns the claim of the signature if it is valid and made by one of `keys`.
    pub(super) fn verify(&self, keys: &[&Key]) -> Option<Claim> {
        let Some(signature) = &self.signature else {
            let (key, manifest) = bundle::verify(&self.content, keys)?;
            return Some(Claim {
                key: key.fingerprint(),
                manifest,
                reference: None,
            });
        };
        let signature = STANDARD.decode(signature).ok()?;
        let key = keys
            .iter()
            .find(|key| key.has_signed(&self.content, &signature))?;
        let (manifest, reference) = simple::read(&self.content)?;
        Some(Claim {
            key: key.fingerprint(),
            manifest,
            reference: Some(reference),
        })
    }
}

#[derive(Deserialize)]
struct Manifest {
    #[serde(default)]
    layers: Vec<Entry>,
    #[serde(default)]
    manifests: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(flatten)]
    descriptor: Descriptor,
    #[serde(default)]
    artifact_type: String,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// Returns the signatures in the manifest of cosign's tag. Everything else is skipped.
pub(crate) fn simple_of(manifest: &[u8]) -> Vec<Pointer> {
    let layers = read(manifest).map_or_else(Vec::new, |manifest| manifest.layers);
    let signature = |layer: Entry| {
        (layer.descriptor.media_type == SIMPLE && layer.descriptor.size <= MAX_PAYLOAD_SIZE)
            .then(|| layer.annotations?.remove(SIGNATURE))
            .flatten()
            .map(|signature| Pointer {
                blob: layer.descriptor,
                limit: MAX_PAYLOAD_SIZE,
                signature: Some(signature),
            })
    };
    layers
        .into_iter()
        .filter_map(signature)
        .take(MAX_SIGNATURES)
        .collect()
}

/// Returns the manifests of bundles in an index of referrers.
pub(crate) fn bundles_of(index: &[u8]) -> Vec<Digest> {
    let manifests = read(index).map_or_else(Vec::new, |index| index.manifests);
    manifests
        .into_iter()
        .filter(|entry| entry.artifact_type.starts_with(BUNDLE))
        .map(|entry| entry.descriptor.digest)
        .take(MAX_SIGNATURES)
        .collect()
}

/// Returns the bundle of an artifact's manifest.
pub(crate) fn bundle_of(manifest: &[u8]) -> Option<Pointer> {
    let layer = read(manifest)?.layers.into_iter().next()?.descriptor;
    (layer.media_type.starts_with(BUNDLE) && layer.size <= BUNDLE_BYTES).then_some(Pointer {
        blob: layer,
        limit: BUNDLE_BYTES,
        signature: None,
    })
}

fn read(document: &[u8]) -> Option<Manifest> {
    serde_json::from_slice(document).ok()
}
