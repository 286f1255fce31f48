//! DHCP servers for guests with an operating system of their own: what each card's server gives,
//! its socket on the card's tap, and filters that keep the guest's requests from the network, where
//! another server might answer them.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use podvisor_dhcp::{
    Config, Ipv4Lease, Ipv4Neighbour, Ipv4Route, Ipv6Address, Ipv6Lease, Ipv6Router, MacAddress,
    SERVER_ADDRESS, open_socket,
};
use podvisor_host::blocking::in_place;
use rtnetlink::Handle;
use rtnetlink::packet_route::tc::{TcFilterU32Option, TcU32Key, TcU32Selector, TcU32SelectorFlags};

use super::error::CniError;
use super::networks::Cni;
use super::prefix::Prefix;
use super::result::Dns;
use super::{links, masquerade, netns};
use crate::guest::{GuestNetwork, Interface, Route};
use crate::tap::tap_name;

/// The server's address where the usual one is taken.
const OTHER_SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 67, 69);
/// Least MTU of IPv6.
const MIN_MTU_IPV6: u16 = 1280;
/// Most name servers and search domains that are given.
const MAX_NAME_SERVERS: usize = 16;
const MAX_SEARCH: usize = 32;
const MAX_NEIGHBOURS: usize = 64;

const IPV4: u16 = 0x0800_u16.to_be();
const ARP: u16 = 0x0806_u16.to_be();
const IPV6: u16 = 0x86dd_u16.to_be();

/// What a guest is called, and how it resolves names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestNames {
    /// Its host name; what comes after a dot is its domain.
    pub host_name: String,
    /// Name servers and search domains.
    pub dns: Dns,
}

/// A DHCP server that can be run in the pod's process.
#[derive(Debug)]
pub struct DhcpServer {
    /// A packet socket on the card's tap.
    pub socket: OwnedFd,
    /// What the server gives.
    pub config: Config,
}

impl Cni {
    /// Prepares a DHCP server for each card of the pod `id` that has an address. A card without one
    /// has none, so that a server of the network can be asked.
    ///
    /// # Errors
    /// The network has what cannot be given to a guest, or the kernel refuses.
    pub fn dhcp(
        &self,
        id: &str,
        network: &GuestNetwork,
        names: &GuestNames,
    ) -> Result<Vec<DhcpServer>, CniError> {
        let mut configs = Vec::new();
        for (number, interface) in network.interfaces.iter().enumerate() {
            if let Some(config) = config(interface, network, names)? {
                configs.push((number, config));
            }
        }
        if configs.is_empty() {
            return Ok(Vec::new());
        }
        let netns = self.netns(id);
        in_place(|| netns::enter(&netns, || open(configs)))
    }
}

/// Opens the sockets in this thread's network namespace.
fn open(configs: Vec<(usize, Config)>) -> Result<Vec<DhcpServer>, CniError> {
    links::with_netlink(async |handle| {
        let mut servers = Vec::new();
        for (number, config) in configs {
            let tap = tap_name(number);
            let mut config = config;
            let index = links::index_of(&handle, &tap).await?;
            match links::ipv4_of(&handle, index).await? {
                // The pod's end of a masqueraded card is the gateway, and the server as well.
                Some(address) => {
                    config.server = MacAddress(masquerade::MAC);
                    config.server_address = address;
                }
                None => keep_from_network(&handle, index, &config).await?,
            }
            let socket = open_socket(&tap, &config);
            let socket = socket.map_err(|source| CniError::DhcpSocket { source })?;
            servers.push(DhcpServer { socket, config });
        }
        Ok(servers)
    })
}

