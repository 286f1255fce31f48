//! What is accepted because manifests have it, and changes nothing here: the user is told.

use super::{Disk, Interface, VmiSpec};
use crate::FieldPath;

/// Most warnings about one object.
const MOST: usize = 16;

/// Says which fields are not applied, and why.
pub(super) fn warnings(spec: &VmiSpec, path: &FieldPath) -> Vec<String> {
    let domain = path.child("domain");
    let devices = &spec.domain.devices;
    let mut found = Vec::new();
    let mut note = |path: FieldPath, is_set: bool, why: &str| {
        if is_set && found.len() < MOST {
            found.push(format!("{path} is not applied: {why}"));
        }
    };
    note(
        domain.child("ioThreadsPolicy"),
        spec.domain.io_threads_policy.is_some(),
        "each disk has a thread of its own",
    );
    let of_devices = domain.child("devices");
    for (field, is_set, why) in [
        (
            "autoattachSerialConsole",
            devices.autoattach_serial_console == Some(false),
            "there is always one",
        ),
        (
            "logSerialConsole",
            devices.log_serial_console == Some(false),
            "the console is the pod's log",
        ),
        (
            "autoattachMemBalloon",
            devices.autoattach_mem_balloon == Some(false),
            "there is always one",
        ),
        (
            "networkInterfaceMultiqueue",
            devices.network_interface_multiqueue == Some(true),
            "each card has one pair of queues",
        ),
        (
            "blockMultiQueue",
            devices.block_multi_queue == Some(true),
            "the node chooses the queues of disks",
        ),
    ] {
        note(of_devices.child(field), is_set, why);
    }
    for (index, disk) in devices.disks.iter().enumerate() {
        of_disk(disk, &of_devices.child("disks").index(index), &mut note);
    }
    for (index, card) in devices.interfaces.iter().enumerate() {
        let path = of_devices.child("interfaces").index(index);
        of_card(card, &path, &mut note);
    }
    found
}

fn of_disk(disk: &Disk, path: &FieldPath, note: &mut impl FnMut(FieldPath, bool, &str)) {
    let is_other = |value: &Option<String>, own: &str| {
        value
            .as_deref()
            .is_some_and(|value| !value.is_empty() && value != own)
    };
    for (field, is_set, why) in [
        (
            "cache",
            is_other(&disk.cache, "writeback"),
            "the node caches, and what the guest flushes is on the disk",
        ),
        ("io", disk.io.is_some(), "the node chooses"),
        (
            "blockSize",
            disk.block_size.is_some(),
            "the guest sees the disk's own",
        ),
        (
            "shareable",
            disk.shareable == Some(true),
            "one machine at a time has a disk that it can write",
        ),
        (
            "errorPolicy",
            is_other(&disk.error_policy, "report"),
            "errors are reported to the guest",
        ),
        ("tag", disk.tag.is_some(), "the guest is not told"),
    ] {
        note(path.child(field), is_set, why);
    }
}

fn of_card(card: &Interface, path: &FieldPath, note: &mut impl FnMut(FieldPath, bool, &str)) {
    for (field, is_set, why) in [
        (
            "bootOrder",
            card.boot_order.is_some(),
            "nothing is booted from a network",
        ),
        ("tag", card.tag.is_some(), "the guest is not told"),
    ] {
        note(path.child(field), is_set, why);
    }
}
