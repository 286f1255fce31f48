//! Which podvisor a snapshot is of: the agent in it is that one's.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use podvisor_agent_protocol::PROTOCOL_VERSION;
use serde::{Deserialize, Serialize};

use super::{TemplateError, file};

/// The file in a snapshot's directory.
const MAKER: &str = "podvisor";

/// The podvisor that made a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMaker {
    /// Its version.
    pub version: String,
    /// Version of the protocol that its agent speaks.
    pub agent_protocol: u32,
}

impl SnapshotMaker {
    /// This podvisor.
    pub fn current() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            agent_protocol: PROTOCOL_VERSION,
        }
    }

    /// That of the snapshot in a directory; `None` where it did not note itself.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of(dir: &Path) -> io::Result<Option<Self>> {
        match fs::read(dir.join(MAKER)) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes it in a snapshot's directory.
    pub(super) fn note(&self, dir: &Path) -> Result<(), TemplateError> {
        let path = dir.join(MAKER);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()
        };
        write().map_err(file("write", &path))
    }
}
