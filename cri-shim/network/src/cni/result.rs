//! Results of plugins. They are not trusted: counts, names, addresses and sizes are checked.

use std::net::IpAddr;

use serde::Deserialize;
use serde_json::Value;

use super::error::CniError;
use super::plugin::clean;
use super::prefix::Prefix;

/// Limits that no network reaches.
const MAX_INTERFACES: usize = 64;
const MAX_ADDRESSES: usize = 64;
const MAX_ROUTES: usize = 1024;
const MAX_NAMES: usize = 64;
/// The least MTU of RFC 791 and the kernel's largest.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 68..=65535;

/// A result of ADD, CNI specification 0.3 to 1.1.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct CniResult {
    cni_version: String,
    interfaces: Vec<Interface>,
    ips: Vec<Ip>,
    routes: Vec<ResultRoute>,
    dns: Dns,
}

/// An interface of a result. Plugins store notes for their DEL in interfaces that do not exist, so
/// names and MAC addresses may be anything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Interface {
    name: String,
    mac: String,
    mtu: u32,
    sandbox: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Ip {
    address: Prefix,
    gateway: Option<IpAddr>,
    interface: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct ResultRoute {
    #[serde(rename = "dst")]
    destination: Prefix,
    #[serde(rename = "gw")]
    gateway: Option<IpAddr>,
}

/// The name servers of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Addresses.
    pub nameservers: Vec<String>,
    /// Domains to search.
    pub search: Vec<String>,
    /// Options for resolv.conf.
    pub options: Vec<String>,
}

/// A pod's addresses on an interface, as its plugins report them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// Addresses with the length of the network's prefix, the first one first.
    pub addresses: Vec<Prefix>,
    /// The gateway of the first address.
    pub gateway: Option<IpAddr>,
    /// The interface's MAC address; empty if no plugin reports a valid one.
    pub mac: String,
}

impl CniResult {
    /// Parses the result of the last plugin of a chain; `interface` is the requested interface.
    pub(super) fn parse(raw: &Value, interface: &str) -> Result<Self, CniError> {
        let invalid = |reason: String| CniError::InvalidResult {
            name: "chain".to_owned(),
            reason: clean(&reason),
        };
        let result = Self::deserialize(raw).map_err(|error| invalid(error.to_string()))?;
        result.check(interface).map_err(invalid)?;
        Ok(result)
    }

    fn check(&self, interface: &str) -> Result<(), String> {
        if !super::config::VERSIONS.contains(&self.cni_version.as_str()) {
            return Err(format!("unknown \"cniVersion\" {:?}", self.cni_version));
        }
        for (what, count, limit) in [
            ("interfaces", self.interfaces.len(), MAX_INTERFACES),
            ("ips", self.ips.len(), MAX_ADDRESSES),
            ("routes", self.routes.len(), MAX_ROUTES),
            ("name servers", self.dns.nameservers.len(), MAX_NAMES),
            ("search domains", self.dns.search.len(), MAX_NAMES),
            ("resolver options", self.dns.options.len(), MAX_NAMES),
        ] {
            if count > limit {
                return Err(format!("{count} {what} are more than {limit}"));
            }
        }
        for found in &self.interfaces {
            if found.mtu != 0 && !MTU_RANGE.contains(&found.mtu) {
                return Err(format!("{} is not an MTU", found.mtu));
            }
        }
        for ip in &self.ips {
            if !is_host_address(&ip.address.address()) {
                return Err(format!("{} is no address for a pod", ip.address));
            }
            if let Some(index) = ip.interface {
                let there = usize::try_from(index).is_ok_and(|i| i < self.interfaces.len());
                if !there {
                    return Err(format!(
                        "{} is of interface {index}, which does not exist",
                        ip.address
                    ));
                }
            }
            if ip
                .gateway
                .is_some_and(|gw| !same_family(&gw, &ip.address.address()))
            {
                return Err(format!(
                    "the gateway of {} is of the other family",
                    ip.address
                ));
            }
        }
        for route in &self.routes {
            let family = route.destination.address();
            if route.gateway.is_some_and(|gw| !same_family(&gw, &family)) {
                let destination = route.destination;
                return Err(format!(
                    "the gateway to {destination} is of the other family"
                ));
            }
        }
        let in_pod = |i: &&Interface| !i.sandbox.is_empty();
        if self.interfaces.iter().any(|i| in_pod(&i))
            && !self
                .interfaces
                .iter()
                .any(|i| in_pod(&i) && i.name == interface)
        {
            return Err(format!("no interface {interface:?} in the pod"));
        }
        let dns = [&self.dns.nameservers, &self.dns.search, &self.dns.options];
        let unfit = |word: &&String| {
            word.is_empty() || word.len() > 255 || word.contains(|c: char| !c.is_ascii_graphic())
        };
        match dns.into_iter().flatten().find(unfit) {
            Some(word) => Err(format!("{word:?} is nothing for resolv.conf")),
            None => Ok(()),
        }
    }

    /// The pod's addresses; chains also report those of the host's side.
    fn pod_ips(&self) -> impl Iterator<Item = &Ip> {
        self.ips.iter().filter(|ip| {
            let index = ip.interface.and_then(|index| usize::try_from(index).ok());
            let interface = index.and_then(|index| self.interfaces.get(index));
            interface.is_none_or(|i| !i.sandbox.is_empty())
        })
    }

