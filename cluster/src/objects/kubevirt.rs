//! What an administrator decides for the whole cluster.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::kubevirt::KubeVirtSpec;
use serde::{Deserialize, Serialize};

use super::{Condition, GROUP, VERSION, or_default};

resource!(
    /// What an administrator decides for the whole cluster, in the components' namespace.
    KubeVirt,
    (GROUP, VERSION),
    "kubevirts",
    KubeVirtSpec,
    KubeVirtStatus
);

/// How the components are.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeVirtStatus {
    /// `Deploying`, or `Deployed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// `Available`, `Progressing` and `Degraded`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The version of the components.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_kube_virt_version: Option<String>,
    /// The version that they are brought to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_kube_virt_version: Option<String>,
    /// The version of what brings them there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator_version: Option<String>,
    /// The architecture of guests that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_architecture: Option<String>,
    /// The generation of the specification that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
