//! What may change in a VMI's specification once it exists.

use super::{Cpu, VmiSpec};
use crate::{Cause, Causes, FieldPath};

/// Causes to refuse a user's change of the specification: it is immutable but for volumes that
/// are plugged in, and those change by subresources only.
#[must_use]
pub fn validate_spec_update(old: &VmiSpec, new: &VmiSpec, path: &FieldPath) -> Vec<Cause> {
    let mut causes = Causes::default();
    if old != new {
        causes.forbidden(
            path,
            "is restricted: change the VirtualMachine, or use the subresources to plug volumes",
        );
    }
    causes.into_vec()
}

/// Causes to refuse a change of the specification by the system's own accounts: volumes, disks,
/// interfaces, networks, sockets, guest memory and the grace period may change, and what bounds
/// them may not.
#[must_use]
pub fn validate_system_spec_update(old: &VmiSpec, new: &VmiSpec, path: &FieldPath) -> Vec<Cause> {
    let mut causes = Causes::default();
    let max_sockets = |spec: &VmiSpec| spec.domain.cpu.as_ref().and_then(|cpu| cpu.max_sockets);
    let max_guest = |spec: &VmiSpec| {
        spec.domain
            .memory
            .as_ref()
            .and_then(|memory| memory.max_guest.clone())
    };
    if max_sockets(old) != max_sockets(new) {
        causes.forbidden(&path.child("domain.cpu.maxSockets"), "cannot change");
    }
    if max_guest(old) != max_guest(new) {
        causes.forbidden(&path.child("domain.memory.maxGuest"), "cannot change");
    }
    let mut same = new.clone();
    same.volumes.clone_from(&old.volumes);
    same.networks.clone_from(&old.networks);
    same.domain
        .devices
        .disks
        .clone_from(&old.domain.devices.disks);
    same.domain
        .devices
        .interfaces
        .clone_from(&old.domain.devices.interfaces);
    same.domain
        .devices
        .filesystems
        .clone_from(&old.domain.devices.filesystems);
    same.domain.resources.clone_from(&old.domain.resources);
    same.node_selector.clone_from(&old.node_selector);
    same.affinity.clone_from(&old.affinity);
    same.tolerations.clone_from(&old.tolerations);
    // Who stops a machine may give it less time to shut down.
    same.termination_grace_period_seconds = old.termination_grace_period_seconds;
    if let (
        Some(cpu),
        Some(Cpu {
            sockets,
            max_sockets,
            ..
        }),
    ) = (&mut same.domain.cpu, &old.domain.cpu)
    {
        (cpu.sockets, cpu.max_sockets) = (*sockets, *max_sockets);
    }
    if let (Some(memory), Some(old)) = (&mut same.domain.memory, &old.domain.memory) {
        memory.guest.clone_from(&old.guest);
        memory.max_guest.clone_from(&old.max_guest);
    }
    if same != *old {
        causes.forbidden(
            path,
            "may change in volumes, networks, disks, interfaces, sockets, guest memory, placement \
             and grace period only",
        );
    }
    causes.into_vec()
}
