//! Which pods are virtual machines, and what is checked and said of one before it has a container.

use std::collections::{BTreeMap, HashMap};

use podvisor_cri_messages::PodSandboxConfig;
use podvisor_network::cni::CardForm;
use podvisor_network::guest::GuestNetwork;
use sha2::{Digest as _, Sha256};

use super::attachment::{self, Attachment};
use super::name::instance_of;
use super::network::card_form;
use super::{honour, migration};
use crate::cri::config::VM_HANDLER;
use crate::cri::error::{CriError, Result};
use crate::cri::limits::memory_limit;
use crate::cri::node::{Node, Pod};
use crate::cri::state::{GuestSize, PodRecord};
use crate::cri::vm_spec::{MEMORY_UNIT, VmSpec, VmiCard, VmiMachine};

/// The annotation that chooses the runtime of a pod, and the value that means such pods.
const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";
const VIRTLET: &str = "virtlet.cloud";

/// The memory of a machine whose pod has no limit, in bytes.
const DEFAULT_MEMORY: u64 = 1 << 30;

/// Decides whether a pod with this runtime handler and these annotations is a virtual machine.
///
/// # Errors
/// The annotation names another runtime.
pub(in crate::cri) fn is_vm(handler: &str, annotations: &HashMap<String, String>) -> Result<bool> {
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

/// Returns the size of a pod's machine: what its object says; else its memory is the pod's limit,
/// and its virtual CPUs are what its annotations say.
///
/// # Errors
/// The annotations are wrong.
pub(in crate::cri) fn size(config: &PodSandboxConfig) -> Result<GuestSize> {
    if attachment::has_annotation(&config.annotations) {
        return Ok(attachment::size());
    }
    if let Some(machine) = VmiMachine::of_annotations(&config.annotations)? {
        return Ok(GuestSize {
            memory: machine.memory,
            growth: machine.growth,
            vcpus: machine.vcpus,
            max_vcpus: machine.max_vcpus,
        });
    }
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
    pub(in crate::cri) fn check_vm_pod(&self, config: &PodSandboxConfig) -> Result<()> {
        honour::check_pod(config)?;
        if Attachment::of_annotations(&config.annotations)?.is_some() {
            return Ok(());
        }
        VmiMachine::of_annotations(&config.annotations)?;
        let spec = VmSpec::of_annotations(&config.annotations).map_err(CriError::Annotations)?;
        self.config.vm.agent_of(&spec)?;
        migration::incoming(&config.annotations)?;
        match self.config.vm.fault() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }
}

/// Whether the guest of a pod may mount directories of the node. Its object says so; without one
/// it depends on its container, which comes later.
pub(in crate::cri) fn may_share(annotations: &HashMap<String, String>) -> Result<bool> {
    if attachment::has_annotation(annotations) {
        return Ok(false);
    }
    let machine = VmiMachine::of_annotations(annotations)?;
    Ok(machine.is_none_or(|machine| !machine.shares.is_empty()))
}

/// Gives the cards of a pod's machine the hardware addresses and the links that its object says.
pub(in crate::cri) fn set_cards(
    annotations: &HashMap<String, String>,
    network: &mut GuestNetwork,
) -> Result<()> {
    let cards = cards(annotations)?;
    let own = own_mac(annotations)?;
    for (index, interface) in network.interfaces.iter_mut().enumerate() {
        let own = own.filter(|_| index == 0);
        let card = cards.get(&interface.name);
        if let Some(mac) = card.and_then(|card| card.mac).or(own) {
            interface.mac = mac;
        }
        interface.is_down = card.is_some_and(|card| card.is_down);
    }
    Ok(())
}

/// Returns the cards of a pod's machine that its object describes, by the pod's interfaces.
pub(in crate::cri) fn cards(
    annotations: &HashMap<String, String>,
) -> Result<BTreeMap<String, VmiCard>> {
    let machine = VmiMachine::of_annotations(annotations)?;
    Ok(machine.map(|machine| machine.cards).unwrap_or_default())
}

/// Returns the names of the pod's interfaces for those of cards in its object, which are the same
/// without one.
///
/// # Errors
/// The first name that no card has.
pub(in crate::cri) fn interfaces_of(
    annotations: &HashMap<String, String>,
    names: Vec<String>,
) -> Result<Result<Vec<String>, String>> {
    let Some(machine) = VmiMachine::of_annotations(annotations)? else {
        return Ok(Ok(names));
    };
    let interface = |name: String| {
        let mut cards = machine.cards.iter();
        let found = cards.find(|(_, card)| card.name == name);
        found.map(|(interface, _)| interface.clone()).ok_or(name)
    };
    Ok(names.into_iter().map(interface).collect())
}

/// Returns the hardware address of a masqueraded card that nobody has given one: the same wherever
/// its instance runs, since a guest that moves keeps it.
fn own_mac(annotations: &HashMap<String, String>) -> Result<Option<[u8; 6]>> {
    let is_masqueraded = matches!(card_form(annotations)?, CardForm::Masqueraded(_));
    let instance = instance_of(annotations).filter(|one| is_masqueraded && !one.uid.is_empty());
    Ok(instance.map(|instance| {
        let digest = Sha256::digest(instance.uid.as_bytes());
        let mut mac = [2; 6];
        mac[1..].copy_from_slice(&digest[..5]);
        mac
    }))
}

impl PodRecord {
    /// Whether the pod is a virtual machine. What is recorded was checked.
    pub(in crate::cri) fn is_vm(&self) -> bool {
        is_vm(&self.handler, &self.config.annotations).unwrap_or(false)
    }
}

impl Pod {
    /// Whether the pod is a virtual machine.
    pub(in crate::cri) fn is_vm(&self) -> bool {
        self.with_record(PodRecord::is_vm)
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
