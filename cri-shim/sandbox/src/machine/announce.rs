//! Frames by which a machine that has come tells its networks where it is now: bridges and switches
//! learn the card's port, and neighbours the card of its addresses.
//!
//! They are written to a card's tap as if its guest had sent them, which knows nothing of its move.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const BROADCAST: [u8; 6] = [0xff; 6];
/// Where all nodes of a link listen (RFC 2464 §7).
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

const ARP: u16 = 0x0806;
const RARP: u16 = 0x8035;
const IPV6: u16 = 0x86dd;

/// Operations of ARP (RFC 826) and RARP (RFC 903).
const ARP_REQUEST: u16 = 1;
const RARP_REQUEST: u16 = 3;

/// Shortest frame without its checksum.
const MIN_FRAME: usize = 60;

/// The header of a tap's frames: nothing about it is special.
pub(super) const TAP_HEADER: [u8; 12] = [0; 12];

/// Returns the frames about a card with these addresses.
pub(super) fn frames(mac: [u8; 6], addresses: impl Iterator<Item = IpAddr>) -> Vec<Vec<u8>> {
    let none = Ipv4Addr::UNSPECIFIED;
    let mut frames = vec![arp(mac, RARP, RARP_REQUEST, none, mac)];
    frames.extend(addresses.map(|address| match address {
        // About itself (RFC 5227 §3).
        IpAddr::V4(address) => arp(mac, ARP, ARP_REQUEST, address, [0; 6]),
        IpAddr::V6(address) => advertisement(mac, address),
    }));
    frames
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from, &kind.to_be_bytes(), payload].concat();
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

fn arp(mac: [u8; 6], kind: u16, operation: u16, address: Ipv4Addr, target: [u8; 6]) -> Vec<u8> {
    // Ethernet and IPv4, and the lengths of their addresses.
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    packet.extend(mac);
    packet.extend(address.octets());
    packet.extend(target);
    packet.extend(address.octets());
    ethernet(BROADCAST, mac, kind, &packet)
}

/// An unsolicited neighbour advertisement (RFC 4861 §4.4, §7.2.6).
fn advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    const NEXT_IS_ICMPV6: u8 = 58;
    const ADVERTISEMENT: u8 = 136;
    /// It replaces what neighbours know.
    const OVERRIDE: u8 = 0x20;
    const TARGET_MAC: [u8; 2] = [2, 1];
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
    message.extend(address.octets());
    message.extend(TARGET_MAC);
    message.extend(mac);
    let len = message.len() as u16;
    let mut pseudo = [address.octets(), ALL_NODES.octets()].concat();
    pseudo.extend(u32::from(len).to_be_bytes());
    pseudo.extend([0, 0, 0, NEXT_IS_ICMPV6]);
    pseudo.extend(&message);
    message[2..4].copy_from_slice(&checksum(&pseudo).to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(len.to_be_bytes());
    packet.extend([NEXT_IS_ICMPV6, 255]);
    packet.extend(address.octets());
    packet.extend(ALL_NODES.octets());
    packet.extend(message);
    ethernet(ALL_NODES_MAC, mac, IPV6, &packet)
}

/// The sum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        [high] => u32::from(*high) << 8,
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

    #[test]
    fn a_card_without_addresses_still_tells_switches_its_port() {
        let frames = frames(MAC, std::iter::empty());
        assert_eq!(frames.len(), 1);
        assert_eq!(frames[0].len(), MIN_FRAME);
        assert_eq!(
            frames[0][..14],
            [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 0x80, 0x35]
        );
    }

    #[test]
    fn neighbours_are_told_of_each_address() {
        let addresses: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let frames = frames(MAC, addresses.into_iter());
        let arp = &frames[1];
        assert_eq!(arp[12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        // Sender and target are the address itself.
        assert_eq!(
            (&arp[28..32], &arp[38..42]),
            (&[10, 1, 0, 2][..], &[10, 1, 0, 2][..])
        );
        let advertisement = &frames[2];
        assert_eq!(advertisement[..6], ALL_NODES_MAC);
        // A receiver that sums up everything gets zero.
        let mut pseudo = advertisement[22..54].to_vec();
        pseudo.extend([0, 0, 0, 32, 0, 0, 0, 58]);
        pseudo.extend(&advertisement[54..86]);
        assert_eq!(checksum(&pseudo), 0);
    }
}
