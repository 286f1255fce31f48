//! What a signature states, after it was verified with a trusted key.

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The content of one signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Fingerprint of the key that signed: the SHA-256 of its `SubjectPublicKeyInfo` in DER.
    pub(crate) key: Digest,
    /// The manifest or index that was signed.
    pub(crate) manifest: Digest,
    /// The name that it was signed for; `None` for a bundle.
    #[serde(default)]
    pub(crate) reference: Option<String>,
}