/// Derives what a card's server gives from the guest's network.
fn config(
    interface: &Interface,
    network: &GuestNetwork,
    names: &GuestNames,
) -> Result<Option<Config>, CniError> {
    let invalid = |reason: String| CniError::InvalidResult {
        name: interface.name.clone(),
        reason,
    };
    let mut addresses: Vec<Prefix> = Vec::new();
    for text in &interface.addresses {
        addresses.push(
            text.parse()
                .map_err(|_| invalid(format!("the address {text:?}")))?,
        );
    }
    let routes: Vec<&Route> = (network.routes.iter())
        .filter(|route| route.interface == interface.name)
        .collect();
    let mut config = Config::new(MacAddress(interface.mac));
    config.mtu = Some(interface.mtu);
    config.ipv4 = ipv4(&addresses, &routes);
    if interface.mtu >= MIN_MTU_IPV6 {
        config.ipv6 = ipv6(&addresses, &routes);
    }
    if config.ipv4.is_none() && config.ipv6.is_none() {
        return Ok(None);
    }
    let own = network
        .neighbours
        .iter()
        .filter(|one| one.interface == interface.name);
    let own = own.filter_map(|one| {
        let address = one.address.parse().ok()?;
        let mac = MacAddress(one.mac);
        Some(Ipv4Neighbour { address, mac })
    });
    config.neighbours = own.take(MAX_NEIGHBOURS).collect();
    let is_taken = |address: Ipv4Addr| {
        let lease = config.ipv4.as_ref();
        lease.is_some_and(|lease| {
            lease.address == address
                || lease
                    .routes
                    .iter()
                    .any(|route| route.gateway == Some(address))
        })
    };
    if is_taken(SERVER_ADDRESS) {
        config.server_address = OTHER_SERVER_ADDRESS;
    }
    take_names(&mut config, names);
    let valid = config.validate();
    valid.map_err(|error| invalid(error.to_string()))?;
    Ok(Some(config))
}

/// Takes names that a guest can be told; others are left out, as by other servers.
fn take_names(config: &mut Config, names: &GuestNames) {
    let (host, domain) = match names.host_name.split_once('.') {
        Some((host, domain)) => (host, Some(domain)),
        None => (names.host_name.as_str(), None),
    };
    let search = names
        .dns
        .search
        .iter()
        .filter(|name| podvisor_dhcp::is_domain_name(name));
    config.search = search.take(MAX_SEARCH).cloned().collect();
    config.host_name = podvisor_dhcp::is_host_name(host).then(|| host.to_owned());
    let domain = domain.filter(|name| podvisor_dhcp::is_domain_name(name));
    let domain = domain.map(str::to_owned);
    config.domain = domain.or_else(|| config.search.first().cloned());
    let servers = names
        .dns
        .nameservers
        .iter()
        .filter_map(|one| one.parse::<IpAddr>().ok());
    let servers = servers.filter(|one| !one.is_unspecified() && !one.is_multicast());
    config.name_servers = servers.take(MAX_NAME_SERVERS).collect();
}

fn ipv4(addresses: &[Prefix], routes: &[&Route]) -> Option<Ipv4Lease> {
    let (address, prefix_length) = addresses.iter().find_map(|one| match one.address() {
        IpAddr::V4(address) => Some((address, one.length())),
        IpAddr::V6(_) => None,
    })?;
    let route = |route: &&Route| {
        let destination: Prefix = route.destination.parse().ok()?;
        let IpAddr::V4(network) = destination.network().address() else {
            return None;
        };
        let gateway = match &route.gateway {
            Some(gateway) => Some(gateway.parse().ok()?),
            None => None,
        };
        Some(Ipv4Route {
            destination: network,
            prefix_length: destination.length(),
            gateway,
        })
    };
    Some(Ipv4Lease {
        address,
        prefix_length,
        routes: routes.iter().filter_map(route).collect(),
    })
}

