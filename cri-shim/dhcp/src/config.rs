//! What a server gives to its guest, and the checks of it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::names;

/// The server's own address where it is not the gateway's: on the link, and none that a network
/// plugin or a cloud is known to use.
pub const SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 67, 68);

/// Most name servers of a guest.
const MAX_NAME_SERVERS: usize = 16;
/// Most domains in which a guest searches for names.
const MAX_SEARCH: usize = 32;
/// Most routes of a lease.
const MAX_ROUTES: usize = 256;
/// Most neighbours that the server answers for.
const MAX_NEIGHBOURS: usize = 64;
/// Most IPv6 addresses of a lease.
const MAX_IPV6: usize = 16;
/// Most options that its user chooses.
const MAX_OTHERS: usize = 40;
/// Most bytes of one of them.
const MAX_OTHER: usize = 255;
/// Smallest MTU over which IPv4 runs (RFC 791 §3.2).
const MIN_MTU: u16 = 68;
/// Smallest MTU over which IPv6 runs (RFC 8200 §5).
const MIN_MTU_IPV6: u16 = 1280;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// All cards on the link.
    pub(crate) const BROADCAST: Self = Self([0xff; 6]);

    /// Whether a card can have it: it is neither a group's nor zero.
    #[must_use]
    pub fn is_card(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    /// The IPv6 address on the link that belongs to it (RFC 4291, appendix A).
    #[must_use]
    pub fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        let (a, b) = (
            u16::from_be_bytes([a ^ 2, b]),
            u16::from_be_bytes([c, 0xff]),
        );
        let (c, d) = (u16::from_be_bytes([0xfe, d]), u16::from_be_bytes([e, f]));
        Ipv6Addr::new(0xfe80, 0, 0, 0, a, b, c, d)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl From<[u8; 6]> for MacAddress {
    fn from(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }
}

/// All that a server knows: whom it answers, and with what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The guest's card; nobody else gets an answer.
    pub client: MacAddress,
    /// The server's card, as the guest sees it.
    pub server: MacAddress,
    /// The server's address, by which it is asked for renewals; [`SERVER_ADDRESS`], or the
    /// gateway's if that is on the same tap. ARP requests for it are answered.
    pub server_address: Ipv4Addr,
    /// Neighbours that do not answer ARP requests themselves, as the gateways of some networks.
    #[serde(default)]
    pub neighbours: Vec<Ipv4Neighbour>,
    /// Bytes in the largest packet of the network, unless it is Ethernet's 1500.
    #[serde(default)]
    pub mtu: Option<u16>,
    /// The guest's name, without a domain.
    #[serde(default)]
    pub host_name: Option<String>,
    /// The guest's domain.
    #[serde(default)]
    pub domain: Option<String>,
    /// Domains in which names are searched, in this order.
    #[serde(default)]
    pub search: Vec<String>,
    /// Servers that resolve names, of both families, in this order.
    #[serde(default)]
    pub name_servers: Vec<IpAddr>,
    /// What else DHCP says, in the user's words.
    #[serde(default)]
    pub others: Vec<Ipv4Option>,
    /// The IPv4 address; without one, DHCP is not answered.
    #[serde(default)]
    pub ipv4: Option<Ipv4Lease>,
    /// The IPv6 addresses; without them, neither DHCPv6 nor router solicitations are answered.
    #[serde(default)]
    pub ipv6: Option<Ipv6Lease>,
}

/// An option of DHCP that nothing else here decides: the time servers (42), the name of a boot
/// server (66) and of its file (67), and private ones (224 to 254).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv4Option {
    /// Its number (RFC 2132).
    pub code: u8,
    /// Its value as it is sent, 1 to 255 bytes.
    pub value: Vec<u8>,
}

impl Ipv4Option {
    /// The option of time servers.
    pub const TIME_SERVERS: u8 = 42;
    /// The option of a boot server's name.
    pub const BOOT_SERVER: u8 = 66;
    /// The option of a boot file's name.
    pub const BOOT_FILE: u8 = 67;

    fn check(&self, errors: &mut Vec<ConfigError>) {
        let is_free = matches!(
            self.code,
            Self::TIME_SERVERS | Self::BOOT_SERVER | Self::BOOT_FILE | 224..=254
        );
        if !is_free || !(1..=MAX_OTHER).contains(&self.value.len()) {
            errors.push(ConfigError::Option {
                code: self.code,
                bytes: self.value.len(),
            });
        }
    }
}

