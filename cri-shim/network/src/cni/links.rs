//! What the kernel says of the interfaces of a network namespace: addresses, routes and static
//! neighbours, as plugins have set them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use podvisor_agent_protocol::limits;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio_stream::{Stream, StreamExt as _};

use super::error::CniError;
use super::prefix::Prefix;
use crate::tap::{MAX_NICS, is_tap_name};

/// Most routes of one pod.
const MAX_ROUTES: usize = limits::ROUTES;
/// Most static neighbours of one pod.
const MAX_NEIGHBOURS: usize = limits::NEIGHBOURS;
/// The kernel's limits for Ethernet with IP.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 68..=65535;

/// A network card of the guest.
#[derive(Debug)]
pub(crate) struct Nic {
    /// The host's end, opened with a virtio-net header on each frame.
    pub tap: OwnedFd,
    /// Name of the interface that it stands for.
    pub name: String,
    /// MAC address of that interface.
    pub mac: [u8; 6],
    /// MTU of that interface.
    pub mtu: u16,
    /// Addresses of that interface.
    pub addresses: Vec<Prefix>,
    /// Whether neighbours on it are not asked for their addresses, as with ipvlan in layer 3 mode.
    pub no_arp: bool,
}

/// A route in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// The destination.
    pub destination: Prefix,
    /// The next hop; `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The interface's name.
    pub interface: String,
    /// The largest packet in bytes, unless it is the interface's.
    pub mtu: Option<u32>,
    /// Its metric, unless it has none.
    pub metric: Option<u32>,
    /// The address that packets are sent from.
    pub source: Option<IpAddr>,
}

/// A static neighbour of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Neighbour {
    pub address: IpAddr,
    pub mac: [u8; 6],
    /// The interface's name.
    pub interface: String,
}

/// Runs `work` with netlink of this thread's network namespace.
pub(super) fn with_netlink<T>(
    work: impl AsyncFnOnce(Handle) -> Result<T, CniError>,
) -> Result<T, CniError> {
    let path = "/proc/thread-self/ns/net";
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CniError::io("start a runtime for", path))?;
    runtime.block_on(async {
        let (connection, handle, _) =
            rtnetlink::new_connection().map_err(CniError::io("open netlink in", path))?;
        let connection = tokio::spawn(connection);
        let done = work(handle).await;
        connection.abort();
        done
    })
}

/// An interface as the kernel reports it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) mac: [u8; 6],
    pub(super) mtu: u32,
    pub(super) no_arp: bool,
}

/// Returns the index of the interface `name`.
pub(super) async fn index_of(handle: &Handle, name: &str) -> Result<u32, CniError> {
    let mut found = handle.link().get().match_name(name.to_owned()).execute();
    let message = first(&mut found, "find the tap").await?;
    let index = message.map(|message| message.header.index);
    index.ok_or_else(|| CniError::NoInterface {
        name: name.to_owned(),
    })
}

/// Returns the loopback interface, and the interfaces that a guest can have a card for.
pub(super) async fn links(handle: &Handle) -> Result<(Option<u32>, Vec<Link>), CniError> {
    let action = "list the interfaces";
    let mut loopback = None;
    let mut links = Vec::new();
    let mut messages = handle.link().get().execute();
    while let Some(message) = first(&mut messages, action).await? {
        let header = &message.header;
        if header.flags.contains(LinkFlags::Loopback) {
            loopback = Some(header.index);
        }
        // Tunnels that exist in each namespace by default are down, and so are taps until they are
        // joined.
        let usable =
            header.link_layer_type == LinkLayerType::Ether && header.flags.contains(LinkFlags::Up);
        if !usable {
            continue;
        }
        let mut link = Link {
            index: header.index,
            name: String::new(),
            mac: [0; 6],
            mtu: 0,
            no_arp: header.flags.contains(LinkFlags::Noarp),
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::Address(mac) => {
                    link.mac = mac.try_into().unwrap_or_default();
                }
                _ => {}
            }
        }
        if is_tap_name(&link.name) {
            // A plugin brought it up that does so with all interfaces.
            continue;
        }
        // Layer 3 modes of netkit: a guest could not tell it from other interfaces.
        if link.mac == [0; 6] {
            return Err(CniError::InvalidResult {
                name: link.name,
                reason: "an interface without a MAC address".to_owned(),
            });
        }
        if !MTU_RANGE.contains(&link.mtu) || links.len() == MAX_NICS {
            return Err(CniError::InvalidResult {
                name: link.name.clone(),
                reason: match links.len() {
                    MAX_NICS => format!("more than {MAX_NICS} interfaces"),
                    _ => format!("an MTU of {}", link.mtu),
                },
            });
        }
        links.push(link);
    }
    Ok((loopback, links))
}

/// Returns addresses by interface, without those that the kernel adds itself.
pub(super) async fn addresses(handle: &Handle) -> Result<BTreeMap<u32, Vec<Prefix>>, CniError> {
    let mut addresses: BTreeMap<u32, Vec<Prefix>> = BTreeMap::new();
    let mut messages = handle.address().get().execute();
    while let Some(message) = first(&mut messages, "list the addresses").await? {
        // IFA_LOCAL is the interface's address if IFA_ADDRESS is the peer's.
        let mut address = None;
        for attribute in &message.attributes {
            match attribute {
                AddressAttribute::Local(local) => address = Some(*local),
                AddressAttribute::Address(other) if address.is_none() => address = Some(*other),
                _ => {}
            }
        }
        let length = message.header.prefix_len;
        let prefix = address.and_then(|address| Prefix::new(address, length));
        if let Some(prefix) = prefix
            && !is_link_local_v6(&prefix.address())
        {
            let own = addresses.entry(message.header.index).or_default();
            own.push(prefix);
        }
    }
    Ok(addresses)
}