/// The router is told by an address of the link only: where the gateway has another one, the guest
/// gets its default route by cloud-init alone.
fn ipv6(addresses: &[Prefix], routes: &[&Route]) -> Option<Ipv6Lease> {
    let own = addresses.iter().filter_map(|one| match one.address() {
        IpAddr::V6(address) => Some(Ipv6Address {
            address,
            prefix_length: one.length(),
        }),
        IpAddr::V4(_) => None,
    });
    let addresses: Vec<Ipv6Address> = own.collect();
    let gateway = routes
        .iter()
        .find_map(|route| match route.destination.as_str() {
            "::/0" => route.gateway.as_ref()?.parse().ok(),
            _ => None,
        });
    let router = match gateway {
        Some(IpAddr::V6(gateway)) if gateway.is_unicast_link_local() => Ipv6Router::Other(gateway),
        _ => Ipv6Router::None,
    };
    (!addresses.is_empty()).then_some(Ipv6Lease { addresses, router })
}

/// Keeps the guest's requests off the network behind the server's socket, which sees them before.
async fn keep_from_network(handle: &Handle, index: u32, config: &Config) -> Result<(), CniError> {
    // Places are those of the IP header: the protocol, and the port behind a header without options.
    let udp_4 = key(8, 0x00ff_0000, 17 << 16);
    let udp_6 = key(4, 0x0000_ff00, 17 << 8);
    let icmp_6 = key(4, 0x0000_ff00, 58 << 8);
    let server = config.server_address.to_bits();
    let mut filters = vec![(3, ARP, vec![key(24, u32::MAX, server)])];
    if config.ipv4.is_some() {
        filters.push((1, IPV4, vec![udp_4, key(20, 0xffff, 67)]));
    }
    if config.ipv6.is_some() {
        filters.push((2, IPV6, vec![udp_6, key(40, 0xffff, 547)]));
        filters.push((2, IPV6, vec![icmp_6, key(40, 0xff00_0000, 133 << 24)]));
    }
    let known = priorities(handle, index).await?;
    for (priority, protocol, keys) in filters {
        if known.contains(&priority) {
            // Those of an earlier machine of this pod are the same.
            continue;
        }
        divert(handle, index, priority, protocol, keys).await?;
    }
    Ok(())
}

/// Returns the priorities of the filters that the tap has.
async fn priorities(handle: &Handle, index: u32) -> Result<Vec<u16>, CniError> {
    let mut found = handle
        .traffic_filter(index.cast_signed())
        .get()
        .ingress()
        .execute();
    let mut priorities = Vec::new();
    while let Some(filter) = links::first(&mut found, "list the filters of the tap").await? {
        let [high, low, ..] = filter.header.info.to_be_bytes();
        priorities.push(u16::from_be_bytes([high, low]));
    }
    Ok(priorities)
}

/// A word of a packet, in the order of its bytes.
fn key(place: i32, mask: u32, value: u32) -> TcU32Key {
    let mut key = TcU32Key::default();
    key.mask = mask.to_be();
    key.val = value.to_be();
    key.off = place;
    key
}