    /// Returns the pod's addresses on `interface`.
    pub(super) fn endpoint(&self, interface: &str) -> Endpoint {
        let own = |i: &&Interface| i.name == interface && !i.sandbox.is_empty();
        Endpoint {
            addresses: self.pod_ips().map(|ip| ip.address).collect(),
            gateway: self.pod_ips().next().and_then(|ip| ip.gateway),
            mac: self
                .interfaces
                .iter()
                .find(own)
                .filter(|i| is_mac(&i.mac))
                .map(|i| i.mac.clone())
                .unwrap_or_default(),
        }
    }

    /// Returns the pod's addresses, the first of each family first, as in the Kubernetes API.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let mut addresses: Vec<IpAddr> = Vec::new();
        for ip in self.pod_ips() {
            let address = ip.address.address();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }

    /// Returns the network's name servers.
    pub(super) fn dns(&self) -> &Dns {
        &self.dns
    }
}

/// Whether a text is a MAC address: six bytes in hexadecimal digits, separated by colons.
fn is_mac(text: &str) -> bool {
    let is_byte = |part: &str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
    text.split(':').count() == 6 && text.split(':').all(is_byte)
}

fn is_host_address(address: &IpAddr) -> bool {
    !(address.is_unspecified() || address.is_multicast() || address.is_loopback())
}

fn same_family(a: &IpAddr, b: &IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn good() -> Value {
        json!({
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": "br0", "mac": "02:00:00:00:00:01"},
                {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/x"},
            ],
            "ips": [
                {"address": "10.1.0.1/16", "interface": 0},
                {"address": "10.1.0.2/16", "gateway": "10.1.0.1", "interface": 1},
                {"address": "fd00::2/64", "interface": 1},
            ],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0"}],
            "dns": {"nameservers": ["10.1.0.1"]},
            "more": "of the future",
        })
    }

    #[test]
    fn the_pods_addresses_are_those_of_its_own_interfaces() {
        let result = CniResult::parse(&good(), "eth0").unwrap();
        let addresses: Vec<String> = result.addresses().iter().map(IpAddr::to_string).collect();
        assert_eq!(addresses, ["10.1.0.2", "fd00::2"]);
        assert_eq!(result.dns().nameservers, ["10.1.0.1"]);
        let endpoint = result.endpoint("eth0");
        assert_eq!(endpoint.addresses[0].to_string(), "10.1.0.2/16");
        assert_eq!(endpoint.gateway, Some("10.1.0.1".parse().unwrap()));
        assert_eq!(endpoint.mac, "02:00:00:00:00:02");
    }

    #[test]
    fn hostile_results_are_refused() {
        let long = vec![json!({"dst": "10.0.0.0/8"}); MAX_ROUTES + 1];
        for (pointer, value) in [
            ("/cniVersion", json!("9.0.0")),
            ("/cniVersion", json!(7)),
            ("/interfaces/1/name", json!("eth1")),
            ("/interfaces", json!("eth0")),
            ("/ips/1/address", json!("10.1.0.2")),
            ("/ips/1/address", json!("10.1.0.2/64")),
            ("/ips/1/address", json!("127.0.0.1/8")),
            ("/ips/1/address", json!("224.0.0.1/8")),
            ("/ips/1/gateway", json!("fd00::1")),
            ("/ips/1/interface", json!(2)),
            ("/ips/1/interface", json!(-1)),
            ("/routes/0/gw", json!("::1")),
            ("/routes", json!(long)),
            ("/dns/nameservers/0", json!("1.1.1.1\noptions evil")),
        ] {
            let mut result = good();
            *result.pointer_mut(pointer).unwrap() = value;
            let parsed = CniResult::parse(&result, "eth0");
            assert!(parsed.is_err(), "{pointer}: {parsed:?}");
        }
        let mut result = good();
        result["interfaces"][1]["mtu"] = json!(70000);
        assert!(CniResult::parse(&result, "eth0").is_err());
        for other in [json!(null), json!([]), json!("x"), json!({})] {
            assert!(CniResult::parse(&other, "eth0").is_err(), "{other}");
        }
    }

    /// As results of amazon-vpc-cni-k8s, with an interface that does not exist: its name is too
    /// long for one, and its MAC address is the number of a VLAN.
    #[test]
    fn notes_of_a_plugin_for_itself_do_not_matter() {
        let result = json!({
            "cniVersion": "0.4.0",
            "interfaces": [
                {"name": "eni3a52ce78d95"},
                {"name": "eth0", "sandbox": "/run/x"},
                {"name": "dummy3a52ce78d95", "mac": "0", "sandbox": "0"},
            ],
            "ips": [{"version": "4", "address": "10.1.0.2/32", "interface": 1}],
            "dns": {},
        });
        let result = CniResult::parse(&result, "eth0").unwrap();
        assert_eq!(result.addresses(), ["10.1.0.2".parse::<IpAddr>().unwrap()]);
        assert_eq!(result.endpoint("eth0").mac, "");
    }

    #[test]
    fn mac_addresses_are_six_bytes_and_nothing_else_is_shown_as_one() {
        let shown = |mac: &str| {
            let mut result = good();
            result["interfaces"][1]["mac"] = json!(mac);
            CniResult::parse(&result, "eth0")
                .unwrap()
                .endpoint("eth0")
                .mac
        };
        assert_eq!(shown("02:aB:00:00:00:ff"), "02:aB:00:00:00:ff");
        for bad in [
            "",
            "02:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:0",
            "02:00:00:00:00:+2",
            "gg:00:00:00:00:00",
        ] {
            assert_eq!(shown(bad), "", "{bad}");
        }
    }
}
