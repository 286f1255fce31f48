//! The guest's network, in the three forms that cloud-init reads.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What the guest is told about its network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkConfig {
    /// Nothing: it asks by DHCP, or keeps what it has on its disk.
    #[default]
    None,
    /// cloud-init's own form, for its versions of before 2018.
    Version1(Network),
    /// The form of netplan.
    Version2(Network),
    /// The user's own document.
    Document(String),
}

/// A guest's network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// All cards; the default route of the first one that has one is taken, and no other.
    pub nics: Vec<NetworkNic>,
    /// Servers that resolve names.
    #[serde(default)]
    pub name_servers: Vec<IpAddr>,
    /// Domains in which names are searched.
    #[serde(default)]
    pub search: Vec<String>,
}

/// One card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkNic {
    /// Its name in the document; the guest finds it by its MAC address.
    pub name: String,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Bytes of its largest packet, unless it is the default.
    #[serde(default)]
    pub mtu: Option<u16>,
    /// Its addresses with the lengths of their prefixes.
    #[serde(default)]
    pub addresses: Vec<(IpAddr, u8)>,
    /// Its routes.
    #[serde(default)]
    pub routes: Vec<NetworkRoute>,
    /// What it asks for besides.
    #[serde(default)]
    pub dhcp: Dhcp,
}

/// One route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkRoute {
    /// Destination and length of its prefix; 0 for the default route.
    pub destination: (IpAddr, u8),
    /// The next hop; `None` if the destination is on the link.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// Its metric, unless it has none.
    #[serde(default)]
    pub metric: Option<u32>,
}

/// Which protocols give a card its addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dhcp {
    /// None: its addresses are given here; a card without one asks by DHCP.
    #[default]
    No,
    /// DHCP.
    Ipv4,
    /// DHCPv6.
    Ipv6,
    /// Both.
    Both,
}

impl Network {
    /// Version 1 of cloud-init's form. A route to a gateway outside the card's networks has no
    /// word in it; the guest's own tools add it where they can.
    pub(crate) fn version_1(&self) -> Value {
        let nics = self.nics.iter().zip(self.routes());
        let mut config: Vec<Value> = nics
            .map(|(nic, routes)| {
                let mut one = nic.base("mac_address");
                one.insert("type".to_owned(), json!("physical"));
                one.insert("name".to_owned(), json!(nic.name));
                one.insert("subnets".to_owned(), nic.subnets(&routes));
                Value::Object(one)
            })
            .collect();
        if let Some(servers) = self.servers("address") {
            let mut servers = servers;
            servers.insert("type".to_owned(), json!("nameserver"));
            config.push(Value::Object(servers));
        }
        json!({"version": 1, "config": config})
    }

    /// Version 2, netplan's form.
    pub(crate) fn version_2(&self) -> Value {
        let nics = self.nics.iter().zip(self.routes());
        let ethernets = nics.map(|(nic, routes)| {
            let mut one = nic.base("");
            one.insert("match".to_owned(), json!({"macaddress": nic.mac()}));
            let (v4, v6) = nic.asks();
            one.insert("dhcp4".to_owned(), json!(v4));
            one.insert("dhcp6".to_owned(), json!(v6));
            if !nic.addresses.is_empty() {
                let addresses = nic.addresses.iter();
                let addresses: Vec<String> = addresses
                    .map(|(address, length)| format!("{address}/{length}"))
                    .collect();
                one.insert("addresses".to_owned(), json!(addresses));
            }
            if !routes.is_empty() {
                let routes: Vec<Value> = routes.iter().map(|route| nic.route_2(route)).collect();
                one.insert("routes".to_owned(), json!(routes));
            }
            if let Some(servers) = self.servers("addresses") {
                one.insert("nameservers".to_owned(), Value::Object(servers));
            }
            (nic.name.clone(), Value::Object(one))
        });
        let ethernets: Map<String, Value> = ethernets.collect();
        json!({"version": 2, "ethernets": ethernets})
    }