/// Ends the way of such frames in the namespace's own network stack, in which nobody listens: a
/// filter without an action comes before the redirect, and needs no more of the kernel.
async fn divert(
    handle: &Handle,
    index: u32,
    priority: u16,
    protocol: u16,
    keys: Vec<TcU32Key>,
) -> Result<(), CniError> {
    let what = "keep the guest's DHCP requests on the tap";
    let mut selector = TcU32Selector::default();
    selector.flags = TcU32SelectorFlags::Terminal;
    selector.nkeys = u8::try_from(keys.len()).unwrap_or(u8::MAX);
    selector.keys = keys;
    let filter = handle
        .traffic_filter(index.cast_signed())
        .add()
        .parent(0xffff_0000)
        .priority(priority)
        .protocol(protocol)
        .u32(&[TcFilterU32Option::Selector(selector)]);
    let filter = filter.map_err(CniError::netlink(what))?;
    filter.execute().await.map_err(CniError::netlink(what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Neighbour;

    fn network() -> GuestNetwork {
        let interface = |name: &str, last, addresses: &[&str]| Interface {
            name: name.to_owned(),
            mac: [2, 0, 0, 0, 0, last],
            mtu: 1450,
            addresses: addresses.iter().map(|one| (*one).to_owned()).collect(),
            no_arp: false,
            is_down: false,
        };
        let route = |to: &str, by: Option<&str>, interface: &str| Route {
            destination: to.to_owned(),
            gateway: by.map(str::to_owned),
            interface: interface.to_owned(),
            ..Route::default()
        };
        GuestNetwork {
            interfaces: vec![
                interface("eth0", 2, &["10.244.7.3/32", "fd00::2/64", "10.0.0.9/8"]),
                interface("net1", 4, &[]),
            ],
            routes: vec![
                route("169.254.1.1/32", None, "eth0"),
                route("0.0.0.0/0", Some("169.254.1.1"), "eth0"),
                route("::/0", Some("fe80::1"), "eth0"),
                route("10.9.0.0/16", Some("10.9.0.1"), "net1"),
            ],
            neighbours: vec![Neighbour {
                address: "169.254.1.1".to_owned(),
                mac: [0xee; 6],
                interface: "eth0".to_owned(),
            }],
        }
    }

    fn names(host_name: &str) -> GuestNames {
        let list = |texts: &[&str]| texts.iter().map(|one| (*one).to_owned()).collect();
        GuestNames {
            host_name: host_name.to_owned(),
            dns: Dns {
                nameservers: list(&["10.96.0.10", "no address", "fd00::a"]),
                search: list(&["svc.cluster.local", ".", "a b"]),
                ..Dns::default()
            },
        }
    }

    #[test]
    fn a_card_gets_what_its_interface_had() {
        let network = network();
        let config = config(&network.interfaces[0], &network, &names("web.shop.example"));
        let config = config.unwrap().unwrap();
        let lease = config.ipv4.unwrap();
        assert_eq!(
            (lease.address.to_string().as_str(), lease.prefix_length),
            ("10.244.7.3", 32)
        );
        assert_eq!(lease.routes.len(), 2);
        assert_eq!(
            lease.routes[1].gateway,
            Some("169.254.1.1".parse().unwrap())
        );
        let lease = config.ipv6.unwrap();
        assert_eq!(lease.router, Ipv6Router::Other("fe80::1".parse().unwrap()));
        assert_eq!(lease.addresses.len(), 1);
        assert_eq!(config.mtu, Some(1450));
        assert_eq!(config.host_name.as_deref(), Some("web"));
        assert_eq!(config.domain.as_deref(), Some("shop.example"));
        assert_eq!(config.search, ["svc.cluster.local"]);
        assert_eq!(config.name_servers.len(), 2);
        assert_eq!(config.neighbours[0].mac, MacAddress([0xee; 6]));
        assert_eq!(config.server_address, SERVER_ADDRESS);
    }

    #[test]
    fn a_card_without_an_address_has_no_server() {
        let network = network();
        assert_eq!(
            config(&network.interfaces[1], &network, &names("web")).unwrap(),
            None
        );
    }

    #[test]
    fn a_gateway_that_has_the_servers_address_keeps_it() {
        let mut network = network();
        network.routes[1].gateway = Some(SERVER_ADDRESS.to_string());
        network.routes[2].gateway = Some("fd00::1".to_owned());
        let config = config(&network.interfaces[0], &network, &names("web"));
        let config = config.unwrap().unwrap();
        assert_eq!(config.server_address, OTHER_SERVER_ADDRESS);
        assert_eq!(config.ipv6.unwrap().router, Ipv6Router::None);
        assert_eq!(config.domain.as_deref(), Some("svc.cluster.local"));
    }

    #[test]
    fn small_links_have_no_ipv6_and_broken_addresses_are_told() {
        let mut network = network();
        network.interfaces[0].mtu = 1000;
        let made = config(&network.interfaces[0], &network, &names("web"));
        assert_eq!(made.unwrap().unwrap().ipv6, None);
        network.interfaces[0].addresses = vec!["10.0.0.1".to_owned()];
        let refused = config(&network.interfaces[0], &network, &names("web"));
        assert!(
            matches!(refused, Err(CniError::InvalidResult { .. })),
            "{refused:?}"
        );
    }
}
