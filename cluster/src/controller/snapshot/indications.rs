//! What a virtual machine was like when a snapshot of it was taken, for people.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::objects::{
    Phase, SnapshotStatus, SnapshotVolumes, SourceIndication, VirtualMachineInstance,
    VirtualMachineSnapshotContent, is_true,
};

/// The guest was thawed before all volumes were taken.
pub(super) const QUIESCE_TIMEOUT: &str = "QuiesceTimeout";

/// Each indication, with what follows from it.
const MESSAGES: [(&str, &str); 6] = [
    (
        "Online",
        "The VM was running. What programs in it had not written is not in the snapshot.",
    ),
    (
        "GuestAgent",
        "The guest's agent froze the file systems: they are consistent.",
    ),
    (
        "NoGuestAgent",
        "The guest had no agent: the disks are as after a power failure.",
    ),
    (
        QUIESCE_TIMEOUT,
        "The file systems were thawed before all volumes were taken: the disks are as after a \
         power failure.",
    ),
    (
        "Paused",
        "The VM was paused: the disks are as after a power failure.",
    ),
    (
        "PartialSnapshot",
        "Claims whose storage takes no snapshots are left out: see status.snapshotVolumes.",
    ),
];

/// Adds what an instance is like.
pub(super) fn add(status: &mut SnapshotStatus, vmi: Option<&VirtualMachineInstance>) {
    let Some(vmi) = vmi.filter(|vmi| vmi.status.phase == Phase::Running) else {
        return;
    };
    insert(status, "Online");
    let conditions = &vmi.status.conditions;
    let agent = if is_true(conditions, "Paused") {
        "Paused"
    } else if is_true(conditions, "AgentConnected") {
        "GuestAgent"
    } else {
        "NoGuestAgent"
    };
    insert(status, agent);
}

/// Adds an indication.
pub(super) fn insert(status: &mut SnapshotStatus, indication: &str) {
    if status.indications.iter().any(|known| known == indication) {
        return;
    }
    let message = MESSAGES.iter().find(|(known, _)| *known == indication);
    status.indications.push(indication.to_owned());
    status.source_indications.push(SourceIndication {
        indication: indication.to_owned(),
        message: message.map_or("", |(_, message)| message).to_owned(),
    });
}

/// Lists the volumes that a snapshot contains, and the others.
pub(super) fn list_volumes(status: &mut SnapshotStatus, content: &VirtualMachineSnapshotContent) {
    let machine = content.spec.source.virtual_machine.as_ref();
    let template = machine.and_then(|machine| machine.spec.template.as_ref());
    let volumes = template.and_then(|template| template.spec.get("volumes"));
    let backups = content.spec.volume_backups.iter();
    let taken: BTreeSet<&str> = backups.map(|backup| backup.volume_name.as_str()).collect();
    let (mut lists, mut is_partial) = (SnapshotVolumes::default(), false);
    for volume in volumes.and_then(Value::as_array).into_iter().flatten() {
        let Some(name) = volume.get("name").and_then(Value::as_str) else {
            continue;
        };
        if taken.contains(name) {
            lists.included_volumes.push(name.to_owned());
        } else {
            is_partial |= super::content::claim_of(volume).is_some();
            lists.excluded_volumes.push(name.to_owned());
        }
    }
    status.snapshot_volumes = Some(lists);
    if is_partial {
        insert(status, "PartialSnapshot");
    }
}
