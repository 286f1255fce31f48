//! Sigstore bundles (sigstore.dev/bundle, 0.3): a DSSE envelope around an in-toto statement whose
//! subject is a manifest.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::key::Key;
use crate::Digest;

const ENVELOPE: &str = "application/vnd.in-toto+json";
const STATEMENT: &str = "https://in-toto.io/Statement/v1";
/// The only predicate that is a signature. Others are attestations, which do not state that the
/// image may run.
const SIGNATURE: &str = "https://sigstore.dev/cosign/sign/v1";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    dsse_envelope: Envelope,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Deserialize)]
struct Signature {
    sig: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    predicate_type: String,
    subject: Vec<Subject>,
}

#[derive(Deserialize)]
struct Subject {
    digest: SubjectDigest,
}

#[derive(Deserialize)]
struct SubjectDigest {
    sha256: String,
}

/// Returns the key that signed a bundle and the manifest that it signed; the first key that
/// matches.
pub(super) fn verify<'a>(bundle: &[u8], keys: &[&'a Key]) -> Option<(&'a Key, Digest)> {
    let Bundle {
        dsse_envelope: envelope,
    } = serde_json::from_slice(bundle).ok()?;
    if envelope.payload_type != ENVELOPE {
        return None;
    }
    let payload = STANDARD.decode(&envelope.payload).ok()?;
    let signed = encoding(&envelope.payload_type, &payload);
    // Bundles have one signature; others in a DSSE envelope are for other keys.
    let signature = STANDARD.decode(&envelope.signatures.first()?.sig).ok()?;
    let key = keys
        .iter()
        .find(|key| key.has_signed(&signed, &signature))?;
    Some((key, subject(&payload)?))
}

/// Returns the signed bytes of an envelope (DSSE v1, pre-authentication encoding).
fn encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "DSSEv1 {} {payload_type} {} ",
        payload_type.len(),
        payload.len()
    )
    .into_bytes();
    bytes.extend_from_slice(payload);
    bytes
}

fn subject(payload: &[u8]) -> Option<Digest> {
    let statement: Statement = serde_json::from_slice(payload).ok()?;
    if statement.kind != STATEMENT || statement.predicate_type != SIGNATURE {
        return None;
    }
    match statement.subject.as_slice() {
        [subject] => Digest::from_hex(&subject.digest.sha256).ok(),
        _ => None,
    }
}
