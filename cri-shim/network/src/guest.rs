//! What a machine and its guest are told of their network: the cards, and the guest's interfaces,
//! addresses and routes. Nothing here knows how a network is made.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// The kind of a network card's backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// A tap, opened with `IFF_VNET_HDR`.
    #[default]
    Tap,
    /// A connected stream socket that carries each frame after its length, as `passt` does.
    Stream,
}

/// A network card.
#[derive(Debug)]
pub struct NicConfig {
    /// The kind of the host's end.
    pub kind: NicKind,
    /// The host's end.
    pub fd: OwnedFd,
    /// The guest's hardware address.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
}

/// The guest's network configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The interfaces, in the order of the cards. Each is found by its MAC address; if no card has
    /// that address yet, it is the card at the same place.
    pub interfaces: Vec<Interface>,
    /// The routes, in the order in which they are added.
    pub routes: Vec<Route>,
    /// Permanent neighbours.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
}

/// An interface in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// The name that it gets, such as `eth0`.
    pub name: String,
    /// The MAC address of its card.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
    /// Addresses with their prefix lengths, such as `10.0.0.2/24`.
    pub addresses: Vec<String>,
    /// No neighbour on it answers ARP or NDP; it takes frames with any destination.
    #[serde(default)]
    pub no_arp: bool,
    /// The card of a guest with an operating system of its own begins without a link.
    #[serde(default)]
    pub is_down: bool,
}

/// A route in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// A prefix such as `10.1.0.0/16` or `0.0.0.0/0`.
    pub destination: String,
    /// The next hop; `None` if the destination is on the link.
    pub gateway: Option<String>,
    /// The interface's name.
    pub interface: String,
    /// The largest packet that is sent by it, in bytes; `None`: the interface's.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Of several routes to the same destination the one with the least is used; `None`: the
    /// kernel's default.
    #[serde(default)]
    pub metric: Option<u32>,
    /// The address that packets are sent from; `None`: the kernel's choice.
    #[serde(default)]
    pub source: Option<String>,
}

/// A static neighbour of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: String,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The interface's name.
    pub interface: String,
}