/// A neighbour for which the server answers ARP requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv4Neighbour {
    /// Its address.
    pub address: Ipv4Addr,
    /// Its card.
    pub mac: MacAddress,
}

/// The guest's IPv4 address and routes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv4Lease {
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Bits of the network's part of the address; with 32 nothing but the routes is reachable.
    pub prefix_length: u8,
    /// Routes, in any order. Gateways outside the address's network get a route of their own.
    #[serde(default)]
    pub routes: Vec<Ipv4Route>,
}

/// One IPv4 route of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv4Route {
    /// The destination; `0.0.0.0` with a length of 0 is the default route.
    pub destination: Ipv4Addr,
    /// Bits of the destination that count.
    pub prefix_length: u8,
    /// The next hop; `None` if the destination is on the link.
    #[serde(default)]
    pub gateway: Option<Ipv4Addr>,
}

/// The guest's IPv6 addresses and its router.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv6Lease {
    /// The guest's addresses.
    pub addresses: Vec<Ipv6Address>,
    /// Who is the default router.
    pub router: Ipv6Router,
}

/// One IPv6 address of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ipv6Address {
    /// The address.
    pub address: Ipv6Addr,
    /// Bits of the network's part; neighbours in it are on the link, unless it is 128.
    pub prefix_length: u8,
}

/// In whose name the server sends router advertisements. The protocol names a router by the
/// source of its advertisement only, so it is always an address of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ipv6Router {
    /// There is none: advertisements say how addresses are got, and that this is no router.
    None,
    /// The server's card, whose address is [`MacAddress::link_local`] of it.
    Server,
    /// Another one on the link, by its address there.
    Other(Ipv6Addr),
}

