//! What the API and a node's part know of each other.

pub(crate) mod disks;
pub(crate) mod links;
pub(crate) mod migration;
pub(crate) mod size;

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The common name in the certificate of the API's servers, and the name of their Service.
pub const API: &str = "podvisor-api";

/// The common name in the certificate of the controller, which speaks to nodes about migrations.
pub(crate) const CONTROLLER: &str = "podvisor-controller";

/// The annotation of a Node by which its `podvisor-cluster node` is reached.
pub const ANNOTATION: &str = "podvisor.io/node";

/// How a node is reached: the content of its [`ANNOTATION`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Contact {
    /// The port, at the node's InternalIP.
    pub(crate) port: u16,
    /// The SHA-256 of its certificate.
    pub(crate) certificate: String,
}

/// The SHA-256 of a certificate, in hexadecimal digits.
pub(crate) fn digest(certificate: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(certificate) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_known_by_its_digest() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest(b""), empty);
    }
}
