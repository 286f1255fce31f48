//! Claims that are filled.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use podvisor_cluster_types::datavolume::{DataVolumeSpec, GROUP, VERSION};
use serde::{Deserialize, Serialize};

use super::{Condition, condition, or_default};

/// Label of the pods of DataVolumes.
pub(crate) const CDI_COMPONENT_LABEL: &str = "cdi.kubevirt.io";

/// The value of [`CDI_COMPONENT_LABEL`] of importers; also the name of the pod's container.
pub(crate) const IMPORTER: &str = "importer";

/// A claim, and what it is filled with.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolume {
    /// `cdi.kubevirt.io/v1beta1`.
    #[serde(default)]
    pub api_version: String,
    /// The kind's name.
    #[serde(default)]
    pub kind: String,
    /// Name, labels, owners.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What the user asks for. One that cannot be read asks for nothing: it must not hide all
    /// others, which come by the same watch.
    #[serde(default, deserialize_with = "or_default")]
    pub spec: DataVolumeSpec,
    /// What was observed.
    #[serde(default, deserialize_with = "or_default")]
    pub status: DataVolumeStatus,
}

/// What was observed of a DataVolume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataVolumeStatus {
    /// The claim's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub claim_name: String,
    /// How far it is.
    #[serde(skip_serializing_if = "is_unset")]
    pub phase: DataVolumePhase,
    /// How much of the source has arrived, such as `12.34%`; or `N/A`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub progress: String,
    /// How often the import failed and began again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_count: Option<i32>,
    /// `Ready`, `Bound`, `Running`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

fn is_unset(phase: &DataVolumePhase) -> bool {
    *phase == DataVolumePhase::Unset
}

/// How far a DataVolume is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataVolumePhase {
    /// Nobody has looked at it.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// Its claim is not bound.
    Pending,
    /// Its claim is bound when a pod that uses it has a node.
    WaitForFirstConsumer,
    /// Its importer does not run yet.
    ImportScheduled,
    /// Its importer runs, or is to run again.
    ImportInProgress,
    /// The copy does not run yet, or cannot run.
    CloneScheduled,
    /// The copy runs, or is to run again.
    CloneInProgress,
    /// The claim's driver makes it of a snapshot.
    CloneFromSnapshotSourceInProgress,
    /// The pod that takes the upload does not run yet.
    UploadScheduled,
    /// The upload may come.
    UploadReady,
    /// Its claim is filled.
    Succeeded,
    /// Its claim will never be filled.
    Failed,
    /// A phase of others.
    #[serde(other)]
    Unknown,
}

/// What a DataVolume means for those who use its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum VolumeState {
    /// The claim can be used.
    Ready,
    /// Somebody must use the claim first.
    WaitsForConsumer,
    /// It is being filled.
    Filling,
    /// It is tried again to fill it.
    Retrying,
    /// It will never be filled.
    Failed,
}

impl DataVolume {
    /// Returns what it means for those who use its claim.
    #[must_use]
    pub fn state(&self) -> VolumeState {
        match self.status.phase {
            DataVolumePhase::Succeeded => VolumeState::Ready,
            DataVolumePhase::Failed => VolumeState::Failed,
            DataVolumePhase::WaitForFirstConsumer => VolumeState::WaitsForConsumer,
            _ => match condition(&self.status.conditions, "Running") {
                Some(running)
                    if running.status == "False"
                        && matches!(running.reason.as_str(), "Error" | "ImagePullFailed") =>
                {
                    VolumeState::Retrying
                }
                _ => VolumeState::Filling,
            },
        }
    }

    /// Returns the value of one of its annotations, named without `cdi.kubevirt.io/`.
    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        annotation(&self.metadata, name)
    }
}

/// Returns the value of an annotation, named without `cdi.kubevirt.io/`.
pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    let annotations = meta.annotations.as_ref()?;
    let value = annotations.get(&format!("{GROUP}/{name}"))?;
    Some(value.as_str())
}

impl kube::Resource for DataVolume {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        "DataVolume".into()
    }

    fn group(_: &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version(_: &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural(_: &()) -> Cow<'_, str> {
        "datavolumes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_malformed_object_and_a_phase_of_others_are_read() {
        let volume: DataVolume = serde_json::from_value(json!({
            "metadata": {"name": "a"}, "spec": {"source": 5}, "status": {"phase": "Paused"},
        }))
        .unwrap();
        assert_eq!(volume.spec, DataVolumeSpec::default());
        assert_eq!(volume.status.phase, DataVolumePhase::Unknown);
        assert_eq!(volume.state(), VolumeState::Filling);
    }

    #[test]
    fn who_uses_it_knows_whether_to_wait() {
        let state = |phase: &str, running: serde_json::Value| {
            let volume: DataVolume = serde_json::from_value(json!({
                "status": {"phase": phase, "conditions": [running]},
            }))
            .unwrap();
            volume.state()
        };
        let no = |reason: &str| json!({"type": "Running", "status": "False", "reason": reason});
        assert_eq!(state("Succeeded", no("Completed")), VolumeState::Ready);
        assert_eq!(state("Failed", no("Error")), VolumeState::Failed);
        assert_eq!(state("", no("")), VolumeState::Filling);
        assert_eq!(
            state("ImportInProgress", no("Error")),
            VolumeState::Retrying
        );
        assert_eq!(
            state("WaitForFirstConsumer", no("")),
            VolumeState::WaitsForConsumer
        );
    }
}
