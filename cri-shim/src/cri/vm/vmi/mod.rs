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
//! | `sources` | a volume's place among the pod's mounts and devices, opened without trust |
//! | `disks` | the files of its disks |
//! | `seed` | what its cloud-init is told |
//!
//! The annotation, and what claims and images contain, are hostile: sizes and numbers are bounded,
//! links in claims are not followed.

mod disks;
mod seed;
mod sources;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::cri::error::{CriError, Result};
use crate::cri::vm_spec::{Vmi, VmiMachine};
pub(super) use disks::VmiDisks;
pub(super) use sources::{Sources, check_container};

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
