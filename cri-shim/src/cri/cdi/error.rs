//! Why a container cannot have CDI devices.

use std::io;
use std::path::PathBuf;

use crate::cri::spec::SpecFault;

/// Maximum number of devices that a container names.
pub(super) const MAX_DEVICES: usize = 256;

/// Maximum number of files in a directory.
pub(super) const MAX_FILES: usize = 4096;

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
        .directory.display(), MAX_FILES
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
        source: SpecFault,
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
