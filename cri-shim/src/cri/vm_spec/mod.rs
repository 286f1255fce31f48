//! What a pod that is a virtual machine asks for: its annotations, read.
//!
//! Virtlet's annotations become a [`VmSpec`]; KubeVirt's object, which a cluster's controller put
//! into one annotation, becomes a [`VmiMachine`] in the guest's terms. These are functions of the
//! annotations alone: nothing here knows the node, its files, or the pod's other fields.

mod annotations;
mod disks;
mod machine;
mod spec;
mod vmi;

pub(crate) use annotations::AnnotationErrors;
pub(super) use annotations::{FIRMWARE, GUEST_AGENT};
pub(super) use machine::{
    DiskSource, MAX_SERIAL, MAX_TAG, SeedText, VmiBoot, VmiCard, VmiDisk, VmiMachine, VmiSeed,
};
pub(crate) use spec::Booter;
pub(super) use spec::{MEMORY_UNIT, VmSpec};
#[cfg(test)]
pub(super) use vmi::MAX_BYTES as MAX_VMI_BYTES;
pub(crate) use vmi::VmiError;
pub(super) use vmi::{ANNOTATION as VMI, Vmi};
