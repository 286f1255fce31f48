//! The network configuration of a request, checked before anything is changed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use podvisor_agent_protocol::{api, limits};

/// A request that the agent does not accept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// More than the limit.
    #[error("more than {limit} {what}")]
    TooMany {
        /// The objects.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// Malformed.
    #[error("{text:?} is not a valid {what}")]
    Invalid {
        /// The expected form.
        what: &'static str,
        /// The given text.
        text: String,
    },
    /// Two interfaces with the same name or the same card.
    #[error("duplicate interface {0:?}")]
    Double(String),
    /// A route through an interface that the request does not configure.
    #[error("route {destination} goes through {interface:?}, which is not configured")]
    UnknownInterface {
        /// The destination.
        destination: Prefix,
        /// The name given.
        interface: String,
    },
    /// A neighbour on an interface that the request does not configure.
    #[error("neighbour {address} is on {interface:?}, which is not configured")]
    UnknownNeighbourInterface {
        /// The neighbour's address.
        address: IpAddr,
        /// The name given.
        interface: String,
    },
    /// A gateway or source of the other address family.
    #[error("route {destination} has {address}, which is of another address family")]
    Family {
        /// The destination.
        destination: Prefix,
        /// The gateway or source.
        address: IpAddr,
    },
}

/// An address with the length of its network's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// The address, host bits included.
    pub address: IpAddr,
    /// 0 to 32 or 128.
    pub length: u8,
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl Prefix {
    fn parse(text: &str, what: &'static str) -> Result<Self, PlanError> {
        let parse = || {
            let (address, length) = text.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let longest = if address.is_ipv4() { 32 } else { 128 };
            let digits = length.bytes().all(|byte| byte.is_ascii_digit());
            let length: u8 = digits.then(|| length.parse().ok())??;
            (length <= longest).then_some(Self { address, length })
        };
        parse().ok_or_else(|| invalid(what, text))
    }

    /// Returns the network's address: host bits are 0.
    pub(super) fn network(self) -> IpAddr {
        match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX
                    .checked_shl(32 - u32::from(self.length))
                    .unwrap_or(0);
                Ipv4Addr::from_bits(address.to_bits() & mask).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX
                    .checked_shl(128 - u32::from(self.length))
                    .unwrap_or(0);
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
        }
    }

    /// Returns the broadcast address of an IPv4 network that has room for one.
    pub(super) fn broadcast(self) -> Option<Ipv4Addr> {
        let IpAddr::V4(address) = self.address else {
            return None;
        };
        let hosts = u32::MAX.checked_shr(u32::from(self.length)).unwrap_or(0);
        (self.length < 31).then(|| Ipv4Addr::from_bits(address.to_bits() | hosts))
    }
}

/// A network interface to configure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The address that identifies the card.
    pub mac: [u8; 6],
    /// The address that the card has before it gets `mac`.
    pub present_mac: Option<[u8; 6]>,
    /// The name it gets.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<Prefix>,
    /// In bytes; `None`: unchanged.
    pub mtu: Option<u32>,
    /// No neighbour is asked for its hardware address.
    pub no_arp: bool,
}

/// A route to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The destination.
    pub destination: Prefix,
    /// The gateway; `None`: on the link.
    pub gateway: Option<IpAddr>,
    /// Name of one of the plan's interfaces.
    pub interface: String,
    /// The largest packet in bytes; `None`: the interface's.
    pub mtu: Option<u32>,
    /// Its metric; `None`: the kernel's default.
    pub metric: Option<u32>,
    /// The address that packets are sent from; `None`: the kernel's choice.
    pub source: Option<IpAddr>,
}

/// A static neighbour to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// The neighbour's address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Name of one of the plan's interfaces.
    pub interface: String,
}

/// The planned network of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order of the request.
    pub interfaces: Vec<Interface>,
    /// On-link ones first, because gateways are reached through them.
    pub routes: Vec<Route>,
    /// In the order of the request.
    pub neighbours: Vec<Neighbour>,
}

impl Plan {
    /// Checks a request.
    ///
    /// # Errors
    ///
    /// [`PlanError`].
    pub fn new(request: &api::ConfigureRequest) -> Result<Self, PlanError> {
        bounded("interfaces", request.interfaces.len(), limits::INTERFACES)?;
        bounded("routes", request.routes.len(), limits::ROUTES)?;
        bounded("neighbours", request.neighbours.len(), limits::NEIGHBOURS)?;
        let mut interfaces: Vec<Interface> = Vec::new();
        for wanted in &request.interfaces {
            let interface = Interface::new(wanted)?;
            if interfaces.iter().any(|other| other.name == interface.name) {
                return Err(PlanError::Double(interface.name));
            }
            interfaces.push(interface);
        }
        let mut routes = request
            .routes
            .iter()
            .map(|wanted| Route::new(wanted, &interfaces))
            .collect::<Result<Vec<Route>, PlanError>>()?;
        routes.sort_by_key(|route| route.gateway.is_some());
        let neighbours = request
            .neighbours
            .iter()
            .map(|wanted| Neighbour::new(wanted, &interfaces))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            interfaces,
            routes,
            neighbours,
        })
    }
}

