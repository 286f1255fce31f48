//! The guest's network: interfaces, addresses, neighbours and routes, as planned by the host.
//!
//! A request becomes a [`plan`], which is checked as a whole; then it is applied over `netlink`, in
//! the network namespace that the containers of the guest share. Applying the same plan again
//! changes nothing. Knows nothing about containers, or about the networks that the cards are
//! connected to.

mod netlink;
pub mod plan;

use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use netlink::{Message, NLM_F_CREATE, NLM_F_REPLACE, Netlink, attribute, u32_at};
use plan::{Interface, Neighbour, Plan, Prefix, Route};

use crate::uevent::Uevents;

/// How long a card may take to appear; the host plugs it in before it requests it.
const PLUG_TIMEOUT: Duration = Duration::from_secs(10);

// <linux/rtnetlink.h>, <linux/if_link.h>, <linux/if_addr.h>, <linux/neighbour.h>
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_NEWNEIGH: u16 = 28;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_BROADCAST: u16 = 4;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
const RTA_METRICS: u16 = 8;
/// In `RTA_METRICS`.
const RTAX_MTU: u16 = 2;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;

const IFF_UP: u32 = 1;
const IFF_NOARP: u32 = 0x80;
const IFA_F_NODAD: u8 = 0x02;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
const RTNH_F_ONLINK: u32 = 4;
const NUD_PERMANENT: u16 = 0x80;
/// Fixed part of messages about interfaces, `struct ifinfomsg`.
const IFINFOMSG_BYTES: usize = 16;
/// `lo` has index 1 in every network namespace.
const LOOPBACK_INDEX: u32 = 1;

