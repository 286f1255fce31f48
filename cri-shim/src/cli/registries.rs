//! The source of registry settings.

use std::path::PathBuf;

use clap::Args;
use podvisor_images::{HostsError, RegistryConfig};

use crate::registries::RegistryDirectory;

/// Read when nothing else is given; it need not be there.
const DIRECTORY: &str = "/etc/podvisor/certs.d";

#[derive(Debug, Clone, Default, Args)]
pub(super) struct RegistryArgs {
    /// Directory with settings of registries (hosts.toml, certificates) [default:
    /// /etc/podvisor/certs.d]
    #[arg(
        long,
        value_name = "DIR",
        env = "PODVISOR_HOSTS_DIR",
        hide_env_values = true
    )]
    hosts_dir: Option<PathBuf>,
}

impl RegistryArgs {
    /// Uses a settings file's directory, unless a flag gave one.
    pub(super) fn or_hosts_dir(mut self, directory: Option<PathBuf>) -> Self {
        self.hosts_dir = self.hosts_dir.or(directory);
        self
    }

    pub(super) fn config(&self) -> Result<RegistryConfig, HostsError> {
        self.directory().read()
    }

    pub(super) fn directory(&self) -> RegistryDirectory {
        match self.hosts_dir.clone() {
            Some(directory) => RegistryDirectory::new(directory, false),
            None => RegistryDirectory::new(PathBuf::from(DIRECTORY), true),
        }
    }
}
