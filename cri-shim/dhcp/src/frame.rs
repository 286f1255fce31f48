//! Headers of Ethernet, IPv4, IPv6, UDP and ICMPv6: what of a guest's frame is for the server, and
//! the frames that answer.
//!
//! Checksums of UDP are not checked on the way in: a guest's kernel leaves them to the card, which
//! for a tap means to nobody.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::config::MacAddress;
use crate::read::Reader;
use crate::refusal::Refusal;

/// Longest frame that is looked at: Ethernet's, whatever the MTU of the network is.
pub(crate) const MAX_FRAME: usize = 1514;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// Port of a DHCP server.
pub(crate) const SERVER_PORT: u16 = 67;
/// Port of a DHCP client.
const CLIENT_PORT: u16 = 68;
/// Port of a DHCPv6 server.
pub(crate) const SERVER_PORT_6: u16 = 547;
/// Port of a DHCPv6 client.
const CLIENT_PORT_6: u16 = 546;

/// Bytes of an IPv4 header without options, and of UDP's.
pub(crate) const IPV4_UDP: u16 = 28;
const UDP_HEADER: usize = 8;
const HOP_LIMIT: u8 = 255;

/// Where servers of DHCPv6 listen (RFC 8415 §7.1).
const ALL_DHCP_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// All hosts on the link (RFC 4291 §2.7.1).
pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// A frame for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received<'a> {
    /// Who sent it.
    pub(crate) source: MacAddress,
    pub(crate) payload: Payload<'a>,
}

/// What is in a frame for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Payload<'a> {
    /// An ARP packet.
    Arp(&'a [u8]),
    /// A message to a DHCP server.
    Dhcp4(&'a [u8]),
    /// A message to a DHCPv6 server.
    Dhcp6 { source: Ipv6Addr, message: &'a [u8] },
    /// An ICMPv6 message whose checksum is right, with the hop limit of neighbours.
    Icmp6 { source: Ipv6Addr, message: &'a [u8] },
}

/// Reads a frame up to the message in it.
pub(crate) fn parse(frame: &[u8]) -> Result<Received<'_>, Refusal> {
    if frame.len() > MAX_FRAME {
        return Err(Refusal::TooLong(frame.len()));
    }
    let mut reader = Reader::new(frame);
    let (source, kind) = (|| {
        reader.array::<6>()?;
        Some((reader.array()?, reader.u16()?))
    })()
    .ok_or(Refusal::Truncated("the Ethernet header"))?;
    let payload = match kind {
        ETHERTYPE_ARP => Payload::Arp(reader.rest()),
        ETHERTYPE_IPV4 => ipv4(reader.rest())?,
        ETHERTYPE_IPV6 => ipv6(reader.rest())?,
        _ => return Err(Refusal::OtherProtocol),
    };
    let source = MacAddress(source);
    Ok(Received { source, payload })
}

/// The parts of an IPv4 header that matter (RFC 791 §3.1).
fn ipv4(packet: &[u8]) -> Result<Payload<'_>, Refusal> {
    let cut_off = Refusal::Truncated("the IPv4 packet");
    let first = *packet.first().ok_or(cut_off)?;
    if first >> 4 != 4 {
        return Err(Refusal::Invalid("version of IPv4"));
    }
    let header_length = usize::from(first & 0xf).saturating_mul(4);
    if header_length < 20 {
        return Err(Refusal::Invalid("length of the IPv4 header"));
    }
    let (header, _) = packet.split_at_checked(header_length).ok_or(cut_off)?;
    if checksum(&[header]) != 0 {
        return Err(Refusal::Invalid("checksum of the IPv4 header"));
    }
    let mut reader = Reader::new(header);
    let (total, fragment, protocol) = (|| {
        reader.take(2)?;
        let total = reader.u16()?;
        reader.take(2)?;
        let fragment = reader.u16()?;
        reader.take(1)?;
        Some((total, fragment, reader.u8()?))
    })()
    .ok_or(cut_off)?;
    // The bit that forbids fragments may be set.
    if fragment & 0xbfff != 0 {
        return Err(Refusal::Invalid("fragment of a message"));
    }
    if protocol != UDP {
        return Err(Refusal::OtherProtocol);
    }
    let packet = packet.get(header_length..total.into()).ok_or(cut_off)?;
    let (port, message) = udp(packet)?;
    match port {
        SERVER_PORT => Ok(Payload::Dhcp4(message)),
        _ => Err(Refusal::OtherProtocol),
    }
}

/// The header of IPv6 (RFC 8200 §3); extension headers are of no use in these protocols.
fn ipv6(packet: &[u8]) -> Result<Payload<'_>, Refusal> {
    let mut reader = Reader::new(packet);
    let (first, length, next, hops, source, destination) = (|| {
        Some((
            reader.u32()?,
            reader.u16()?,
            reader.u8()?,
            reader.u8()?,
            reader.ipv6()?,
            reader.ipv6()?,
        ))
    })()
    .ok_or(Refusal::Truncated("the IPv6 header"))?;
    if first >> 28 != 6 {
        return Err(Refusal::Invalid("version of IPv6"));
    }
    let message = (reader.take(length.into())).ok_or(Refusal::Truncated("the IPv6 packet"))?;
    match next {
        UDP => {
            let (port, message) = udp(message)?;
            if port != SERVER_PORT_6 {
                return Err(Refusal::OtherProtocol);
            }
            if destination != ALL_DHCP_SERVERS {
                return Err(Refusal::Invalid("destination of a DHCPv6 message"));
            }
            Ok(Payload::Dhcp6 { source, message })
        }
        ICMPV6 if hops != HOP_LIMIT => Err(Refusal::Invalid("hop limit of a neighbour's message")),
        ICMPV6 => {
            let pseudo = pseudo_header(source, destination, length.into(), ICMPV6);
            match checksum(&[&pseudo, message]) {
                0 => Ok(Payload::Icmp6 { source, message }),
                _ => Err(Refusal::Invalid("checksum of ICMPv6")),
            }
        }
        _ => Err(Refusal::OtherProtocol),
    }
}