/// What is wrong with one part of a [`Config`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A MAC address that no card has, or both cards have.
    #[error("{0} cannot be the MAC address of the {1}: give each card its own unicast address")]
    Mac(MacAddress, &'static str),
    /// An address that no host has.
    #[error("{0} cannot be the address of the {1}")]
    Address(IpAddr, &'static str),
    /// Two hosts with one address.
    #[error("the server's address {0} is the guest's: give it another one")]
    SameAddress(Ipv4Addr),
    /// A length that no prefix of the family has.
    #[error("{0}/{1} is not an address and the length of its prefix")]
    Prefix(IpAddr, u8),
    /// A text that is not a domain name.
    #[error("the {1} {0:?} is not a domain name")]
    Name(String, &'static str),
    /// An MTU that the protocols do not run over.
    #[error("an MTU of {0} bytes is less than {1}, the least for the guest's addresses")]
    Mtu(u16, u16),
    /// An option that cannot be chosen, or its value.
    #[error(
        "{bytes} bytes of DHCP's option {code}: the options 42, 66, 67 and 224 to 254 may have 1 \
         to {MAX_OTHER}"
    )]
    Option {
        /// Its number.
        code: u8,
        /// Bytes of its value.
        bytes: usize,
    },
    /// Too many of one kind.
    #[error("{count} {what}: at most {most} fit into an answer")]
    TooMany {
        /// How many there are.
        count: usize,
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
}

/// All that is wrong with a [`Config`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid configuration of a guest's DHCP server: {}", list(.0))]
pub struct InvalidConfig(pub Vec<ConfigError>);

fn list(errors: &[ConfigError]) -> String {
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    errors.join("; ")
}

impl Config {
    /// Creates the configuration of a server that gives nothing yet, for the guest's card `client`.
    /// Its own card is one that no other card on the link has: the guest's own, with another bit.
    #[must_use]
    pub fn new(client: MacAddress) -> Self {
        let [first, a, b, c, d, last] = client.0;
        Self {
            client,
            // Locally administered, as no vendor's is.
            server: MacAddress([(first | 2) & 0xfe, a, b, c, d, last ^ 1]),
            server_address: SERVER_ADDRESS,
            neighbours: Vec::new(),
            mtu: None,
            host_name: None,
            domain: None,
            search: Vec::new(),
            name_servers: Vec::new(),
            others: Vec::new(),
            ipv4: None,
            ipv6: None,
        }
    }

    /// Checks all fields, and returns all faults at once.
    ///
    /// # Errors
    ///
    /// At least one field has a value that cannot be sent to a guest.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let mut errors = Vec::new();
        self.check_cards(&mut errors);
        self.check_names(&mut errors);
        if let Some(lease) = &self.ipv4 {
            self.check_ipv4(lease, &mut errors);
        }
        if let Some(lease) = &self.ipv6 {
            lease.check(&mut errors);
        }
        let least = match self.ipv6 {
            Some(_) => MIN_MTU_IPV6,
            None => MIN_MTU,
        };
        if let Some(mtu) = self.mtu
            && mtu < least
        {
            errors.push(ConfigError::Mtu(mtu, least));
        }
        for server in &self.name_servers {
            if server.is_unspecified() || server.is_multicast() {
                errors.push(ConfigError::Address(*server, "name server"));
            }
        }
        too_many(
            self.name_servers.len(),
            "name servers",
            MAX_NAME_SERVERS,
            &mut errors,
        );
        too_many(self.search.len(), "search domains", MAX_SEARCH, &mut errors);
        too_many(self.others.len(), "options", MAX_OTHERS, &mut errors);
        for option in &self.others {
            option.check(&mut errors);
        }
        match errors.is_empty() {
            true => Ok(()),
            false => Err(InvalidConfig(errors)),
        }
    }

    fn check_cards(&self, errors: &mut Vec<ConfigError>) {
        if !self.client.is_card() {
            errors.push(ConfigError::Mac(self.client, "guest"));
        }
        if !self.server.is_card() || self.server == self.client {
            errors.push(ConfigError::Mac(self.server, "server"));
        }
        if !is_host(self.server_address) {
            errors.push(ConfigError::Address(self.server_address.into(), "server"));
        }
        too_many(self.neighbours.len(), "neighbours", MAX_NEIGHBOURS, errors);
        for neighbour in &self.neighbours {
            if !is_host(neighbour.address) {
                errors.push(ConfigError::Address(neighbour.address.into(), "neighbour"));
            }
            if !neighbour.mac.is_card() {
                errors.push(ConfigError::Mac(neighbour.mac, "neighbour"));
            }
        }
    }

    fn check_names(&self, errors: &mut Vec<ConfigError>) {
        if let Some(name) = &self.host_name
            && !names::is_label(name)
        {
            errors.push(ConfigError::Name(name.clone(), "host name"));
        }
        if let Some(name) = &self.domain
            && !names::is_name(name)
        {
            errors.push(ConfigError::Name(name.clone(), "domain"));
        }
        for name in &self.search {
            if !names::is_name(name) {
                errors.push(ConfigError::Name(name.clone(), "search domain"));
            }
        }
    }

    fn check_ipv4(&self, lease: &Ipv4Lease, errors: &mut Vec<ConfigError>) {
        if !is_host(lease.address) {
            errors.push(ConfigError::Address(lease.address.into(), "guest"));
        }
        if lease.address == self.server_address {
            errors.push(ConfigError::SameAddress(lease.address));
        }
        if !(1..=32).contains(&lease.prefix_length) {
            let address = lease.address.into();
            errors.push(ConfigError::Prefix(address, lease.prefix_length));
        }
        too_many(lease.routes.len(), "routes", MAX_ROUTES, errors);
        for route in &lease.routes {
            if route.prefix_length > 32 {
                let destination = route.destination.into();
                errors.push(ConfigError::Prefix(destination, route.prefix_length));
            }
            if let Some(gateway) = route.gateway
                && !is_host(gateway)
            {
                errors.push(ConfigError::Address(gateway.into(), "gateway"));
            }
        }
    }
}

impl Ipv6Lease {
    fn check(&self, errors: &mut Vec<ConfigError>) {
        too_many(self.addresses.len(), "IPv6 addresses", MAX_IPV6, errors);
        for own in &self.addresses {
            let address = own.address;
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                errors.push(ConfigError::Address(address.into(), "guest"));
            }
            if !(1..=128).contains(&own.prefix_length) {
                errors.push(ConfigError::Prefix(address.into(), own.prefix_length));
            }
        }
        if let Ipv6Router::Other(router) = self.router
            && !router.is_unicast_link_local()
        {
            errors.push(ConfigError::Address(router.into(), "router on the link"));
        }
    }
}

impl Ipv4Lease {
    /// The mask of the address's network.
    pub(crate) fn mask(&self) -> Ipv4Addr {
        mask(self.prefix_length)
    }

    /// Whether `address` is in the address's network.
    pub(crate) fn is_neighbour(&self, address: Ipv4Addr) -> bool {
        self.address & self.mask() == address & self.mask()
    }
}

impl Ipv4Route {
    /// Whether it is taken where no other one is.
    pub(crate) fn is_default(&self) -> bool {
        self.prefix_length == 0
    }

    /// Whether it covers `address`.
    pub(crate) fn covers(&self, address: Ipv4Addr) -> bool {
        let mask = mask(self.prefix_length);
        self.destination & mask == address & mask
    }
}