impl Interface {
    fn new(wanted: &api::Interface) -> Result<Self, PlanError> {
        bounded("addresses", wanted.addresses.len(), limits::ADDRESSES)?;
        let present_mac = match wanted.present_mac.as_str() {
            "" => None,
            text => Some(mac(text)?),
        };
        let mac = mac(&wanted.mac)?;
        let name = &wanted.name;
        // Names that the kernel accepts (dev_valid_name) and that are safe in a sysctl path.
        let valid = (1..=limits::INTERFACE_NAME_BYTES).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%'))
            && name != "."
            && name != "..";
        if !valid || name == "lo" {
            return Err(invalid("interface name", name));
        }
        let mtu = (wanted.mtu > 0).then_some(wanted.mtu);
        if mtu.is_some_and(|mtu| !(68..=65_535).contains(&mtu)) {
            return Err(invalid("MTU", &wanted.mtu.to_string()));
        }
        let addresses = wanted
            .addresses
            .iter()
            .map(|text| Prefix::parse(text, "address with a prefix length"))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            mac,
            present_mac,
            name: name.clone(),
            addresses,
            mtu,
            no_arp: wanted.no_arp,
        })
    }
}

impl Route {
    fn new(wanted: &api::Route, interfaces: &[Interface]) -> Result<Self, PlanError> {
        let destination = Prefix::parse(&wanted.destination, "prefix")?;
        let address = |what, text: &str| -> Result<Option<IpAddr>, PlanError> {
            if text.is_empty() {
                return Ok(None);
            }
            let address: IpAddr = text.parse().map_err(|_| invalid(what, text))?;
            if address.is_ipv4() != destination.address.is_ipv4() {
                return Err(PlanError::Family {
                    destination,
                    address,
                });
            }
            Ok(Some(address))
        };
        let gateway = address("gateway", &wanted.gateway)?;
        let source = address("source address", &wanted.source)?;
        if !interfaces.iter().any(|i| i.name == wanted.interface) {
            return Err(PlanError::UnknownInterface {
                destination,
                interface: short(&wanted.interface),
            });
        }
        Ok(Self {
            destination,
            gateway,
            interface: wanted.interface.clone(),
            mtu: Some(wanted.mtu).filter(|mtu| *mtu != 0),
            metric: Some(wanted.metric).filter(|metric| *metric != 0),
            source,
        })
    }
}

impl Neighbour {
    fn new(wanted: &api::Neighbour, interfaces: &[Interface]) -> Result<Self, PlanError> {
        let address = &wanted.address;
        let address = address.parse().map_err(|_| invalid("address", address))?;
        if !interfaces.iter().any(|i| i.name == wanted.interface) {
            return Err(PlanError::UnknownNeighbourInterface {
                address,
                interface: short(&wanted.interface),
            });
        }
        Ok(Self {
            address,
            mac: mac(&wanted.mac)?,
            interface: wanted.interface.clone(),
        })
    }
}

fn bounded(what: &'static str, count: usize, limit: usize) -> Result<(), PlanError> {
    if count <= limit {
        Ok(())
    } else {
        Err(PlanError::TooMany { what, limit })
    }
}

fn invalid(what: &'static str, text: &str) -> PlanError {
    PlanError::Invalid {
        what,
        text: short(text),
    }
}

fn short(text: &str) -> String {
    text.chars().take(64).collect()
}

