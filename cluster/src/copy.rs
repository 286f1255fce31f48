//! Copies of claims of other namespaces: who may make them, and how a disk is sent.
//!
//! A claim cannot be mounted in another namespace. So a pod beside the source reads it and sends
//! its data (`send`) to the importer beside the copy, which takes them as it takes an
//! upload (`import`). Whether somebody may have a copy is asked when the DataVolume is created:
//! the webhook signs an annotation (`admission`), without which the controller makes none.
//! docs/adr/0060-copies-across-namespaces.md says why.

mod send;

pub use podvisor_disk_streams::blocks::StreamError;
pub use send::{Options, SendError, run};

use serde::{Deserialize, Serialize};

use crate::token;

/// Annotation of a DataVolume: the token.
pub const TOKEN: &str = "cdi.kubevirt.io/storage.clone.token";

/// Annotation of a DataVolume that the controller makes: the service account on whose behalf.
pub(crate) const ACCOUNT: &str = "podvisor.io/clone-account";

/// The account of pods that name none.
pub(crate) const DEFAULT_ACCOUNT: &str = "default";

/// The path at which an importer takes a copy.
pub(crate) const PATH: &str = "/v1/copy";

/// The common name in the certificate of the pod that sends the data for the claim with this
/// unique id.
pub(crate) fn sender_name(claim: &str) -> String {
    format!("{claim}.copy.podvisor.internal")
}

/// What the token of a copy is good for: a DataVolume that was created when it was signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The DataVolume's namespace.
    #[serde(rename = "ns")]
    pub(crate) namespace: String,
    /// The DataVolume's name.
    #[serde(rename = "sub")]
    pub(crate) name: String,
    /// The source's namespace.
    #[serde(rename = "srcNs")]
    pub(crate) source_namespace: String,
    /// The source's kind.
    #[serde(rename = "srcKind")]
    pub(crate) source_kind: String,
    /// The source's name.
    #[serde(rename = "src")]
    pub(crate) source_name: String,
}

impl token::Grant for Grant {
    const OPERATION: &'static str = "Clone";
    const SECRET: &'static str = "podvisor-clone-tokens";
}
