//! Connects the guest to the interfaces that CNI plugins created: for each one a tap, joined to it
//! by two redirects of the kernel's traffic control, so that every plugin works (bridges need a
//! port with the right MAC address; a veth or macvlan cannot be handed to a guest).
//!
//! The interface keeps its addresses, by which plugins recognize it at CHECK; incoming packets do
//! not reach them, because they are redirected before the host's network stack sees them.
//! Addresses, routes and static neighbours for the guest are read from the kernel, not from the
//! plugins' results, so that the guest gets those that no result mentions, too.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rtnetlink::{Handle, LinkUnspec};

use super::card::CardForm;
use super::error::CniError;
use super::links::{
    Link, Neighbour, Nic, Route, addresses, index_of, links, neighbours, routes, with_netlink,
};
use super::masquerade;
use super::prefix::Prefix;
use super::result::{CniResult, Dns};
use crate::tap::{TUN, open_tap, tap_name};

/// Of the redirects; filters that come before them have lower numbers.
const REDIRECT_PRIORITY: u16 = 16;

/// ETH_P_ALL, in network byte order as traffic control expects it.
const ALL_PROTOCOLS: u16 = 0x0003_u16.to_be();

/// A guest's part of its pod's network.
#[derive(Debug, Default)]
pub struct Attachment {
    /// One card per interface, starting with the pod's first one.
    pub(crate) nics: Vec<Nic>,
    /// In an order in which they can be added.
    pub(crate) routes: Vec<Route>,
    /// Permanent neighbours that plugins added: some gateways do not answer ARP or NDP requests.
    pub(crate) neighbours: Vec<Neighbour>,
    /// The pod's addresses by the CNI result, starting with the first one.
    pub addresses: Vec<IpAddr>,
    /// The name servers of the network.
    pub dns: Dns,
    /// Whether there are as many cards as prepared taps, so that these are used.
    pub is_as_prepared: bool,
}

impl Attachment {
    /// Adds the information that only the plugins' result has.
    pub(super) fn take_result(&mut self, result: &CniResult) {
        self.addresses = result.addresses();
        self.dns = result.dns().clone();
    }
}

/// Joins a tap to each interface of this thread's network namespace. The interface called `first`
/// is the first one, and `taps` are used for the first interfaces.
/// The first card has the form `form`.
pub(super) fn join(
    first: &str,
    taps: Vec<OwnedFd>,
    form: &CardForm,
) -> Result<Attachment, CniError> {
    with_netlink(async |handle| join_all(&handle, first, taps, form).await)
}

async fn join_all(
    handle: &Handle,
    first: &str,
    taps: Vec<OwnedFd>,
    form: &CardForm,
) -> Result<Attachment, CniError> {
    let (loopback, mut links) = links(handle).await?;
    links.sort_by_key(|link| link.name != first);
    match links.first() {
        Some(link) if link.name == first => {}
        _ => {
            let name = first.to_owned();
            return Err(CniError::NoInterface { name });
        }
    }
    if let Some(index) = loopback {
        let up = LinkUnspec::new_with_index(index).up().build();
        let up = handle.link().set(up).execute().await;
        up.map_err(CniError::netlink("bring the loopback interface up"))?;
    }
    let mut addresses = addresses(handle).await?;
    let (connected, routes) = routes(handle, &links).await?;
    let mut attachment = Attachment {
        routes,
        neighbours: neighbours(handle, &links).await?,
        ..Attachment::default()
    };
    let mut taps = taps.into_iter();
    for (number, link) in links.into_iter().enumerate() {
        let tap = match taps.next() {
            Some(tap) => tap,
            None => open_tap(number).map_err(CniError::io("make a tap by", TUN))?,
        };
        let addresses = addresses.remove(&link.index).unwrap_or_default();
        if let CardForm::Masqueraded(ports) = form
            && number == 0
        {
            let name = tap_name(number);
            let inside = masquerade::connect(handle, &name, &link, &addresses, ports).await?;
            // What the pod's end has is no concern of the guest.
            attachment
                .routes
                .retain(|route| route.interface != link.name);
            attachment
                .neighbours
                .retain(|one| one.interface != link.name);
            attachment.nics.push(inside.nic(link, tap));
            attachment.routes.extend(inside.routes);
            continue;
        }
        join_one(handle, &tap_name(number), &link).await?;
        let own = addresses.into_iter().map(|address| {
            // A plugin that removed the route to the address's network (as ptp does) has its
            // reasons: the guest must not add that route again.
            let has_route = connected.contains(&(address.network(), link.index));
            if has_route {
                address
            } else {
                Prefix::host(address.address())
            }
        });
        attachment.nics.push(Nic {
            tap,
            mac: link.mac,
            no_arp: link.no_arp,
            // In range: links with another MTU are refused.
            mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
            addresses: own.collect(),
            name: link.name,
        });
    }
    Ok(attachment)
}

/// Creates the redirects between one interface and its tap.
async fn join_one(handle: &Handle, tap: &str, link: &Link) -> Result<(), CniError> {
    let index = index_of(handle, tap).await?;
    let up = LinkUnspec::new_with_index(index).mtu(link.mtu).up().build();
    let up = handle.link().set(up).execute().await;
    up.map_err(CniError::netlink("bring the tap up"))?;
    // macvlan and ipvlan receive only groups that programs of the namespace joined; those of the
    // guest are not known here.
    let all = LinkUnspec::new_with_index(link.index).allmulticast(true);
    let all = handle.link().set(all.build()).execute().await;
    all.map_err(CniError::netlink(
        "receive multicast frames on the interface",
    ))?;
    for (from, to) in [(link.index, index), (index, link.index)] {
        redirect(handle, from, to).await?;
    }
    Ok(())
}

async fn redirect(handle: &Handle, from: u32, to: u32) -> Result<(), CniError> {
    let index = from.cast_signed();
    let qdisc = handle.qdisc().add(index).ingress().execute().await;
    qdisc.map_err(CniError::netlink("add an ingress queueing discipline"))?;
    let action = "redirect between the interface and the tap";
    let filter = handle
        .traffic_filter(index)
        .add()
        .parent(0xffff_0000)
        .priority(REDIRECT_PRIORITY)
        .protocol(ALL_PROTOCOLS)
        .redirect(to);
    let filter = filter.map_err(CniError::netlink(action))?;
    filter.execute().await.map_err(CniError::netlink(action))
}
