//! Directories for which the check of the rooms makes an exception. Neither list may grow: a
//! directory that is better than it says is to be struck from it.

/// Directories with a circle that is the shape of what they do, each with why it stays.
pub(super) const HONEST_CIRCLES: [(&str, &str); 2] = [
    (
        "images/loader/entries/src/grub",
        "an interpreter: a command runs blocks and tests, and a block runs commands",
    ),
    (
        "images/src",
        "what each room fails with is a case of the crate's error, with which its operations fail",
    ),
];

/// Directories whose rooms import each other in no circle, but take types of the module's own file,
/// which calls them.
pub(super) const WITH_OWN_FILE: [&str; 44] = [
    "benches/src/boot",
    "benches/src/cri",
    "benches/src/net",
    "benches/src/restore",
    "benches/src/start",
    "benches/src/vm",
    "cluster/src/api/vm",
    "cluster/src/certificates",
    "cluster/src/controller/datavolume/decide",
    "cluster/src/controller/restore",
    "cluster/src/controller/world",
    "cluster/src/copy",
    "cluster/src/import",
    "cluster/src/objects",
    "cluster/src/upload",
    "cluster/types/src/datavolume",
    "cluster/types/src/instancetype",
    "cluster/types/src/snapshot",
    "cluster/types/src/vmi",
    "cri-shim/cloud-init/src/fat",
    "cri-shim/cloud-init/src/yaml",
    "cri-shim/dhcp/src/v4",
    "cri-shim/dhcp/src/v6",
    "cri-shim/messages/src",
    "cri-shim/node-api/src/messages",
    "cri-shim/sandbox/src/agent",
    "cri-shim/sandbox/src/cgroup",
    "cri-shim/sandbox/src/client",
    "cri-shim/sandbox/src/launch",
    "cri-shim/sandbox/src/template",
    "devices/src/blk/overlay",
    "devices/src/hostile",
    "devices/src/net",
    "devices/src/virtio/transport/pci",
    "devices/src/vsock",
    "images/agent/protocol/src",
    "images/agent/src/launcher",
    "images/src/archive",
    "images/src/erofs",
    "images/src/store",
    "vmm/src/boot",
    "vmm/src/check/probe",
    "vmm/src/kvm",
    "vmm/src/memory",
];