/// Returns the destination's port and the message.
fn udp(packet: &[u8]) -> Result<(u16, &[u8]), Refusal> {
    let cut_off = Refusal::Truncated("the UDP datagram");
    let mut reader = Reader::new(packet);
    let (port, length) = (|| {
        reader.u16()?;
        Some((reader.u16()?, reader.u16()?))
    })()
    .ok_or(cut_off)?;
    if usize::from(length) < UDP_HEADER {
        return Err(Refusal::Invalid("length of the UDP datagram"));
    }
    let message = packet.get(UDP_HEADER..length.into()).ok_or(cut_off)?;
    Ok((port, message))
}

/// Wraps `payload` for Ethernet.
pub(crate) fn ethernet(from: MacAddress, to: MacAddress, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(payload.len().saturating_add(14));
    frame.extend_from_slice(&to.0);
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&kind.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Wraps an ARP packet.
pub(crate) fn arp(from: MacAddress, to: MacAddress, packet: &[u8]) -> Vec<u8> {
    ethernet(from, to, ETHERTYPE_ARP, packet)
}

/// Wraps a message from a DHCP server to its client. It is bounded by the caller.
pub(crate) fn dhcp4(
    from: (MacAddress, Ipv4Addr),
    to: (MacAddress, Ipv4Addr),
    message: &[u8],
) -> Vec<u8> {
    let length = u16::try_from(message.len()).unwrap_or(u16::MAX);
    let total = length.saturating_add(IPV4_UDP);
    let mut packet = Vec::with_capacity(total.into());
    packet.extend_from_slice(&[0x45, 0]);
    packet.extend_from_slice(&total.to_be_bytes());
    // No identification, not to be fragmented; 64 hops; UDP; the checksum follows.
    packet.extend_from_slice(&[0, 0, 0x40, 0, 64, UDP, 0, 0]);
    packet.extend_from_slice(&from.1.octets());
    packet.extend_from_slice(&to.1.octets());
    let sum = checksum(&[&packet]).to_be_bytes();
    if let Some(place) = packet.get_mut(10..12) {
        place.copy_from_slice(&sum);
    }
    let mut pseudo = Vec::with_capacity(12);
    pseudo.extend_from_slice(&from.1.octets());
    pseudo.extend_from_slice(&to.1.octets());
    pseudo.extend_from_slice(&[0, UDP]);
    pseudo.extend_from_slice(&length.saturating_add(8).to_be_bytes());
    packet.extend(datagram((SERVER_PORT, CLIENT_PORT), &pseudo, message));
    ethernet(from.0, to.0, ETHERTYPE_IPV4, &packet)
}

/// Wraps a message from a DHCPv6 server to its client.
pub(crate) fn dhcp6(
    from: (MacAddress, Ipv6Addr),
    to: (MacAddress, Ipv6Addr),
    message: &[u8],
) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let pseudo = pseudo_header(from.1, to.1, length.saturating_add(8), UDP);
    let datagram = datagram((SERVER_PORT_6, CLIENT_PORT_6), &pseudo, message);
    ip6(from, to, UDP, 64, &datagram)
}

