//! Names for what DataVolumes are copies of.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::datavolume::{DataSourceSource, DataSourceSpec, GROUP, VERSION};
use serde::{Deserialize, Serialize};

use super::{Condition, or_default};

resource!(
    /// A name for a claim, or for a snapshot of one.
    DataSource,
    (GROUP, VERSION),
    "datasources",
    DataSourceSpec,
    DataSourceStatus
);

/// What was observed of a DataSource.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataSourceStatus {
    /// What it stood for then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<DataSourceSource>,
    /// `Ready`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}
