//! Pods whose one container is a virtual machine with an operating system of its own.
//!
//! Such a pod has the runtime handler `podvisor-vm` or Virtlet's annotation. Its sandbox is a
//! process without a machine; CreateContainer makes the disks, and StartContainer boots them. The
//! container is the machine from then on: its log is the serial console, its exit the machine's.
//! What the pod's annotations say becomes a [`VmSpec`], a plain type that another source may
//! make, too. docs/vm-pods.md describes all of it for users.
//!
//! | file | contents |
//! | --- | --- |
//! | `annotations` | Virtlet's annotations, all of their errors at once |
//! | `spec` | what a machine is to be |
//! | `honour` | fields of a pod and its container that a virtual machine cannot honour |
//! | `images` | disk images by name and URL, for the ImageService |
//! | `seed` | what cloud-init in the guest is told |
//! | `disks` | the files of a machine's disks |
//! | `network` | how a machine's first card is connected |
//! | `create`, `start` | CreateContainer and StartContainer |
//! | `ports` | connections to the guest's ports |
//!
//! Nothing here knows the VMM: machines are the sandbox's.

mod annotations;
mod create;
mod disks;
mod honour;
pub(super) mod images;
mod network;
mod ports;
mod seed;
mod spec;
mod start;

use std::collections::HashMap;

use podvisor_cri_messages::PodSandboxConfig;
use podvisor_sandbox::machine::OverlayFormat;
use serde::{Deserialize, Serialize};

use super::error::{CriError, Result};
use super::node::{Node, Pod};
use super::pods::memory_limit;
use super::state::{GuestSize, PodRecord};
pub(crate) use annotations::AnnotationErrors;
pub(super) use network::card_form;
pub(super) use ports::connect;
use spec::VmSpec;

/// The runtime handler of such pods.
pub(crate) const VM_HANDLER: &str = "podvisor-vm";

/// The annotation that chooses the runtime of a pod, and the value that means such pods.
const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";
const VIRTLET: &str = "virtlet.cloud";

/// The memory of a machine whose pod has no limit, in bytes.
const DEFAULT_MEMORY: u64 = 1 << 30;

/// The unit of a machine's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// Decides whether a pod with this runtime handler and these annotations is a virtual machine.
///
/// # Errors
/// The annotation names another runtime.
pub(super) fn is_vm(handler: &str, annotations: &HashMap<String, String>) -> Result<bool> {
    match annotations.get(TARGET_RUNTIME).map(String::as_str) {
        None => Ok(handler == VM_HANDLER),
        Some(VIRTLET) => Ok(true),
        Some(other) => {
            let shown: String = other.chars().take(128).collect();
            let reason = format!(
                "{TARGET_RUNTIME} is {shown:?}: write {VIRTLET:?} for a virtual machine, or leave \
                 the annotation out"
            );
            Err(CriError::invalid("config.annotations", reason))
        }
    }
}

/// Returns the size of a pod's machine: its memory is the pod's limit, its virtual CPUs are what its
/// annotations say.
///
/// # Errors
/// The annotations are wrong.
pub(super) fn size(config: &PodSandboxConfig) -> Result<GuestSize> {
    let spec = VmSpec::of_annotations(&config.annotations).map_err(CriError::Annotations)?;
    let linux = config.linux.as_ref();
    let resources = linux.and_then(|linux| linux.resources.as_ref());
    let limit = resources.map_or(0, memory_limit);
    let memory = match limit - limit % MEMORY_UNIT {
        0 => DEFAULT_MEMORY,
        limit => limit,
    };
    Ok(GuestSize {
        memory,
        growth: 0,
        vcpus: spec.vcpus,
        max_vcpus: spec.vcpus,
    })
}

impl Node {
    /// Checks a pod that is a virtual machine before anything is created.
    pub(super) fn check_vm_pod(&self, config: &PodSandboxConfig) -> Result<()> {
        honour::check_pod(config)?;
        VmSpec::of_annotations(&config.annotations).map_err(CriError::Annotations)?;
        match self.config.vm.fault() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }
}

impl PodRecord {
    /// Whether the pod is a virtual machine. What is recorded was checked.
    pub(super) fn is_vm(&self) -> bool {
        is_vm(&self.handler, &self.config.annotations).unwrap_or(false)
    }
}

impl Pod {
    /// Whether the pod is a virtual machine.
    pub(super) fn is_vm(&self) -> bool {
        self.with_record(PodRecord::is_vm)
    }
}

/// What is recorded of a container that is a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    /// Id of the disk image in the store.
    pub(crate) disk: String,
    /// How the root disk's differences from it are stored.
    pub(crate) overlay: OverlayKind,
    /// The machine's UUID.
    pub(crate) uuid: [u8; 16],
    /// Virtual CPUs.
    pub(crate) vcpus: u8,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// Block devices of the node, in the order of the guest's disks behind the first two.
    pub(crate) devices: Vec<VmDevice>,
}

/// A block device of the node that the machine has as a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmDevice {
    /// Its path on the node.
    pub(crate) path: String,
    /// The disk's serial number.
    pub(crate) serial: String,
    /// The guest cannot write it.
    pub(crate) is_read_only: bool,
}

/// How an overlay stores differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OverlayKind {
    /// A raw file that shares blocks with the image.
    Reflink,
    /// A qcow2 file.
    Qcow2,
}

impl From<OverlayFormat> for OverlayKind {
    fn from(format: OverlayFormat) -> Self {
        match format {
            OverlayFormat::Reflink => Self::Reflink,
            _ => Self::Qcow2,
        }
    }
}

impl From<OverlayKind> for OverlayFormat {
    fn from(kind: OverlayKind) -> Self {
        match kind {
            OverlayKind::Reflink => Self::Reflink,
            OverlayKind::Qcow2 => Self::Qcow2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handler_or_the_annotation_makes_a_pod_a_virtual_machine() {
        let with = |value: &str| HashMap::from([(TARGET_RUNTIME.to_owned(), value.to_owned())]);
        let none = HashMap::new();
        assert!(is_vm(VM_HANDLER, &none).unwrap());
        assert!(!is_vm("", &none).unwrap());
        assert!(!is_vm("podvisor", &none).unwrap());
        assert!(is_vm("", &with(VIRTLET)).unwrap());
        assert!(is_vm(VM_HANDLER, &with(VIRTLET)).unwrap());
        let error = is_vm(VM_HANDLER, &with("remote")).unwrap_err().to_string();
        assert!(
            error.contains("\"remote\"") && error.contains(TARGET_RUNTIME),
            "{error}"
        );
    }
}
