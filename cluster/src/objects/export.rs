//! Exports of volumes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::export::{ExportSpec, GROUP, VERSIONS};
use serde::{Deserialize, Serialize};

use super::{Condition, or_default};

resource!(
    /// An export of a claim, or of those of a virtual machine or a snapshot.
    VirtualMachineExport,
    (GROUP, VERSIONS[0]),
    "virtualmachineexports",
    ExportSpec,
    ExportStatus
);

/// How far an export is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExportPhase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// Its volumes cannot be downloaded yet.
    Pending,
    /// Its volumes can be downloaded.
    Ready,
    /// Its pod has ended.
    Terminated,
    /// There is nothing to download.
    Skipped,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

impl ExportPhase {
    fn is_unset(&self) -> bool {
        *self == Self::Unset
    }
}

/// What was observed of an export.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExportStatus {
    /// How far it is.
    #[serde(skip_serializing_if = "ExportPhase::is_unset")]
    pub phase: ExportPhase,
    /// Where its volumes are downloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<ExportLinks>,
    /// The Secret with the token that it takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// When it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_expiration_time: Option<Time>,
    /// The Service by which it is reached.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_name: String,
    /// The virtual machine whose volumes they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_name: Option<String>,
    /// `Ready`, `PVCReady`, `VolumesCreated`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Where volumes are downloaded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExportLinks {
    /// From within the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal: Option<ExportLink>,
}

/// Where volumes are downloaded from one side.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExportLink {
    /// The authorities that the server is known by, as PEM.
    pub cert: String,
    /// The volumes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<ExportVolume>,
}

/// Where one volume is downloaded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExportVolume {
    /// The claim's name.
    pub name: String,
    /// Its forms.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<ExportFormat>,
}

/// One form of a volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExportFormat {
    /// `raw` or `gzip`.
    pub format: String,
    /// Where it is.
    pub url: String,
}