/// The network cannot be configured as planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// No such card.
    #[error("no network card with the MAC address {mac} within {} s: plug it in first", PLUG_TIMEOUT.as_secs())]
    Missing {
        /// The MAC address that was looked for.
        mac: String,
    },
    /// The kernel refuses a change.
    #[error("cannot {action} {object}")]
    Kernel {
        /// The action that failed.
        action: &'static str,
        /// The object of the action.
        object: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

fn kernel(action: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> NetworkError {
    move |source| NetworkError::Kernel {
        action,
        object: object.to_string(),
        source,
    }
}

/// Brings `lo` of the current network namespace up; the kernel gives it its addresses.
///
/// # Errors
///
/// The kernel's error, such as `EPERM`.
pub fn loopback_up() -> io::Result<()> {
    Netlink::open()?.call(link(LOOPBACK_INDEX, true))
}

/// Configures the network of the current namespace as planned.
///
/// # Errors
///
/// [`NetworkError`] for the first thing that failed; what was done before it stays.
pub async fn apply(plan: &Plan) -> Result<(), NetworkError> {
    if plan.interfaces.is_empty() {
        return Ok(());
    }
    let mut netlink = Netlink::open().map_err(kernel("open", "a netlink socket"))?;
    let mut cards: Vec<(&Interface, u32)> = Vec::new();
    for interface in &plan.interfaces {
        let taken: Vec<u32> = cards.iter().map(|(_, index)| *index).collect();
        let card = find(&mut netlink, interface, &taken).await?;
        if card.mac != interface.mac {
            netlink
                .call(link(card.index, false).attribute(IFLA_ADDRESS, &interface.mac))
                .map_err(kernel("set the address of", &interface.name))?;
        }
        cards.push((interface, card.index));
    }
    rename(&mut netlink, &cards)?;
    for (interface, index) in &cards {
        bring_up(&mut netlink, interface, *index)?;
    }
    // A plan has only neighbours and routes of its own interfaces.
    let index_of = |name: &str| {
        let named = cards.iter().find(|(interface, _)| interface.name == name);
        named.map(|(_, index)| *index)
    };
    for neighbour in &plan.neighbours {
        if let Some(index) = index_of(&neighbour.interface) {
            netlink
                .call(neighbour_message(neighbour, index))
                .map_err(kernel("add neighbour", neighbour.address))?;
        }
    }
    for route in &plan.routes {
        if let Some(index) = index_of(&route.interface) {
            add_route(&mut netlink, route, index)
                .map_err(kernel("add route", route.destination))?;
        }
    }
    Ok(())
}

/// An interface as reported by the kernel.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    index: u32,
    name: String,
    mac: Vec<u8>,
}

fn links(netlink: &mut Netlink) -> Result<Vec<Link>, NetworkError> {
    let mut links = Vec::new();
    netlink
        .dump(
            Message::new(RTM_GETLINK, 0, &[0; IFINFOMSG_BYTES]),
            |kind, body| {
                if kind == RTM_NEWLINK {
                    links.extend(read_link(body));
                }
            },
        )
        .map_err(kernel("list", "network interfaces"))?;
    Ok(links)
}

fn read_link(body: &[u8]) -> Option<Link> {
    let name = attribute(body, IFINFOMSG_BYTES, IFLA_IFNAME)?;
    Some(Link {
        index: u32_at(body, 4)?,
        name: String::from_utf8_lossy(name.strip_suffix(b"\0").unwrap_or(name)).into_owned(),
        mac: attribute(body, IFINFOMSG_BYTES, IFLA_ADDRESS)
            .unwrap_or_default()
            .to_vec(),
    })
}

/// Finds the interface's card, which is none of those that are `taken`; waits for it to appear.
/// Interfaces may have one address, as those of one ipvlan have.
async fn find(
    netlink: &mut Netlink,
    wanted: &Interface,
    taken: &[u32],
) -> Result<Link, NetworkError> {
    let mut look = || -> Result<Option<Link>, NetworkError> {
        let links = links(netlink)?;
        let is_wanted = |link: &Link| {
            let present = wanted.present_mac.is_some_and(|mac| link.mac == mac);
            (link.mac == wanted.mac || present) && !taken.contains(&link.index)
        };
        // A bridge or VLAN that a container has created can have its card's address, and a later
        // index.
        let with_mac = links.into_iter().filter(is_wanted);
        Ok(with_mac.min_by_key(|link| (link.mac != wanted.mac, link.index)))
    };
    if let Some(card) = look()? {
        return Ok(card);
    }
    // Listen first and then look again, so that no event is missed in between.
    let events = Uevents::open().map_err(kernel("watch for", "network cards"))?;
    let appears = async {
        loop {
            if let Some(card) = look()? {
                return Ok(card);
            }
            events
                .next()
                .await
                .map_err(kernel("watch for", "network cards"))?;
        }
    };
    tokio::time::timeout(PLUG_TIMEOUT, appears)
        .await
        .unwrap_or_else(|_| {
            let mac: Vec<String> = wanted.mac.iter().map(|b| format!("{b:02x}")).collect();
            Err(NetworkError::Missing { mac: mac.join(":") })
        })
}

/// Gives the cards their names; another interface that has one of them is renamed to a spare one
/// first.
fn rename(netlink: &mut Netlink, cards: &[(&Interface, u32)]) -> Result<(), NetworkError> {
    let links = links(netlink)?;
    for (interface, index) in cards {
        let holder = links.iter().find(|link| link.name == interface.name);
        if let Some(holder) = holder
            && holder.index != *index
        {
            let spare = format!("spare{}", holder.index);
            set_name(netlink, holder.index, &spare)?;
        }
    }
    for (interface, index) in cards {
        if !links
            .iter()
            .any(|link| link.index == *index && link.name == interface.name)
        {
            set_name(netlink, *index, &interface.name)?;
        }
    }
    Ok(())
}

fn set_name(netlink: &mut Netlink, index: u32, name: &str) -> Result<(), NetworkError> {
    let terminated = [name.as_bytes(), b"\0"].concat();
    netlink
        .call(link(index, false).attribute(IFLA_IFNAME, &terminated))
        .map_err(kernel("name an interface", name))
}

fn bring_up(netlink: &mut Netlink, interface: &Interface, index: u32) -> Result<(), NetworkError> {
    let name = &interface.name;
    if interface.addresses.iter().any(|a| a.address.is_ipv6()) {
        // Its link-local address should be usable immediately too, but one that comes late is
        // better than no network.
        let path = format!("/proc/sys/net/ipv6/conf/{name}/accept_dad");
        if let Err(error) = fs::write(path, "0") {
            tracing::warn!(%name, %error, "failed to disable duplicate address detection");
        }
    }
    if interface.no_arp {
        netlink
            .call(link_flags(index, IFF_NOARP))
            .map_err(kernel("disable address resolution on", name))?;
    }
    let mut up = link(index, true);
    if let Some(mtu) = interface.mtu {
        up = up.attribute(IFLA_MTU, &mtu.to_ne_bytes());
    }
    netlink.call(up).map_err(kernel("bring up", name))?;
    for prefix in &interface.addresses {
        netlink
            .call(address(*prefix, index))
            .map_err(kernel("add the address", prefix))?;
    }
    Ok(())
}

/// Creates a message that changes an interface.
fn link(index: u32, up: bool) -> Message {
    link_flags(index, if up { IFF_UP } else { 0 })
}

/// Creates a message that changes an interface and sets some of its flags.
fn link_flags(index: u32, flags: u32) -> Message {
    // struct ifinfomsg: family, padding, type, interface, flags, the mask of those to change.
    let mut body = [0; IFINFOMSG_BYTES];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&flags.to_ne_bytes());
    Message::new(RTM_NEWLINK, 0, &body)
}

