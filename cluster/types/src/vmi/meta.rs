//! Rules of a VMI's metadata.

use crate::{Causes, FieldPath, meta::Meta};

/// Labels that only podvisor's own accounts set.
pub const RESERVED_LABELS: [&str; 8] = [
    "kubevirt.io",
    "kubevirt.io/created-by",
    "kubevirt.io/migrationJobUID",
    "kubevirt.io/nodeName",
    "kubevirt.io/migrationTargetNodeName",
    "kubevirt.io/schedulable",
    "kubevirt.io/migrationPhase",
    "kubevirt.io/install-strategy",
];

/// Annotations of KubeVirt that would change how the launcher works.
const REFUSED_ANNOTATIONS: [&str; 3] = [
    "kubevirt.io/ignitiondata",
    "hooks.kubevirt.io/hookSidecars",
    "kubevirt.io/libvirt-log-filters",
];

/// Adds every cause to refuse a user's metadata of a VMI, below `path` (`metadata`).
pub fn validate_meta(meta: &Meta, path: &FieldPath, causes: &mut Causes) {
    for label in RESERVED_LABELS
        .iter()
        .filter(|label| meta.labels.contains_key(**label))
    {
        causes.forbidden(
            &path.child("labels"),
            format_args!("must not have {label}, which only the system sets"),
        );
    }
    for name in REFUSED_ANNOTATIONS
        .iter()
        .filter(|name| meta.annotations.contains_key(**name))
    {
        causes.not_supported(
            &path.child("annotations"),
            format_args!("must not have {name}, which is not supported"),
        );
    }
}
