//! VirtualMachineInstances: pods that a cluster's controller made of KubeVirt's objects.
//!
//! Such a pod has the object's metadata and specification as JSON in the annotation
//! `podvisor.io/vmi` (docs/adr/0041-vmi-is-a-pod.md). It is read with the types and the rules of
//! the cluster's webhooks, and becomes a plain [`VmiMachine`]: its disks in the guest's order, each
//! with what it shows. Where that is on the node is said by the pod's own mounts and devices alone;
//! the annotation names no path of the node.
//!
//! | file | contents |
//! | --- | --- |
//! | `machine` | the machine that an annotation describes, and what this node cannot do of it |
//! | `sources` | a volume's place among the pod's mounts and devices, opened without trust |
//! | `disks` | the files of its disks |
//! | `seed` | what its cloud-init is told |
//!
//! The annotation, and what claims and images contain, are hostile: sizes and numbers are bounded,
//! links in claims are not followed.

mod disks;
mod machine;
mod seed;
mod sources;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use podvisor_cluster_types::meta::Meta;
use podvisor_cluster_types::vmi::VmiSpec;
use serde::Deserialize;

use crate::cri::error::{CriError, Result};
pub(super) use disks::VmiDisks;
pub(super) use machine::{MAX_SERIAL, VmiBoot, VmiMachine};
pub(crate) use sources::NodeFile;
pub(super) use sources::{Sources, check_container};

/// The annotation with the object of which the pod was made.
pub(super) const ANNOTATION: &str = "podvisor.io/vmi";

/// Most bytes of it, which is what Kubernetes allows for all annotations of an object together.
const MAX_BYTES: usize = 256 << 10;

/// Most reasons for which one object is refused that are listed.
const MAX_REASONS: usize = 16;

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
    pub(super) fn field(path: &str, problem: impl std::fmt::Display) -> Self {
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

impl VmiMachine {
    /// Returns the machine that a pod's annotations describe; `None` if they describe none.
    ///
    /// # Errors
    /// As [`Vmi::of_annotations`], and what this node cannot do.
    pub(super) fn of_annotations(annotations: &HashMap<String, String>) -> Result<Option<Self>> {
        let vmi = Vmi::of_annotations(annotations).map_err(CriError::Vmi)?;
        let machine = vmi.map(Self::of).transpose();
        machine.map_err(CriError::Vmi)
    }
}