    /// OpenStack's network_data.json.
    pub(crate) fn network_data(&self) -> Value {
        let link = |(number, nic): (usize, &NetworkNic)| {
            let mut one = nic.base("ethernet_mac_address");
            one.insert("id".to_owned(), json!(format!("link-{number}")));
            one.insert("type".to_owned(), json!("phy"));
            Value::Object(one)
        };
        let links: Vec<Value> = self.nics.iter().enumerate().map(link).collect();
        let mut networks = Vec::new();
        for (number, (nic, routes)) in self.nics.iter().zip(self.routes()).enumerate() {
            let (v4, v6) = nic.asks();
            for (kind, _) in [("ipv4_dhcp", v4), ("ipv6_dhcp", v6)]
                .iter()
                .filter(|one| one.1)
            {
                networks.push(json!({"type": kind, "link": format!("link-{number}")}));
            }
            for (place, (address, length)) in nic.addresses.iter().enumerate() {
                let routes = nic.routes_of(place, &routes);
                let routes = routes.map(|route| {
                    json!({
                        "network": route.destination.0,
                        "netmask": netmask(&route.destination),
                        "gateway": route.gateway.unwrap_or(unspecified(address)),
                    })
                });
                networks.push(json!({
                    "type": if address.is_ipv4() { "ipv4" } else { "ipv6" },
                    "link": format!("link-{number}"),
                    "ip_address": address,
                    "netmask": netmask(&(*address, *length)),
                    "routes": routes.collect::<Vec<_>>(),
                }));
            }
        }
        for (number, network) in networks.iter_mut().enumerate() {
            network["id"] = json!(format!("net-{number}"));
        }
        let services = self.name_servers.iter();
        let services: Vec<Value> = services
            .map(|server| json!({"type": "dns", "address": server}))
            .collect();
        json!({"links": links, "networks": networks, "services": services})
    }

    /// The routes of each card, with one default route of each family in all.
    fn routes(&self) -> Vec<Vec<NetworkRoute>> {
        let mut has_default = [false; 2];
        let mut of = |nic: &NetworkNic| {
            let routes = nic.routes.iter().copied().filter(|route| {
                let seen = &mut has_default[usize::from(route.destination.0.is_ipv6())];
                route.destination.1 != 0 || !std::mem::replace(seen, true)
            });
            routes.collect()
        };
        self.nics.iter().map(&mut of).collect()
    }

    fn servers(&self, key: &str) -> Option<Map<String, Value>> {
        let mut servers = Map::new();
        if !self.name_servers.is_empty() {
            servers.insert(key.to_owned(), json!(self.name_servers));
        }
        if !self.search.is_empty() {
            servers.insert("search".to_owned(), json!(self.search));
        }
        (!servers.is_empty()).then_some(servers)
    }
}

impl NetworkNic {
    fn mac(&self) -> String {
        let bytes = self.mac.map(|byte| format!("{byte:02x}"));
        bytes.join(":")
    }

    /// What all forms say of a card.
    fn base(&self, mac_key: &str) -> Map<String, Value> {
        let mut one = Map::new();
        if !mac_key.is_empty() {
            one.insert(mac_key.to_owned(), json!(self.mac()));
        }
        if let Some(mtu) = self.mtu {
            one.insert("mtu".to_owned(), json!(mtu));
        }
        one
    }

    /// Whether it asks by DHCP, and by DHCPv6.
    fn asks(&self) -> (bool, bool) {
        match self.dhcp {
            Dhcp::No => (self.addresses.is_empty(), false),
            Dhcp::Ipv4 => (true, false),
            Dhcp::Ipv6 => (false, true),
            Dhcp::Both => (true, true),
        }
    }

    /// Whether `gateway` is in one of its networks.
    fn is_neighbour(&self, gateway: IpAddr) -> bool {
        self.addresses.iter().any(|own| covers(own, gateway))
    }

