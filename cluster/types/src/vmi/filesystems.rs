//! Shared directories (`spec.domain.devices.filesystems`).

use std::collections::BTreeSet;

use super::VmiSpec;
use crate::{Causes, FieldPath, cause::shown};

object! {
    /// A shared directory.
    pub struct Filesystem {
        /// Name of the volume, and the tag that the guest mounts.
        pub name: String,
        /// By virtio-fs.
        pub virtiofs: Option<Virtiofs>,
    }

    /// virtio-fs: it has no settings.
    pub struct Virtiofs {
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let volumes: BTreeSet<&str> = spec
        .volumes
        .iter()
        .map(|volume| volume.name.as_str())
        .collect();
    let mut names = BTreeSet::new();
    for (index, filesystem) in spec.domain.devices.filesystems.iter().enumerate() {
        let path = path.index(index);
        if !volumes.contains(filesystem.name.as_str()) {
            let message = format!(
                "is {}, but no volume has this name",
                shown(&filesystem.name)
            );
            causes.invalid(&path.child("name"), message);
        }
        if !names.insert(filesystem.name.as_str()) {
            causes.duplicate(&path.child("name"), &filesystem.name);
        }
        if filesystem.virtiofs.is_none() {
            causes.required(&path.child("virtiofs"), "is required");
        }
    }
}
