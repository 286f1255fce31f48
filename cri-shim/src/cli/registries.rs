//! The source of registry settings.

use std::path::{Path, PathBuf};

use clap::Args;
use podvisor_images::{HostsError, RegistryConfig};

/// The default directory; it need not exist.
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
        let config = RegistryConfig::default();
        match &self.hosts_dir {
            Some(directory) => config.hosts_directory(directory),
            None if Path::new(DIRECTORY).exists() => config.hosts_directory(Path::new(DIRECTORY)),
            None => Ok(config),
        }
    }
}