/// Wraps an ICMPv6 message to a neighbour, and fills in its checksum, whose bytes are zero.
pub(crate) fn icmp6(
    from: (MacAddress, Ipv6Addr),
    to: (MacAddress, Ipv6Addr),
    mut message: Vec<u8>,
) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let pseudo = pseudo_header(from.1, to.1, length, ICMPV6);
    let sum = checksum(&[&pseudo, &message]).to_be_bytes();
    if let Some(place) = message.get_mut(2..4) {
        place.copy_from_slice(&sum);
    }
    ip6(from, to, ICMPV6, HOP_LIMIT, &message)
}

fn ip6(
    from: (MacAddress, Ipv6Addr),
    to: (MacAddress, Ipv6Addr),
    next: u8,
    hops: u8,
    payload: &[u8],
) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap_or(u16::MAX);
    let mut packet = Vec::with_capacity(payload.len().saturating_add(40));
    packet.extend_from_slice(&[0x60, 0, 0, 0]);
    packet.extend_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&[next, hops]);
    packet.extend_from_slice(&from.1.octets());
    packet.extend_from_slice(&to.1.octets());
    packet.extend_from_slice(payload);
    ethernet(from.0, to.0, ETHERTYPE_IPV6, &packet)
}

fn datagram(ports: (u16, u16), pseudo: &[u8], message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len().saturating_add(UDP_HEADER)).unwrap_or(u16::MAX);
    let mut datagram = Vec::with_capacity(length.into());
    for word in [ports.0, ports.1, length, 0] {
        datagram.extend_from_slice(&word.to_be_bytes());
    }
    datagram.extend_from_slice(message);
    // A sum of zero would say that there is none (RFC 768).
    let sum = match checksum(&[pseudo, &datagram]) {
        0 => 0xffff,
        sum => sum,
    };
    if let Some(place) = datagram.get_mut(6..8) {
        place.copy_from_slice(&sum.to_be_bytes());
    }
    datagram
}

fn pseudo_header(source: Ipv6Addr, destination: Ipv6Addr, length: u32, next: u8) -> Vec<u8> {
    let mut pseudo = Vec::with_capacity(40);
    pseudo.extend_from_slice(&source.octets());
    pseudo.extend_from_slice(&destination.octets());
    pseudo.extend_from_slice(&length.to_be_bytes());
    pseudo.extend_from_slice(&[0, 0, 0, next]);
    pseudo
}

