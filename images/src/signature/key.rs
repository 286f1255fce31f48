//! Public keys, and verification of signatures with them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{SignatureVerificationAlgorithm, SubjectPublicKeyInfoDer};
use webpki::{RawPublicKeyEntity, ring};

use super::error::KeyFault;
use crate::Digest;

/// Algorithms of signatures: cosign hashes with SHA-256 whatever the key, newer releases with
/// SHA-384 for P-384.
static ALGORITHMS: &[&dyn SignatureVerificationAlgorithm] = &[
    ring::ECDSA_P256_SHA256,
    ring::ECDSA_P384_SHA256,
    ring::ECDSA_P384_SHA384,
    ring::ED25519,
    ring::RSA_PKCS1_2048_8192_SHA256,
];

/// A public key that may sign images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    spki: SubjectPublicKeyInfoDer<'static>,
    fingerprint: Digest,
}

impl Key {
    /// Reads `-----BEGIN PUBLIC KEY-----`.
    pub(super) fn from_pem(pem: &[u8]) -> Result<Self, KeyFault> {
        let mut sections = SubjectPublicKeyInfoDer::pem_slice_iter(pem);
        let (Some(Ok(spki)), None) = (sections.next(), sections.next()) else {
            return Err(KeyFault::Pem);
        };
        let entity = RawPublicKeyEntity::try_from(&spki).map_err(|_| KeyFault::Kind)?;
        // The verification refuses an algorithm that does not fit the kind of key before it looks
        // at the signature.
        let is_of_use = ALGORITHMS.iter().any(|algorithm| {
            !matches!(
                entity.verify_signature(*algorithm, &[], &[]),
                Err(webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_))
            )
        });
        if !is_of_use {
            return Err(KeyFault::Kind);
        }
        let fingerprint = Digest::of(spki.as_ref());
        Ok(Self { spki, fingerprint })
    }

    /// Reads `keyData` of a policy: the PEM in base64.
    pub(super) fn from_base64(text: &str) -> Result<Self, KeyFault> {
        let pem = STANDARD.decode(text).map_err(KeyFault::Base64)?;
        Self::from_pem(&pem)
    }

    pub(super) fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// Returns whether `signature` is a signature of `message` by this key.
    pub(super) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let Ok(entity) = RawPublicKeyEntity::try_from(&self.spki) else {
            return false;
        };
        ALGORITHMS.iter().any(|algorithm| {
            entity
                .verify_signature(*algorithm, message, signature)
                .is_ok()
        })
    }
}
