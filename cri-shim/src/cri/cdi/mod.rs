//! Devices by the Container Device Interface (CDI): a request names them, and files of the node say
//! how a container is to be changed for each.
//!
//! Names come in by the field `cdi_devices` and by annotations, and are resolved in the files of
//! the directories of the settings, which are read anew for each container that names a device. The
//! result is the container's configuration with more variables, groups, mounts and devices, which
//! are then checked and made like those of the request. What a virtual machine cannot have is
//! refused for a device that is asked for. Nothing here opens a device or mounts anything.
//!
//! Files are documents of the CDI specification, versions 0.1 to 1.1
//! (<https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>).

mod document;
mod edits;
mod error;
mod names;
mod registry;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use podvisor_cri_messages::ContainerConfig;

use self::edits::{Collected, Origin};
use self::registry::Registry;

pub(super) use edits::WithDevices;
pub(crate) use error::CdiError;
pub(super) use names::is_asked_for;

/// Directories of the files, by default: those of the administrator, and of drivers.
pub(crate) const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Adds the CDI devices that a container asks for, each once. Reads files and looks at paths of the
/// node, which may block.
pub(super) fn add_devices(
    directories: &[PathBuf],
    config: ContainerConfig,
) -> Result<WithDevices, CdiError> {
    let names = names::of(&config)?;
    let registry = Registry::read(directories)?;
    let unknown: Vec<&str> = names
        .iter()
        .filter(|name| registry.device(name).is_none())
        .map(String::as_str)
        .collect();
    if !unknown.is_empty() {
        return Err(CdiError::Unresolvable {
            names: unknown.join(", "),
            hints: registry.hints(directories, &unknown),
        });
    }
    let mut collected = Collected::new(&config);
    let mut files: BTreeSet<&Path> = BTreeSet::new();
    for name in &names {
        let Some((file, device)) = registry.device(name) else {
            continue;
        };
        // Those of the file apply once, to whichever of its devices.
        if files.insert(&file.path)
            && let Some(edits) = &file.document.container_edits
        {
            collected.add(&Origin::of_file(&file.path), edits)?;
        }
        let origin = Origin::of_device(&file.path, name);
        collected.add(&origin, &device.container_edits)?;
    }
    Ok(collected.add_to(config))
}