/// Returns the IPv4 address of an interface, if it has one.
pub(super) async fn ipv4_of(handle: &Handle, index: u32) -> Result<Option<Ipv4Addr>, CniError> {
    let of_index = addresses(handle).await?.remove(&index).unwrap_or_default();
    Ok(of_index.iter().find_map(|one| match one.address() {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }))
}

fn is_link_local_v6(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Networks on the link, with an interface's address in them.
pub(super) type Connected = Vec<(Prefix, u32)>;

/// Returns networks on the link, and the routes that were added explicitly.
pub(super) async fn routes(
    handle: &Handle,
    links: &[Link],
) -> Result<(Connected, Vec<Route>), CniError> {
    let mut connected = Vec::new();
    let mut routes = Vec::new();
    for message in [
        RouteMessageBuilder::<Ipv4Addr>::new().build(),
        RouteMessageBuilder::<Ipv6Addr>::new().build(),
    ] {
        let mut messages = handle.route().get(message).execute();
        while let Some(message) = first(&mut messages, "list the routes").await? {
            let header = &message.header;
            let mut route = RouteBuilder::new(header);
            for attribute in &message.attributes {
                match attribute {
                    RouteAttribute::Destination(to) => route.destination = ip(to),
                    RouteAttribute::Gateway(by) => route.gateway = ip(by),
                    RouteAttribute::Oif(index) => route.index = *index,
                    RouteAttribute::Table(table) => route.table = *table,
                    RouteAttribute::Priority(metric) => route.metric = Some(*metric),
                    RouteAttribute::PrefSource(from) => route.source = ip(from),
                    RouteAttribute::Metrics(metrics) => route.mtu = mtu(metrics),
                    _ => {}
                }
            }
            let link = links.iter().find(|link| link.index == route.index);
            let (Some(link), Some(destination)) = (link, route.prefix(header)) else {
                continue;
            };
            let is_ours = route.table == u32::from(RouteHeader::RT_TABLE_MAIN)
                && header.kind == RouteType::Unicast
                && !is_link_local_v6(&destination.address());
            if !is_ours {
                continue;
            }
            if header.protocol == RouteProtocol::Kernel {
                connected.push((destination, link.index));
                continue;
            }
            if routes.len() == MAX_ROUTES {
                return Err(CniError::InvalidResult {
                    name: link.name.clone(),
                    reason: format!("more than {MAX_ROUTES} routes"),
                });
            }
            let is_direct = header.scope == RouteScope::Link;
            routes.push(Route {
                destination,
                gateway: route.gateway.filter(|_| !is_direct),
                interface: link.name.clone(),
                mtu: route.mtu,
                metric: route.metric,
                source: route.source,
            });
        }
    }
    // A gateway must be reachable when a route through it is added.
    routes.sort_by_key(|route| {
        let length = route.destination.length();
        (route.gateway.is_some(), std::cmp::Reverse(length))
    });
    Ok((connected, routes))
}

/// Returns neighbours that were added permanently.
pub(super) async fn neighbours(
    handle: &Handle,
    links: &[Link],
) -> Result<Vec<Neighbour>, CniError> {
    let mut neighbours = Vec::new();
    let mut messages = handle.neighbours().get().execute();
    while let Some(message) = first(&mut messages, "list the neighbours").await? {
        let header = &message.header;
        let link = links.iter().find(|link| link.index == header.ifindex);
        let (Some(link), NeighbourState::Permanent) = (link, header.state) else {
            continue;
        };
        let mut address = None;
        let mut mac = None;
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(to)) => {
                    address = Some(IpAddr::V4(*to));
                }
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(to)) => {
                    address = Some(IpAddr::V6(*to));
                }
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    mac = bytes.as_slice().try_into().ok();
                }
                _ => {}
            }
        }
        let (Some(address), Some(mac)) = (address, mac) else {
            continue;
        };
        if neighbours.len() == MAX_NEIGHBOURS {
            return Err(CniError::InvalidResult {
                name: link.name.clone(),
                reason: format!("more than {MAX_NEIGHBOURS} static neighbours"),
            });
        }
        neighbours.push(Neighbour {
            address,
            mac,
            interface: link.name.clone(),
        });
    }
    Ok(neighbours)
}

/// A route while it is parsed.
struct RouteBuilder {
    destination: Option<IpAddr>,
    gateway: Option<IpAddr>,
    index: u32,
    table: u32,
    mtu: Option<u32>,
    metric: Option<u32>,
    source: Option<IpAddr>,
}

impl RouteBuilder {
    fn new(header: &RouteHeader) -> Self {
        Self {
            destination: None,
            gateway: None,
            index: 0,
            table: u32::from(header.table),
            mtu: None,
            metric: None,
            source: None,
        }
    }

    /// Returns the destination; a default route has no address.
    fn prefix(&self, header: &RouteHeader) -> Option<Prefix> {
        let unspecified = match header.address_family {
            AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => return None,
        };
        let address = self.destination.unwrap_or(unspecified);
        Prefix::new(address, header.destination_prefix_length)
    }
}

fn mtu(metrics: &[RouteMetric]) -> Option<u32> {
    let mtu = |metric: &RouteMetric| match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    };
    metrics.iter().find_map(mtu)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

pub(super) async fn first<T>(
    messages: &mut (impl Stream<Item = Result<T, rtnetlink::Error>> + Unpin),
    action: &'static str,
) -> Result<Option<T>, CniError> {
    let next = messages.next().await.transpose();
    next.map_err(CniError::netlink(action))
}