/// Creates a message that adds an address, usable immediately.
fn address(prefix: Prefix, index: u32) -> Message {
    let link_local = match prefix.address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let (flags, scope) = match (prefix.address, link_local) {
        (IpAddr::V6(_), true) => (IFA_F_NODAD, RT_SCOPE_LINK),
        (IpAddr::V6(_), false) => (IFA_F_NODAD, RT_SCOPE_UNIVERSE),
        (IpAddr::V4(_), true) => (0, RT_SCOPE_LINK),
        (IpAddr::V4(_), false) => (0, RT_SCOPE_UNIVERSE),
    };
    // struct ifaddrmsg
    let mut body = [0; 8];
    body[0..4].copy_from_slice(&[family(prefix.address), prefix.length, flags, scope]);
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    let bytes = octets(prefix.address);
    let message = Message::new(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &body)
        .attribute(IFA_LOCAL, &bytes)
        .attribute(IFA_ADDRESS, &bytes);
    match prefix.broadcast() {
        Some(broadcast) => message.attribute(IFA_BROADCAST, &broadcast.octets()),
        None => message,
    }
}

fn neighbour_message(neighbour: &Neighbour, index: u32) -> Message {
    // struct ndmsg: family, padding, interface, state, flags, type.
    let mut body = [0; 12];
    body[0] = family(neighbour.address);
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..10].copy_from_slice(&NUD_PERMANENT.to_ne_bytes());
    Message::new(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &body)
        .attribute(NDA_DST, &octets(neighbour.address))
        .attribute(NDA_LLADDR, &neighbour.mac)
}

fn add_route(netlink: &mut Netlink, route: &Route, index: u32) -> io::Result<()> {
    match netlink.call(route_message(route, index, 0)) {
        // A gateway that is in no address' network, as some plugins configure it: it is on the link
        // nevertheless.
        Err(error)
            if route.gateway.is_some()
                && matches!(
                    error.raw_os_error(),
                    Some(libc::ENETUNREACH | libc::EHOSTUNREACH)
                ) =>
        {
            netlink.call(route_message(route, index, RTNH_F_ONLINK))
        }
        result => result,
    }
}

fn route_message(route: &Route, index: u32, flags: u32) -> Message {
    let network = route.destination.network();
    let scope = if route.gateway.is_none() && network.is_ipv4() {
        RT_SCOPE_LINK
    } else {
        RT_SCOPE_UNIVERSE
    };
    // struct rtmsg: family, prefix lengths of destination and source, TOS, then as named.
    let mut body = [0; 12];
    body[0..2].copy_from_slice(&[family(network), route.destination.length]);
    body[4..8].copy_from_slice(&[RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    let mut message = Message::new(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &body)
        .attribute(RTA_OIF, &index.to_ne_bytes());
    if route.destination.length > 0 {
        message = message.attribute(RTA_DST, &octets(network));
    }
    if let Some(gateway) = route.gateway {
        message = message.attribute(RTA_GATEWAY, &octets(gateway));
    }
    if let Some(metric) = route.metric {
        message = message.attribute(RTA_PRIORITY, &metric.to_ne_bytes());
    }
    if let Some(source) = route.source {
        message = message.attribute(RTA_PREFSRC, &octets(source));
    }
    if let Some(mtu) = route.mtu {
        message = message.attribute(RTA_METRICS, &attribute_of(RTAX_MTU, mtu));
    }
    message
}

/// Returns an attribute with a number, for an attribute of attributes.
fn attribute_of(kind: u16, value: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[0..2].copy_from_slice(&8_u16.to_ne_bytes());
    bytes[2..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&value.to_ne_bytes());
    bytes
}

fn family(address: IpAddr) -> u8 {
    // Both fit one byte.
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    u8::try_from(family).unwrap_or_default()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests;
