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
mod names;
mod registry;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use podvisor_cri_messages::ContainerConfig;
use rustix::fs::StatVfsMountFlags;

use self::edits::{Collected, Origin};
use self::registry::Registry;
use super::error::CriError;

pub(super) use names::is_asked_for;

/// Directories of the files, by default: those of the administrator, and of drivers.
pub(crate) const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Maximum number of devices that a container names.
const MAX_DEVICES: usize = 256;

/// Why a container cannot have CDI devices.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CdiError {
    /// A name in an annotation.
    #[error("invalid CDI device name {name:?} in the annotation {key:?}: it is VENDOR/CLASS=NAME")]
    InvalidName {
        /// The annotation's key.
        key: String,
        /// The name.
        name: String,
    },
    /// The container names too many devices.
    #[error("{count} CDI devices are more than {MAX_DEVICES}")]
    TooManyDevices {
        /// How many.
        count: usize,
    },
    /// No file defines these devices, or several do.
    #[error("unresolvable CDI devices {names}{hints}")]
    Unresolvable {
        /// The names.
        names: String,
        /// Where they were looked for, and what is wrong there.
        hints: String,
    },
    /// A directory has too many files.
    #[error(
        "the directory {} has more than {} CDI specifications: remove those that no driver needs",
        .directory.display(), registry::MAX_FILES
    )]
    TooManyFiles {
        /// The directory.
        directory: PathBuf,
    },
    /// A directory or file that cannot be read.
    #[error("cannot read {}", .path.display())]
    Io {
        /// Its path.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A device needs what a virtual machine cannot have.
    #[error("{origin}: {field} is not supported: {reason}")]
    Refused {
        /// The device and its file.
        origin: String,
        /// Its path in the document.
        field: String,
        /// Why, and what to do instead.
        reason: String,
    },
    /// A mount or a device of the node that a container of the request could not have either.
    #[error("{origin}: {field}")]
    Invalid {
        /// The device and its file.
        origin: String,
        /// Its path in the document.
        field: String,
        #[source]
        source: Box<CriError>,
    },
    /// What a device consists of is not there.
    #[error("{origin}: {field}: cannot look at {}", .path.display())]
    Missing {
        /// The device and its file.
        origin: String,
        /// Its path in the document.
        field: String,
        /// The path on the node.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A container's configuration with what its CDI devices add.
#[derive(Debug)]
pub(super) struct WithDevices {
    pub(super) config: ContainerConfig,
    /// Flags of the mounts that were added, which are the last ones.
    pub(super) mount_flags: Vec<StatVfsMountFlags>,
}

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
