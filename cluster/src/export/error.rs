//! Why the program does not serve volumes.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::certificates::files::Unusable;

/// Why volumes are not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The certificate cannot be used.
    #[error("failed to use {} for the export; delete the pod", .path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A volume has no disk.
    #[error("failed to open {}, the disk of the volume {name}", .path.display())]
    Disk {
        /// The volume.
        name: String,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A volume has no files.
    #[error("failed to open files of {}, the directory of the volume {name}", .path.display())]
    Files {
        /// The volume.
        name: String,
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The address is taken.
    #[error("failed to listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The system has no random numbers.
    #[error("failed to make a key by which tokens are compared")]
    Random,
}

impl From<Unusable> for ExportError {
    fn from(Unusable { path, source }: Unusable) -> Self {
        Self::Credentials { path, source }
    }
}