/// The checksum of the internet protocols (RFC 1071) over `parts`, each of which but the last has
/// an even number of bytes.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum: u32 = 0;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        let word = match *pair {
            [high, low] => u16::from_be_bytes([high, low]),
            [high] => u16::from_be_bytes([high, 0]),
            _ => 0,
        };
        sum = sum.wrapping_add(word.into());
        sum = (sum & 0xffff).wrapping_add(sum >> 16);
    }
    // The carry of the last addition is in already.
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::tests::{CLIENT, SERVER};

    /// A frame of a client of DHCP.
    pub(crate) fn request4(message: &[u8]) -> Vec<u8> {
        let from = (CLIENT, Ipv4Addr::UNSPECIFIED);
        let to = (MacAddress::BROADCAST, Ipv4Addr::BROADCAST);
        let mut frame = dhcp4(from, to, message);
        swap_ports(&mut frame[34..38]);
        frame
    }

    /// A frame of a client of DHCPv6.
    pub(crate) fn request6(message: &[u8]) -> Vec<u8> {
        let to = (MacAddress([0x33, 0x33, 0, 1, 0, 2]), ALL_DHCP_SERVERS);
        let mut frame = dhcp6((CLIENT, CLIENT.link_local()), to, message);
        swap_ports(&mut frame[54..58]);
        frame
    }

    fn swap_ports(ports: &mut [u8]) {
        ports.rotate_left(2);
    }

    #[test]
    fn the_checksum_is_that_of_the_rfc() {
        // RFC 1071 §3.
        assert_eq!(
            checksum(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]),
            !0xddf2
        );
        assert_eq!(checksum(&[&[0xff; 1500]]), 0);
        assert_eq!(checksum(&[&[1]]), !0x0100);
        assert_eq!(checksum(&[]), 0xffff);
    }

    #[test]
    fn a_message_is_found_in_its_frame() {
        let frame = request4(b"message");
        let parsed = parse(&frame).unwrap();
        assert_eq!(parsed.source, CLIENT);
        assert_eq!(parsed.payload, Payload::Dhcp4(b"message"));
        let frame = request6(b"message");
        let message = Payload::Dhcp6 {
            source: CLIENT.link_local(),
            message: b"message",
        };
        assert_eq!(parse(&frame).unwrap().payload, message);
    }

    #[test]
    fn what_stands_behind_the_packet_is_not_part_of_it() {
        let mut frame = request4(b"message");
        frame.extend_from_slice(&[0xff; 18]);
        assert_eq!(parse(&frame).unwrap().payload, Payload::Dhcp4(b"message"));
    }

    #[test]
    fn headers_with_wrong_fields_are_refused() {
        let good = request4(&[7; 40]);
        let fix = |frame: &mut Vec<u8>| {
            frame[24..26].fill(0);
            let sum = checksum(&[&frame[14..34]]);
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        };
        for (place, value, refusal) in [
            (14, 0x55, Refusal::Invalid("version of IPv4")),
            (14, 0x44, Refusal::Invalid("length of the IPv4 header")),
            (14, 0x4f, Refusal::Invalid("checksum of the IPv4 header")),
            (20, 0x20, Refusal::Invalid("fragment of a message")),
            (21, 0x01, Refusal::Invalid("fragment of a message")),
            (23, 6, Refusal::OtherProtocol),
            (16, 0xff, Refusal::Truncated("the IPv4 packet")),
            (17, 21, Refusal::Truncated("the UDP datagram")),
            (38, 0xff, Refusal::Truncated("the UDP datagram")),
            (39, 7, Refusal::Invalid("length of the UDP datagram")),
            (37, 68, Refusal::OtherProtocol),
            (12, 0x12, Refusal::OtherProtocol),
        ] {
            let mut frame = good.clone();
            frame[place] = value;
            fix(&mut frame);
            assert_eq!(parse(&frame), Err(refusal), "{place}");
        }
        let mut frame = good.clone();
        frame[24] ^= 1;
        assert_eq!(
            parse(&frame),
            Err(Refusal::Invalid("checksum of the IPv4 header"))
        );
        frame.resize(MAX_FRAME + 1, 0);
        assert_eq!(parse(&frame), Err(Refusal::TooLong(MAX_FRAME + 1)));
    }

    #[test]
    fn every_cut_of_a_frame_is_refused() {
        for frame in [request4(&[1; 300]), request6(&[1; 100])] {
            for length in 0..frame.len() {
                assert!(parse(&frame[..length]).is_err(), "{length}");
            }
        }
    }

    #[test]
    fn answers_carry_sums_that_are_right() {
        let frame = dhcp4(
            (SERVER, [10, 0, 0, 1].into()),
            (CLIENT, [10, 0, 0, 2].into()),
            b"odd",
        );
        assert_eq!(checksum(&[&frame[14..34]]), 0);
        let pseudo = [10, 0, 0, 1, 10, 0, 0, 2, 0, UDP, 0, 11];
        assert_eq!(checksum(&[&pseudo, &frame[34..]]), 0);
        let (from, to) = (SERVER.link_local(), CLIENT.link_local());
        let frame = dhcp6((SERVER, from), (CLIENT, to), b"odd");
        assert_eq!(
            checksum(&[&pseudo_header(from, to, 11, UDP), &frame[54..]]),
            0
        );
    }
}
