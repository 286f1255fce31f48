//! Files in /etc of a pod's containers, unless the kubelet mounts its own.

use podvisor_cri_messages::{DnsConfig, PodSandboxConfig};

use super::error::{CriError, Result};
use crate::cni::Dns;

/// Maximum length of a host name on Linux.
const MAX_HOSTNAME_LEN: usize = 64;
/// Maximum number of entries of a kind in resolv.conf.
const MAX_ENTRIES: usize = 64;
/// Host name of a guest whose pod has none.
const DEFAULT_HOSTNAME: &str = "localhost";

/// Returns the pod's host name.
pub(super) fn hostname(pod: &PodSandboxConfig) -> Result<String> {
    let name = match pod.hostname.as_str() {
        "" => DEFAULT_HOSTNAME,
        name => name,
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if name.len() > MAX_HOSTNAME_LEN || !name.bytes().all(plain) || name.starts_with(['-', '.']) {
        let reason =
            format!("{name:?} is not a host name of at most {MAX_HOSTNAME_LEN} characters");
        return Err(CriError::invalid("config.hostname", reason));
    }
    Ok(name.to_owned())
}

/// Returns /etc/resolv.conf: from the kubelet, else the network's, else the node's.
pub(super) fn resolv_conf(config: Option<&DnsConfig>, network: &Dns) -> Result<Vec<u8>> {
    let (servers, searches, options) = match config {
        Some(config) => (&config.servers, &config.searches, &config.options),
        None => (&network.nameservers, &network.search, &network.options),
    };
    let fields = [
        ("config.dns_config.servers", servers),
        ("config.dns_config.searches", searches),
        ("config.dns_config.options", options),
    ];
    for (field, entries) in fields {
        let unfit = |entry: &&String| {
            entry.is_empty() || entry.len() > 255 || entry.contains(|c: char| !c.is_ascii_graphic())
        };
        if let Some(entry) = entries.iter().find(unfit) {
            let reason = format!("{entry:?} is nothing for resolv.conf");
            return Err(CriError::invalid(field, reason));
        }
        if entries.len() > MAX_ENTRIES {
            let reason = format!("{} are more than {MAX_ENTRIES}", entries.len());
            return Err(CriError::invalid(field, reason));
        }
    }
    let text = Dns {
        nameservers: servers.clone(),
        search: searches.clone(),
        options: options.clone(),
    };
    let text = text.to_resolv_conf();
    if text.is_empty() {
        // A node without this file has no name servers either.
        return Ok(std::fs::read("/etc/resolv.conf").unwrap_or_default());
    }
    Ok(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn the_kubelets_name_servers_win() {
        let config = DnsConfig {
            servers: strings(&["10.96.0.10"]),
            searches: strings(&["default.svc.cluster.local", "svc.cluster.local"]),
            options: strings(&["ndots:5"]),
        };
        let network = Dns {
            nameservers: strings(&["1.1.1.1"]),
            ..Dns::default()
        };
        assert_eq!(
            String::from_utf8(resolv_conf(Some(&config), &network).unwrap()).unwrap(),
            "search default.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\n\
             options ndots:5\n"
        );
        assert_eq!(
            resolv_conf(None, &network).unwrap(),
            b"nameserver 1.1.1.1\n"
        );
        assert_eq!(
            resolv_conf(Some(&DnsConfig::default()), &network).unwrap(),
            std::fs::read("/etc/resolv.conf").unwrap_or_default()
        );
    }

    #[test]
    fn no_entry_brings_lines_of_its_own() {
        let config = DnsConfig {
            servers: strings(&["1.1.1.1\nnameserver 6.6.6.6"]),
            ..DnsConfig::default()
        };
        assert!(resolv_conf(Some(&config), &Dns::default()).is_err());
    }

    #[test]
    fn host_names_are_checked() {
        let pod = |name: &str| PodSandboxConfig {
            hostname: name.to_owned(),
            ..PodSandboxConfig::default()
        };
        assert_eq!(hostname(&pod("web-0.example")).unwrap(), "web-0.example");
        assert_eq!(hostname(&pod("web_0")).unwrap(), "web_0");
        assert_eq!(hostname(&pod("")).unwrap(), "localhost");
        for bad in ["a b", "a/b", "-a", &"x".repeat(65)] {
            assert!(hostname(&pod(bad)).is_err(), "{bad}");
        }
    }
}
