//! Settings of registries from a directory, read anew for each pull.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use podvisor_images::{HostsError, RegistryConfig};
use tracing::warn;

use crate::machine::causes;

/// A directory with settings of registries.
#[derive(Debug, Clone)]
pub(crate) struct RegistryDirectory {
    path: PathBuf,
    /// Whether it need not be there.
    optional: bool,
}

impl RegistryDirectory {
    pub(crate) fn new(path: PathBuf, optional: bool) -> Self {
        Self { path, optional }
    }

    /// What the directory has now.
    pub(crate) fn read(&self) -> Result<RegistryConfig, HostsError> {
        let config = RegistryConfig::default();
        match self.optional && !self.path.exists() {
            true => Ok(config),
            false => config.hosts_directory(&self.path),
        }
    }
}

/// Settings that follow their directory. Clones share what was read last.
#[derive(Debug, Clone)]
pub(crate) struct Registries {
    directory: RegistryDirectory,
    last: Arc<Mutex<RegistryConfig>>,
}

impl Registries {
    /// # Errors
    /// Settings that cannot be used.
    pub(crate) fn of(directory: RegistryDirectory) -> Result<Self, HostsError> {
        let last = Arc::new(Mutex::new(directory.read()?));
        Ok(Self { directory, last })
    }

    /// What the directory has now; where that cannot be used, what it had last. Reads files.
    pub(crate) fn current(&self) -> RegistryConfig {
        let read = self.directory.read();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(config) => last.clone_from(&config),
            Err(error) => {
                warn!(
                    error = causes(&error),
                    "failed to read settings of registries; the last ones are used"
                );
            }
        }
        last.clone()
    }
}
