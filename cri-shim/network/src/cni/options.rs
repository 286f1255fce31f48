//! The directories of CNI, and its time limit.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default time limit of one plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The directories of CNI, and its time limit.
#[derive(Debug, Clone)]
pub struct CniOptions {
    /// The directory of configuration lists.
    pub config_dir: PathBuf,
    /// The directories of plugins, searched in this order.
    pub plugin_dirs: Vec<PathBuf>,
    /// The directory of plugins' results, for undoing them; it must outlive a restart of the
    /// daemon.
    pub cache_dir: PathBuf,
    /// The directory of network namespaces.
    pub netns_dir: PathBuf,
    /// The directory where new ones are made instead, with `NETNS_PREFIX`, for plugins that leave
    /// their work to an agent in a container: such agents see this directory of the host alone.
    pub public_netns_dir: Option<PathBuf>,
    /// The time limit of one plugin.
    pub plugin_timeout: Duration,
}

/// The directory in which other runtimes have the network namespaces of pods.
pub const PUBLIC_NETNS_DIR: &str = "/var/run/netns";

/// What the names of a node's own network namespaces begin with in a directory that it shares.
pub(super) const NETNS_PREFIX: &str = "podvisor-";

/// Where plugins are looked for: by hand, and of the packages of Debian, Fedora and Alpine.
pub const PLUGIN_DIRS: [&str; 3] = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"];

impl CniOptions {
    /// Uses the usual directories of plugins and their configuration, with state below `root` and
    /// namespaces below `state`.
    pub fn new(root: &Path, state: &Path) -> Self {
        Self {
            config_dir: "/etc/cni/net.d".into(),
            plugin_dirs: PLUGIN_DIRS.map(PathBuf::from).to_vec(),
            cache_dir: root.join("cni"),
            netns_dir: state.join("netns"),
            public_netns_dir: None,
            plugin_timeout: PLUGIN_TIMEOUT,
        }
    }
}
