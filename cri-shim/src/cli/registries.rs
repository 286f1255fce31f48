//! Where settings of registries come from.

use std::path::{Path, PathBuf};

use clap::Args;
use podvisor_images::{HostsError, RegistryConfig};

/// Read when nothing else is given; it need not be there.
const FOLDER: &str = "/etc/podvisor/certs.d";

#[derive(Debug, Clone, Default, Args)]
pub(super) struct RegistryArgs {
    /// Folder with settings of registries (hosts.toml, certificates) [default: /etc/podvisor/certs.d]
    #[arg(
        long,
        value_name = "DIR",
        env = "PODVISOR_HOSTS_DIR",
        hide_env_values = true
    )]
    hosts_dir: Option<PathBuf>,
}

impl RegistryArgs {
    /// Takes a folder that a settings file names, unless one was given.
    pub(super) fn or_hosts_dir(mut self, folder: Option<PathBuf>) -> Self {
        self.hosts_dir = self.hosts_dir.or(folder);
        self
    }

    pub(super) fn config(&self) -> Result<RegistryConfig, HostsError> {
        let config = RegistryConfig::default();
        match &self.hosts_dir {
            Some(folder) => config.hosts_folder(folder),
            None if Path::new(FOLDER).exists() => config.hosts_folder(Path::new(FOLDER)),
            None => Ok(config),
        }
    }
}