fn mac(text: &str) -> Result<[u8; 6], PlanError> {
    parse_mac(text).ok_or_else(|| invalid("MAC address", text))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next()?;
        let hex = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        *byte = hex.then(|| u8::from_str_radix(part, 16).ok())??;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn interface(name: &str, mac: &str, addresses: &[&str]) -> api::Interface {
        api::Interface {
            mac: mac.into(),
            name: name.into(),
            addresses: addresses.iter().map(|&a| a.into()).collect(),
            ..Default::default()
        }
    }

    fn route(destination: &str, gateway: &str) -> api::Route {
        api::Route {
            destination: destination.into(),
            gateway: gateway.into(),
            interface: "eth0".into(),
            ..Default::default()
        }
    }

    fn plan(interfaces: Vec<api::Interface>, routes: Vec<api::Route>) -> Result<Plan, PlanError> {
        Plan::new(&api::ConfigureRequest {
            interfaces,
            routes,
            ..Default::default()
        })
    }

    const MAC: &str = "02:00:00:00:00:0a";

    #[test]
    fn a_pods_usual_network_is_taken_with_link_routes_first() {
        let plan = plan(
            vec![interface("eth0", MAC, &["10.0.0.2/32", "fd00::2/64"])],
            vec![
                route("0.0.0.0/0", "169.254.1.1"),
                route("169.254.1.1/32", ""),
                route("::/0", "fe80::1"),
            ],
        )
        .unwrap();
        assert_eq!(plan.interfaces[0].mac, [2, 0, 0, 0, 0, 10]);
        assert_eq!(plan.interfaces[0].mtu, None);
        let order: Vec<String> = plan
            .routes
            .iter()
            .map(|route| route.destination.to_string())
            .collect();
        assert_eq!(order, ["169.254.1.1/32", "0.0.0.0/0", "::/0"]);
    }

    #[test]
    fn networks_and_broadcasts_follow_from_the_prefix() {
        let prefix = |text| Prefix::parse(text, "prefix").unwrap();
        assert_eq!(prefix("10.1.2.3/24").network(), IpAddr::from([10, 1, 2, 0]));
        assert_eq!(prefix("10.1.2.3/0").network(), IpAddr::from([0, 0, 0, 0]));
        assert_eq!(prefix("10.1.2.3/32").network(), IpAddr::from([10, 1, 2, 3]));
        assert_eq!(prefix("fd00::7/64").network().to_string(), "fd00::");
        assert_eq!(prefix("fd00::7/0").network().to_string(), "::");
        assert_eq!(
            prefix("10.1.2.3/24").broadcast(),
            Some(Ipv4Addr::new(10, 1, 2, 255))
        );
        assert_eq!(prefix("10.1.2.3/31").broadcast(), None);
        assert_eq!(prefix("fd00::7/64").broadcast(), None);
    }

    #[test]
    fn what_is_malformed_is_refused() {
        for address in [
            "",
            "10.0.0.2",
            "10.0.0.2/33",
            "10.0.0/8",
            "fd00::/129",
            "1.2.3.4/+8",
            "x/1",
        ] {
            let result = plan(vec![interface("eth0", MAC, &[address])], vec![]);
            assert!(result.is_err(), "{address:?}");
        }
        for mac in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:0a:0b",
            "2:0:0:0:0:a",
            "02:00:00:00:00:+a",
        ] {
            assert!(plan(vec![interface("eth0", mac, &[])], vec![]).is_err());
        }
        for name in [
            "",
            "lo",
            ".",
            "..",
            "a/b",
            "a b",
            "a:1",
            "a%d",
            "sixteen-letters-",
        ] {
            let result = plan(vec![interface(name, MAC, &[])], vec![]);
            assert!(result.is_err(), "{name:?}");
        }
        for mtu in [1, 67, 65_536] {
            let mut wanted = interface("eth0", MAC, &[]);
            wanted.mtu = mtu;
            assert!(plan(vec![wanted], vec![]).is_err(), "{mtu}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let eth0 = || interface("eth0", MAC, &[]);
        let twice = plan(vec![eth0(), eth0()], vec![]);
        assert_eq!(twice, Err(PlanError::Double("eth0".into())));
        let family = plan(vec![eth0()], vec![route("0.0.0.0/0", "fe80::1")]);
        assert!(matches!(family, Err(PlanError::Family { .. })));
        let nowhere = plan(vec![], vec![route("0.0.0.0/0", "")]);
        assert!(matches!(nowhere, Err(PlanError::UnknownInterface { .. })));
        let many = plan(vec![eth0()], vec![route("::/0", ""); limits::ROUTES + 1]);
        assert!(matches!(many, Err(PlanError::TooMany { .. })));
    }

    #[test]
    fn neighbours_have_addresses_and_are_on_interfaces_of_the_plan() {
        let with = |neighbours: Vec<api::Neighbour>| {
            Plan::new(&api::ConfigureRequest {
                interfaces: vec![interface("eth0", MAC, &[])],
                neighbours,
                ..Default::default()
            })
        };
        let neighbour = |address: &str, mac: &str, interface: &str| api::Neighbour {
            address: address.into(),
            mac: mac.into(),
            interface: interface.into(),
            ..Default::default()
        };
        let good = || neighbour("169.254.1.1", "02:00:00:00:00:01", "eth0");
        assert_eq!(
            with(vec![good()]).unwrap().neighbours[0].mac,
            [2, 0, 0, 0, 0, 1]
        );
        for bad in [
            neighbour("169.254.1.1/32", "02:00:00:00:00:01", "eth0"),
            neighbour("169.254.1.1", "", "eth0"),
            neighbour("169.254.1.1", "02:00:00:00:00:01", "eth1"),
        ] {
            assert!(with(vec![bad.clone()]).is_err(), "{bad:?}");
        }
        let many = with(vec![good(); limits::NEIGHBOURS + 1]);
        assert!(matches!(many, Err(PlanError::TooMany { .. })));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,40}|[0-9a-f:./]{0,40}") {
            let _ = (parse_mac(&text), Prefix::parse(&text, "prefix").map(|prefix| {
                (prefix.network(), prefix.broadcast())
            }));
        }
    }
}
