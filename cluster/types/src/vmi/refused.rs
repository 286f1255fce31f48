//! Fields of KubeVirt that podvisor does not have, refused by their paths.

use serde_json::Value;

use super::VmiSpec;
use crate::{Causes, FieldPath};

/// What a user reads behind the path.
const NOT_HERE: &str = "is not supported";

/// Paths below the specification; `[]` stands for every element of a list. A value that asks
/// for nothing (`false`, an empty list) passes.
const REFUSED: [(&str, &str); 44] = [
    (
        "domain.cpu.isolateEmulatorThread",
        "is not supported: there is no emulator thread",
    ),
    ("domain.cpu.realtime", NOT_HERE),
    ("domain.cpu.numa", NOT_HERE),
    (
        "domain.memory.reservedOverhead",
        "is not supported: the overhead is computed",
    ),
    ("domain.firmware.acpi", NOT_HERE),
    ("domain.features.smm", NOT_HERE),
    ("domain.features.hyperv", NOT_HERE),
    ("domain.features.hypervPassthrough", NOT_HERE),
    ("domain.launchSecurity", NOT_HERE),
    ("domain.devices.disks[].lun", NOT_HERE),
    (
        "domain.devices.disks[].disk.pciAddress",
        "is not supported: addresses are assigned",
    ),
    ("domain.devices.disks[].changedBlockTracking", NOT_HERE),
    ("domain.devices.interfaces[].sriov", NOT_HERE),
    (
        "domain.devices.interfaces[].slirp",
        "is discontinued: use masquerade",
    ),
    (
        "domain.devices.interfaces[].macvtap",
        "is discontinued: use bridge with a Multus network",
    ),
    (
        "domain.devices.interfaces[].passt",
        "is discontinued: use masquerade",
    ),
    (
        "domain.devices.interfaces[].passtBinding",
        "is not supported: use masquerade",
    ),
    (
        "domain.devices.interfaces[].binding",
        "is not supported: use bridge or masquerade",
    ),
    ("domain.devices.interfaces[].acpiIndex", NOT_HERE),
    (
        "domain.devices.interfaces[].pciAddress",
        "is not supported: addresses are assigned",
    ),
    (
        "domain.devices.autoattachGraphicsDevice",
        "is not supported: use the serial console",
    ),
    ("domain.devices.autoattachInputDevice", NOT_HERE),
    (
        "domain.devices.useVirtioTransitional",
        "is not supported: devices are modern virtio",
    ),
    ("domain.devices.watchdog", NOT_HERE),
    ("domain.devices.panicDevices", NOT_HERE),
    ("domain.devices.inputs", NOT_HERE),
    ("domain.devices.sound", NOT_HERE),
    (
        "domain.devices.video",
        "is not supported: use the serial console",
    ),
    ("domain.devices.tpm", NOT_HERE),
    ("domain.devices.gpus", NOT_HERE),
    ("domain.devices.hostDevices", NOT_HERE),
    ("domain.devices.clientPassthrough", NOT_HERE),
    ("domain.devices.downwardMetrics", NOT_HERE),
    ("networks[].resourceClaim", NOT_HERE),
    (
        "volumes[].hostDisk",
        "is not supported: it would show files of the node to users who may not see them",
    ),
    ("volumes[].sysprep", NOT_HERE),
    ("volumes[].downwardMetrics", NOT_HERE),
    ("volumes[].containerPath", NOT_HERE),
    ("resourceClaims", NOT_HERE),
    ("utilityVolumes", NOT_HERE),
    ("domain.clock.timer.hpet.track", NOT_HERE),
    ("domain.clock.timer.pit.track", NOT_HERE),
    ("domain.clock.timer.rtc.track", NOT_HERE),
    ("domain.clock.timer.kvm.track", NOT_HERE),
];

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    // A specification of maps, lists and texts always has a JSON.
    let Ok(json) = serde_json::to_value(spec) else {
        return;
    };
    for (pattern, message) in REFUSED {
        let steps: Vec<&str> = pattern.split('.').collect();
        walk(&json, &steps, path, message, causes);
    }
}

fn walk(value: &Value, steps: &[&str], path: &FieldPath, message: &str, causes: &mut Causes) {
    let Some((step, rest)) = steps.split_first() else {
        if asks_for_something(value) {
            causes.not_supported(path, message);
        }
        return;
    };
    let (name, is_list) = step
        .strip_suffix("[]")
        .map_or((*step, false), |name| (name, true));
    let Some(next) = value.get(name) else { return };
    let path = path.child(name);
    if !is_list {
        walk(next, rest, &path, message, causes);
        return;
    }
    for (index, element) in next.as_array().into_iter().flatten().enumerate() {
        walk(element, rest, &path.index(index), message, causes);
    }
}

fn asks_for_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(object) => object.get("enabled") != Some(&Value::Bool(false)),
        _ => true,
    }
}
