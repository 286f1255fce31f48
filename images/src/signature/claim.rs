//! What a signature says, once it is known to be by a trusted key.

use serde::{Deserialize, Serialize};

use crate::Digest;

/// One signature's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Fingerprint of the key that signed: the SHA-256 of its `SubjectPublicKeyInfo` in DER.
    pub(crate) key: Digest,
    /// The manifest or index that was signed.
    pub(crate) manifest: Digest,
    /// The name that it was signed for; a bundle has none.
    #[serde(default)]
    pub(crate) reference: Option<String>,
}
