//! The "simple signing" payload (containers/image, atomic-signature(5), of which cosign took the
//! form): JSON that names a manifest's digest and the name that it was signed for.

use serde::Deserialize;

use crate::Digest;

/// The type of all signatures of images.
const TYPE: &str = "cosign container image signature";

#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    #[serde(rename = "type")]
    kind: String,
    image: Image,
    identity: Identity,
}

#[derive(Deserialize)]
struct Image {
    #[serde(rename = "docker-manifest-digest")]
    digest: Digest,
}

#[derive(Deserialize)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

/// Returns the manifest and the name that a payload, which must have been verified, was created
/// for.
pub(super) fn read(payload: &[u8]) -> Option<(Digest, String)> {
    let Critical {
        kind,
        image,
        identity,
    } = serde_json::from_slice::<Payload>(payload).ok()?.critical;
    (kind == TYPE).then_some((image.digest, identity.reference))
}