/// Returns the mask whose first `length` bits are set.
pub(crate) fn mask(length: u8) -> Ipv4Addr {
    let host = 32_u32.saturating_sub(length.into());
    Ipv4Addr::from_bits(u32::MAX.checked_shl(host).unwrap_or(0))
}

fn is_host(address: Ipv4Addr) -> bool {
    !(address.is_unspecified()
        || address.is_multicast()
        || address.is_broadcast()
        || address.is_loopback())
}

fn too_many(count: usize, what: &'static str, most: usize, errors: &mut Vec<ConfigError>) {
    if count > most {
        errors.push(ConfigError::TooMany { count, what, most });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const CLIENT: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
    pub(crate) const SERVER: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

    /// A pod in a bridge's network, with one default route.
    pub(crate) fn plain() -> Config {
        Config {
            client: CLIENT,
            server: SERVER,
            server_address: SERVER_ADDRESS,
            neighbours: Vec::new(),
            mtu: Some(1450),
            host_name: Some("web".to_owned()),
            domain: Some("shop.svc.cluster.local".to_owned()),
            search: vec![
                "shop.svc.cluster.local".to_owned(),
                "svc.cluster.local".to_owned(),
            ],
            name_servers: vec!["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()],
            others: Vec::new(),
            ipv4: Some(Ipv4Lease {
                address: "10.1.0.2".parse().unwrap(),
                prefix_length: 16,
                routes: vec![route("0.0.0.0", 0, Some("10.1.0.1"))],
            }),
            ipv6: Some(Ipv6Lease {
                addresses: vec![Ipv6Address {
                    address: "fd00::2".parse().unwrap(),
                    prefix_length: 64,
                }],
                router: Ipv6Router::Server,
            }),
        }
    }

    pub(crate) fn route(to: &str, prefix_length: u8, gateway: Option<&str>) -> Ipv4Route {
        Ipv4Route {
            destination: to.parse().unwrap(),
            prefix_length,
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        }
    }

    #[test]
    fn masks_have_as_many_bits_as_asked() {
        for (length, expected) in [
            (0, "0.0.0.0"),
            (1, "128.0.0.0"),
            (24, "255.255.255.0"),
            (31, "255.255.255.254"),
            (32, "255.255.255.255"),
        ] {
            assert_eq!(mask(length).to_string(), expected);
        }
    }

    #[test]
    fn the_address_on_the_link_is_made_of_the_cards() {
        let mac = MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        assert_eq!(mac.link_local().to_string(), "fe80::5054:ff:fe12:3456");
        assert_eq!(mac.to_string(), "52:54:00:12:34:56");
    }

    #[test]
    fn a_new_server_has_a_card_that_the_guest_has_not() {
        for client in [
            CLIENT,
            MacAddress([0x52, 0x54, 0, 1, 2, 3]),
            MacAddress([0; 6]),
        ] {
            let config = Config::new(client);
            assert!(config.server.is_card());
            assert_ne!(config.server, client);
            assert_eq!(config.server.0[0] & 2, 2);
        }
        assert_eq!(Config::new(CLIENT).validate(), Ok(()));
    }

    #[test]
    fn all_faults_are_told_at_once() {
        let mut config = plain();
        assert_eq!(config.validate(), Ok(()));
        config.client = MacAddress::BROADCAST;
        config.server_address = "10.1.0.2".parse().unwrap();
        config.mtu = Some(500);
        config.host_name = Some("a b".to_owned());
        config.search = vec!["x\n".to_owned()];
        config.name_servers = vec!["0.0.0.0".parse().unwrap(); MAX_NAME_SERVERS + 1];
        config.ipv4.as_mut().unwrap().prefix_length = 33;
        config.ipv4.as_mut().unwrap().routes = vec![route("0.0.0.0", 0, Some("224.0.0.1"))];
        config.ipv6.as_mut().unwrap().router = Ipv6Router::Other("fd00::1".parse().unwrap());
        let errors = config.validate().unwrap_err();
        let text = errors.to_string();
        for part in [
            "ff:ff:ff:ff:ff:ff",
            "10.1.0.2 is the guest's",
            "10.1.0.2/33",
            "MTU of 500",
            "\"a b\"",
            "\"x\\n\"",
            "0.0.0.0",
            "17 name servers",
            "224.0.0.1",
            "fd00::1",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_configuration_is_the_same_after_its_way_to_the_jail() {
        let text = serde_json::to_string(&plain()).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), plain());
    }
}
