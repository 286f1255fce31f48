//! Podvisor's own network: a bridge on the host with a private subnet, masqueraded by the host's
//! addresses, with the plugins that every distribution has.

use std::env;
use std::path::Path;

use serde_json::json;

use super::config::{List, Plugin};
use super::error::CniError;
use super::options::CniOptions;
use super::plugin;

/// Name of the network, under which plugins store its addresses.
pub const NAME: &str = "podvisor";

/// The bridge.
pub const BRIDGE: &str = "podvisor0";

/// The bridge's subnet; the bridge has the first address.
pub const SUBNET: &str = "10.209.0.0/16";

const VERSION: &str = "1.0.0";

/// Returns the network's configuration. The portmap plugin is only included if ports are published:
/// otherwise DEL would look for its rules in vain.
pub fn list(publishes: bool) -> List {
    let bridge = json!({
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": true,
        "ipMasq": true,
        // A guest can also reach its own published ports by the host's address.
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    });
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    // Accepts packets that a host with a forward policy of DROP would drop.
    let firewall = json!({"type": "firewall"});
    let plugins = [Some(bridge), publishes.then_some(portmap), Some(firewall)];
    let plugins = plugins.into_iter().flatten().filter_map(|config| {
        let config = config.as_object()?.clone();
        let kind = config.get("type")?.as_str()?.to_owned();
        Some(Plugin { kind, config })
    });
    List {
        name: NAME.to_owned(),
        version: VERSION.to_owned(),
        disable_check: false,
        plugins: plugins.collect(),
    }
}

/// Checks whether the host has the programs that the network needs.
pub fn check(options: &CniOptions, list: &List) -> Result<(), CniError> {
    let kinds = list.plugins.iter().map(|plugin| plugin.kind.as_str());
    for kind in kinds.chain(["host-local"]) {
        plugin::find(&options.plugin_dirs, kind)?;
    }
    let path = plugin::search_path();
    if !env::split_paths(&path).any(|dir| dir.join("iptables").is_file()) {
        return Err(CniError::NoIptables);
    }
    let tun = Path::new("/dev/net/tun");
    match tun.exists() {
        true => Ok(()),
        false => Err(CniError::io("use", tun)(
            std::io::ErrorKind::NotFound.into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::config;

    #[test]
    fn the_network_is_a_valid_list() {
        let list = list(true);
        let plugins: Vec<_> = list.plugins.iter().map(|plugin| &plugin.config).collect();
        let text = json!({"cniVersion": VERSION, "name": NAME, "plugins": plugins});
        assert_eq!(config::parse(text.to_string().as_bytes(), true), Ok(list));
    }

    #[test]
    fn ports_take_a_plugin_of_their_own() {
        let kinds = |publishes| -> Vec<String> {
            let plugins = list(publishes).plugins.into_iter();
            plugins.map(|plugin| plugin.kind).collect()
        };
        assert_eq!(kinds(false), ["bridge", "firewall"]);
        assert_eq!(kinds(true), ["bridge", "portmap", "firewall"]);
    }

    #[test]
    fn a_host_without_plugins_is_told_which() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = CniOptions::new(dir.path(), dir.path());
        options.plugin_dirs = vec![dir.path().to_owned()];
        let error = check(&options, &list(false)).unwrap_err().to_string();
        assert!(error.contains("\"bridge\""), "{error}");
    }
}
