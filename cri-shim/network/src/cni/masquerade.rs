//! The second form of a guest's first card: a network of its own between the guest and the pod's
//! namespace, which translates addresses. The guest's address is the same in every pod, so that a
//! guest can go elsewhere with its network; others reach it by the pod's address.
//!
//! The rules are those of iptables, which CNI's plugins need, too. They end with the namespace.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;

use rtnetlink::{Handle, LinkUnspec};
use tracing::debug;

use super::card::{CardForm, ForwardedPorts};
use super::error::CniError;
use super::links::{Link, Nic, Route, index_of};
use super::plugin;
use super::prefix::Prefix;

/// The card of the pod's end.
pub(super) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const LENGTH: u8 = 24;
const GATEWAY_6: Ipv6Addr = Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 1);
const GUEST_6: Ipv6Addr = Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 2);
const LENGTH_6: u8 = 120;
/// The address on the link that the kernel gives to [`MAC`]: routers are told by it.
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0);

impl CardForm {
    /// Returns the guest's own address if it is not the pod's: from inside the pod's namespace, the
    /// guest is reached there, whatever ports are translated.
    #[must_use]
    pub fn guest_address(&self, of_pod: IpAddr) -> Option<IpAddr> {
        match (self, of_pod) {
            (Self::Joined, _) => None,
            (Self::Masqueraded(_), IpAddr::V4(_)) => Some(GUEST.into()),
            (Self::Masqueraded(_), IpAddr::V6(_)) => Some(GUEST_6.into()),
        }
    }
}

/// What the guest is told instead of what its pod has.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) addresses: Vec<Prefix>,
    pub(super) routes: Vec<Route>,
}

/// Connects `tap` with the interface `link`, which has `addresses`, by translation.
pub(super) async fn connect(
    handle: &Handle,
    tap: &str,
    link: &Link,
    addresses: &[Prefix],
    ports: &[ForwardedPorts],
) -> Result<Inside, CniError> {
    let index = index_of(handle, tap).await?;
    let up = LinkUnspec::new_with_index(index);
    let up = up.address(MAC.to_vec()).mtu(link.mtu).up().build();
    let up = handle.link().set(up).execute().await;
    up.map_err(CniError::netlink("bring the tap up"))?;
    let mut inside = Inside {
        addresses: Vec::new(),
        routes: Vec::new(),
    };
    let of_pod = |is_v4| {
        addresses
            .iter()
            .map(Prefix::address)
            .filter(move |one| one.is_ipv4() == is_v4)
    };
    if of_pod(true).next().is_some() {
        add(handle, index, GATEWAY.into(), LENGTH).await?;
        set("/proc/sys/net/ipv4/ip_forward")?;
        translate("iptables", tap, link, GUEST.into(), of_pod(true), ports)?;
        inside.take(
            link,
            GUEST.into(),
            LENGTH,
            Ipv4Addr::UNSPECIFIED.into(),
            GATEWAY.into(),
        );
    }
    if of_pod(false).next().is_some() {
        add(handle, index, GATEWAY_6.into(), LENGTH_6).await?;
        set("/proc/sys/net/ipv6/conf/all/forwarding")?;
        match translate("ip6tables", tap, link, GUEST_6.into(), of_pod(false), ports) {
            Ok(()) => {
                let to = Ipv6Addr::UNSPECIFIED.into();
                inside.take(link, GUEST_6.into(), LENGTH_6, to, LINK_LOCAL.into());
            }
            // Many hosts cannot translate IPv6.
            Err(error) => debug!(%error, "the guest has no IPv6"),
        }
    }
    Ok(inside)
}

impl Inside {
    fn take(&mut self, link: &Link, own: IpAddr, length: u8, to: IpAddr, gateway: IpAddr) {
        self.addresses.extend(Prefix::new(own, length));
        let route = |destination| Route {
            destination,
            gateway: Some(gateway),
            interface: link.name.clone(),
            mtu: None,
            metric: None,
            source: None,
        };
        self.routes.extend(Prefix::new(to, 0).map(route));
    }

    /// The guest's card.
    pub(super) fn nic(&self, link: Link, tap: std::os::fd::OwnedFd) -> Nic {
        Nic {
            tap,
            mac: link.mac,
            mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
            name: link.name,
            addresses: self.addresses.clone(),
            no_arp: false,
        }
    }
}

async fn add(handle: &Handle, index: u32, address: IpAddr, length: u8) -> Result<(), CniError> {
    let added = handle.address().add(index, address, length).execute().await;
    added.map_err(CniError::netlink("give the tap an address"))
}

/// Enables forwarding in this thread's network namespace.
fn set(path: &str) -> Result<(), CniError> {
    std::fs::write(Path::new(path), "1").map_err(CniError::io("enable forwarding by", path))
}

fn translate(
    program: &'static str,
    tap: &str,
    link: &Link,
    guest: IpAddr,
    pod: impl Iterator<Item = IpAddr>,
    ports: &[ForwardedPorts],
) -> Result<(), CniError> {
    let (guest, name) = (guest.to_string(), link.name.as_str());
    let run = |rule: &[&str]| run(program, rule);
    run(&[
        "-t",
        "nat",
        "-A",
        "POSTROUTING",
        "-s",
        &guest,
        "-j",
        "MASQUERADE",
    ])?;
    // The DHCP server hears requests before; who listens on the port here would answer as well.
    run(&[
        "-A", "INPUT", "-i", tap, "-p", "udp", "--dport", "67", "-j", "DROP",
    ])?;
    let to_guest = ["-j", "DNAT", "--to-destination", &guest];
    let pod: Vec<String> = pod.map(|address| address.to_string()).collect();
    let words = |one: &ForwardedPorts| {
        let ports = format!("{}:{}", one.first, one.last);
        ["-p", one.protocol.name(), "--dport", &ports]
            .map(str::to_owned)
            .to_vec()
    };
    let mut matches: Vec<Vec<String>> = ports.iter().map(words).collect();
    if matches.is_empty() {
        matches.push(Vec::new());
    }
    for only in &matches {
        let only: &[&str] = &only.iter().map(String::as_str).collect::<Vec<_>>();
        let from_outside = ["-t", "nat", "-A", "PREROUTING", "-i", name];
        run(&[&from_outside[..], only, &to_guest].concat())?;
        for address in &pod {
            let from_inside = ["-t", "nat", "-A", "OUTPUT", "-d", address];
            run(&[&from_inside[..], only, &to_guest].concat())?;
        }
    }
    Ok(())
}

/// Adds a rule in this thread's network namespace.
fn run(program: &'static str, rule: &[&str]) -> Result<(), CniError> {
    let output = Command::new(program)
        .args(["-w", "10"])
        .args(rule)
        .env("PATH", plugin::search_path())
        .output();
    let output = output.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CniError::NoIptables,
        _ => CniError::io("run", program)(error),
    })?;
    match output.status.success() {
        true => Ok(()),
        false => Err(CniError::Rule {
            program,
            rule: rule.join(" "),
            message: plugin::clean(&String::from_utf8_lossy(&output.stderr)),
        }),
    }
}
