//! Uploads: who may fill a claim from outside of the cluster, and the way there.
//!
//! A user asks the aggregated API for a token (`api`), and sends a disk with it to the proxy
//! (`proxy`), which passes the bytes on to the pod that writes the claim (`import`). The token is
//! good for one claim and for minutes. Between the proxy and the pod both sides show
//! certificates of the authority; docs/adr/0058-uploads.md says why.

pub(crate) mod proxy;

pub use proxy::{run, serve};

use serde::{Deserialize, Serialize};

use crate::token;

/// The group of UploadTokenRequests.
pub const GROUP: &str = "upload.cdi.kubevirt.io";

/// Its version.
pub const VERSION: &str = "v1beta1";

/// The kind's resource.
pub(crate) const RESOURCE: &str = "uploadtokenrequests";

/// The proxy's account, its Service, and the common name in its certificate.
pub const PROXY: &str = "podvisor-upload";

/// The port at which a claim's pod takes an upload.
pub(crate) const PORT: u16 = 8443;

/// Annotation of a claim: it waits for an upload.
pub(crate) const TARGET: &str = "cdi.kubevirt.io/storage.upload.target";

/// Annotation of a claim: whether the pod that takes its upload is ready.
pub(crate) const READY: &str = "cdi.kubevirt.io/storage.pod.ready";

/// Annotation of a claim: how far that pod is.
pub(crate) const PHASE: &str = "cdi.kubevirt.io/storage.pod.phase";

/// Annotation of a claim: that pod's name.
pub(crate) const POD: &str = "cdi.kubevirt.io/storage.uploadPodName";

/// Annotation of a claim: that pod's address.
pub(crate) const ADDRESS: &str = "podvisor.io/upload-address";

/// The name in the certificate of the pod that takes the upload of the claim with this unique id.
pub(crate) fn server_name(claim: &str) -> String {
    format!("{claim}.upload.podvisor.internal")
}

/// What the token of an upload is good for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The claim's namespace.
    #[serde(rename = "ns")]
    pub(crate) namespace: String,
    /// The claim's name.
    #[serde(rename = "sub")]
    pub(crate) name: String,
    /// The claim's unique id: another one of the same name is not meant.
    pub(crate) uid: String,
}

impl token::Grant for Grant {
    const OPERATION: &'static str = "Upload";
    const SECRET: &'static str = "podvisor-upload-tokens";
}

/// How a disk is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    /// It is the field `file` of a form.
    pub(crate) is_form: bool,
    /// The answer comes before the disk is written to its end.
    pub(crate) is_async: bool,
}

impl Way {
    /// The way that a path names.
    pub(crate) fn of(path: &str) -> Option<Self> {
        let rest = ["/v1beta1/", "/v1alpha1/"]
            .iter()
            .find_map(|prefix| path.strip_prefix(prefix))?;
        let (is_form, is_async) = match rest {
            "upload" => (false, false),
            "upload-async" => (false, true),
            "upload-form" => (true, false),
            "upload-form-async" => (true, true),
            _ => return None,
        };
        Some(Self { is_form, is_async })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_how_a_disk_is_sent() {
        let way = |path| Way::of(path).map(|way| (way.is_form, way.is_async));
        assert_eq!(way("/v1beta1/upload"), Some((false, false)));
        assert_eq!(way("/v1alpha1/upload-async"), Some((false, true)));
        assert_eq!(way("/v1beta1/upload-form"), Some((true, false)));
        assert_eq!(way("/v1beta1/upload-form-async"), Some((true, true)));
        for path in ["", "/upload", "/v1beta1/upload/", "/v1beta1/upload-archive"] {
            assert_eq!(way(path), None, "{path}");
        }
    }
}
