//! The object of KubeVirt's of which a pod was made, as its annotation has it.

use std::collections::HashMap;

use podvisor_cluster_types::meta::Meta;
use podvisor_cluster_types::vmi::VmiSpec;
use serde::Deserialize;

/// The annotation with the object of which the pod was made.
pub(in crate::cri) const ANNOTATION: &str = "podvisor.io/vmi";

/// Most bytes of it, which is what Kubernetes allows for all annotations of an object together.
pub(in crate::cri) const MAX_BYTES: usize = 256 << 10;

/// Most reasons for which one object is refused that are listed.
pub(super) const MAX_REASONS: usize = 16;

/// Why a pod cannot be the machine that its annotation describes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VmiError {
    /// The annotation is too long.
    #[error("the annotation {ANNOTATION} has {0} bytes: at most {MAX_BYTES} are read")]
    TooLong(usize),
    /// It is not an object.
    #[error(
        "failed to read the annotation {ANNOTATION} as a VirtualMachineInstance: {0}; it is \
         written by the cluster's controller, of the same version as this node"
    )]
    Malformed(String),
    /// Fields that this node cannot follow, each with its path.
    #[error("the VirtualMachineInstance cannot run here: {}", .0.join("; "))]
    Refused(Vec<String>),
}

impl VmiError {
    /// One field cannot be followed.
    pub(in crate::cri) fn field(path: &str, problem: impl std::fmt::Display) -> Self {
        let shown: String = format!("{path} {problem}").chars().take(1024).collect();
        Self::Refused(vec![shown])
    }
}

/// What is read of an object.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Vmi {
    /// Its name, namespace and unique id.
    pub(crate) metadata: Meta,
    /// What is to run.
    pub(crate) spec: VmiSpec,
}

impl Vmi {
    /// Returns the object of which a pod with these annotations was made; `None` if it was made of
    /// none.
    ///
    /// # Errors
    /// The annotation is too long, or not an object.
    pub(crate) fn of_annotations(
        annotations: &HashMap<String, String>,
    ) -> Result<Option<Self>, VmiError> {
        let Some(text) = annotations.get(ANNOTATION) else {
            return Ok(None);
        };
        if text.len() > MAX_BYTES {
            return Err(VmiError::TooLong(text.len()));
        }
        let read = serde_json::from_str(text);
        let vmi = read.map_err(|error| VmiError::Malformed(error.to_string()))?;
        Ok(Some(vmi))
    }
}