    /// The routes that are told with the address at `place`: those of its family whose gateway it
    /// reaches, and with the first one of a family all that no address reaches.
    fn routes_of<'a>(
        &'a self,
        place: usize,
        routes: &'a [NetworkRoute],
    ) -> impl Iterator<Item = &'a NetworkRoute> {
        routes.iter().filter(move |route| {
            let family = route.destination.0.is_ipv4();
            let reaches =
                |own: &(IpAddr, u8)| route.gateway.is_some_and(|gateway| covers(own, gateway));
            let first = self
                .addresses
                .iter()
                .position(|own| own.0.is_ipv4() == family);
            let by = self.addresses.iter().position(reaches).or(first);
            by == Some(place)
        })
    }

    fn subnets(&self, routes: &[NetworkRoute]) -> Value {
        let (v4, v6) = self.asks();
        let asked = [("dhcp4", v4), ("dhcp6", v6)]
            .into_iter()
            .filter(|one| one.1);
        let mut subnets: Vec<Value> = asked.map(|(kind, _)| json!({"type": kind})).collect();
        for (place, (address, length)) in self.addresses.iter().enumerate() {
            let kind = if address.is_ipv4() {
                "static"
            } else {
                "static6"
            };
            let mut one = json!({"type": kind, "address": format!("{address}/{length}")});
            let (default, others): (Vec<&NetworkRoute>, Vec<_>) = self
                .routes_of(place, routes)
                .partition(|route| route.destination.1 == 0 && route.gateway.is_some());
            if let Some(gateway) = default.first().and_then(|route| route.gateway) {
                one["gateway"] = json!(gateway);
            }
            let others: Vec<Value> = others
                .into_iter()
                .map(|route| {
                    json!({
                        "network": route.destination.0,
                        "netmask": netmask(&route.destination),
                        "gateway": route.gateway.unwrap_or(unspecified(address)),
                    })
                })
                .collect();
            if !others.is_empty() {
                one["routes"] = json!(others);
            }
            subnets.push(one);
        }
        json!(subnets)
    }

    fn route_2(&self, route: &NetworkRoute) -> Value {
        let (destination, length) = &route.destination;
        let mut one = Map::new();
        one.insert("to".to_owned(), json!(format!("{destination}/{length}")));
        match route.gateway {
            Some(gateway) => {
                one.insert("via".to_owned(), json!(gateway));
                let is_link_local =
                    matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
                if !self.is_neighbour(gateway) && !is_link_local {
                    one.insert("on-link".to_owned(), json!(true));
                }
            }
            None => {
                one.insert("scope".to_owned(), json!("link"));
            }
        }
        if let Some(metric) = route.metric {
            one.insert("metric".to_owned(), json!(metric));
        }
        Value::Object(one)
    }
}

/// Whether `address` is in the network of `own`; that of a host has nobody else in it.
fn covers(own: &(IpAddr, u8), address: IpAddr) -> bool {
    match (own.0, address) {
        (IpAddr::V4(one), IpAddr::V4(two)) if own.1 < 32 => {
            let mask = u32::MAX.checked_shl(32 - u32::from(own.1)).unwrap_or(0);
            one.to_bits() & mask == two.to_bits() & mask
        }
        (IpAddr::V6(one), IpAddr::V6(two)) if own.1 < 128 => {
            let mask = u128::MAX.checked_shl(128 - u32::from(own.1)).unwrap_or(0);
            one.to_bits() & mask == two.to_bits() & mask
        }
        _ => false,
    }
}

fn netmask((address, length): &(IpAddr, u8)) -> IpAddr {
    match address {
        IpAddr::V4(_) => {
            let host = 32_u32.saturating_sub((*length).into());
            let mask = u32::MAX.checked_shl(host).unwrap_or(0);
            Ipv4Addr::from_bits(mask).into()
        }
        IpAddr::V6(_) => {
            let host = 128_u32.saturating_sub((*length).into());
            let mask = u128::MAX.checked_shl(host).unwrap_or(0);
            Ipv6Addr::from_bits(mask).into()
        }
    }
}

fn unspecified(address: &IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
