//! Errors of policies, and the reasons for which they refuse an image.

use std::io;
use std::path::PathBuf;

use crate::Digest;

/// Why a signature policy or key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is larger than allowed for a policy or key.
    #[error("{} has more than {limit} bytes; it is no signature policy or public key", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The bound.
        limit: u64,
    },
    /// It is not the JSON described in containers-policy.json(5).
    #[error("the signature policy is not valid; containers-policy.json(5) describes its form")]
    Json(#[source] serde_json::Error),
    /// It is JSON, but its content is invalid.
    #[error("the signature policy is not valid: {0}")]
    Invalid(String),
    /// Not a public key, or of a kind that cannot sign images.
    #[error("{name} holds no public key that can be used; `cosign generate-key-pair` makes one")]
    Key {
        /// The file, or where in the policy the key is.
        name: String,
        /// The cause.
        #[source]
        source: KeyFault,
    },
}

/// What is wrong with a public key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFault {
    /// No `-----BEGIN PUBLIC KEY-----`, or nothing valid after it.
    #[error("it is no PEM file with one PUBLIC KEY")]
    Pem,
    /// Not base64.
    #[error("keyData is not valid base64")]
    Base64(#[source] base64::DecodeError),
    /// The key is of a kind that is not supported.
    #[error(
        "only ECDSA keys (P-256, P-384), Ed25519 and RSA keys (2048 to 8192 bits) are supported"
    )]
    Kind,
}

/// Why a policy refuses an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The policy rejects all images of that name.
    #[error("the signature policy refuses image {name}: it allows none of that name")]
    Rejected {
        /// The image.
        name: String,
    },
    /// The policy requires something that cannot be verified here.
    #[error(
        "the signature policy asks for {what} of image {name}, which cannot be verified here; use `sigstoreSigned` with a key"
    )]
    Unsupported {
        /// The image.
        name: String,
        /// What it requires.
        what: String,
    },
    /// No signature at all.
    #[error(
        "the signature policy refuses image {name}: it is not signed; sign it by `cosign sign --key`, or change the policy"
    )]
    Unsigned {
        /// The image.
        name: String,
    },
    /// Signatures, but none by a trusted key.
    #[error(
        "the signature policy refuses image {name}: it has {signatures} signatures, none of them valid and by a key that the policy trusts for it"
    )]
    Untrusted {
        /// The image.
        name: String,
        /// Number of signatures that were looked at.
        signatures: usize,
    },
    /// Signed by a trusted key, but under another name.
    #[error(
        "the signature policy refuses image {name}: it is signed as {signed}, and the policy wants {wanted}"
    )]
    Identity {
        /// The image.
        name: String,
        /// The name it was signed for.
        signed: String,
        /// Names that would be accepted.
        wanted: String,
    },
    /// An image that was stored without verification of its signatures.
    #[error(
        "the signature policy refuses image {id}: no signature of it was verified when it came; pull it again under this policy"
    )]
    Unverified {
        /// The image's id.
        id: Digest,
    },
}
