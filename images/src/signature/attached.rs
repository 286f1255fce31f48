//! How registries keep the signatures of a manifest, and what is in them.
//!
//! - cosign's tag: `sha256-<hex>.sig` names a manifest of which each layer is a payload, its
//!   signature in an annotation.
//! - OCI 1.1 referrers: an index of what refers to the manifest; a bundle is an artifact of one
//!   layer.

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
/// Bundles of version 0.3 and what comes after it without breaking it.
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle";

/// Signatures of one manifest that are looked at, of each form.
const MAX_SIGNATURES: usize = 32;
/// Bytes of a payload.
const MAX_PAYLOAD_SIZE: u64 = 64 << 10;
/// Bytes of a bundle, which may hold certificates and log entries.
const BUNDLE_BYTES: u64 = 1 << 20;

/// How a signature is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Simple,
    Bundle,
}

/// The tag under which signatures of a manifest are found, or its referrers where the registry has
/// no list of them.
pub(crate) fn tag_of(manifest: &Digest, form: Form) -> String {
    match form {
        Form::Simple => format!("sha256-{}.sig", manifest.hex()),
        Form::Bundle => format!("sha256-{}", manifest.hex()),
    }
}

/// Where a signature is to be fetched.
#[derive(Clone, Debug)]
pub(crate) struct Pointer {
    pub(crate) blob: Descriptor,
    /// Most bytes that it may have.
    pub(crate) limit: u64,
    signature: Option<String>,
}

impl Pointer {
    /// With the content that it points to.
    pub(crate) fn with(self, content: Vec<u8>) -> Attached {
        Attached {
            content,
            signature: self.signature,
        }
    }
}

/// A signature as a registry gave it: anything.
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

    /// Another content under the same signature.
    #[cfg(test)]
    pub(super) fn with_content(mut self, content: Vec<u8>) -> Self {
        self.content = content;
        self
    }

    /// What the signature says, if it is sound and by one of `keys`.
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

/// The signatures in the manifest of cosign's tag. What is no signature is passed over.
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

/// The manifests of bundles in an index of referrers.
pub(crate) fn bundles_of(index: &[u8]) -> Vec<Digest> {
    let manifests = read(index).map_or_else(Vec::new, |index| index.manifests);
    manifests
        .into_iter()
        .filter(|entry| entry.artifact_type.starts_with(BUNDLE))
        .map(|entry| entry.descriptor.digest)
        .take(MAX_SIGNATURES)
        .collect()
}

/// The bundle of an artifact's manifest.
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
