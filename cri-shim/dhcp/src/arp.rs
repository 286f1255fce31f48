//! Answers to ARP requests for the server's own address (RFC 826), and for those of neighbours that
//! do not answer themselves.

use std::net::Ipv4Addr;

use crate::config::{Config, MacAddress};
use crate::frame;
use crate::read::Reader;
use crate::refusal::Refusal;

/// Ethernet, IPv4, and the lengths of their addresses.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// Answers a request of the guest.
pub(crate) fn answer(config: &Config, packet: &[u8]) -> Result<Vec<u8>, Refusal> {
    let (kind, operation, sender_mac, sender, target) =
        read(packet).ok_or(Refusal::Truncated("the ARP packet"))?;
    if kind != ETHERNET_IPV4 || operation != REQUEST {
        return Err(Refusal::Invalid("ARP request"));
    }
    if sender_mac != config.client {
        return Err(Refusal::OtherClient("ARP"));
    }
    let neighbour = config.neighbours.iter().find(|one| one.address == target);
    let mac = match neighbour {
        Some(neighbour) => neighbour.mac,
        None if target == config.server_address => config.server,
        None => return Err(Refusal::OtherServer),
    };
    let mut reply = Vec::with_capacity(28);
    reply.extend_from_slice(&ETHERNET_IPV4);
    reply.extend_from_slice(&REPLY.to_be_bytes());
    reply.extend_from_slice(&mac.0);
    reply.extend_from_slice(&target.octets());
    reply.extend_from_slice(&config.client.0);
    reply.extend_from_slice(&sender.octets());
    Ok(frame::arp(config.server, config.client, &reply))
}

fn read(packet: &[u8]) -> Option<([u8; 6], u16, MacAddress, Ipv4Addr, Ipv4Addr)> {
    let mut reader = Reader::new(packet);
    let (kind, operation) = (reader.array()?, reader.u16()?);
    let (mac, sender) = (reader.array()?, reader.ipv4()?);
    reader.take(6)?;
    Some((kind, operation, MacAddress(mac), sender, reader.ipv4()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Ipv4Neighbour;
    use crate::config::tests::{CLIENT, SERVER, plain};

    fn request(target: Ipv4Addr) -> Vec<u8> {
        let mut packet = ETHERNET_IPV4.to_vec();
        packet.extend_from_slice(&REQUEST.to_be_bytes());
        packet.extend_from_slice(&CLIENT.0);
        packet.extend_from_slice(&[10, 1, 0, 2]);
        packet.extend_from_slice(&[0; 6]);
        packet.extend_from_slice(&target.octets());
        packet
    }

    #[test]
    fn who_asks_for_the_servers_card_is_told() {
        let config = plain();
        let frame = answer(&config, &request(config.server_address)).unwrap();
        assert_eq!(frame[..6], CLIENT.0);
        assert_eq!(frame[6..12], SERVER.0);
        assert_eq!(frame[20..22], [0, 2]);
        assert_eq!(frame[22..28], SERVER.0);
        assert_eq!(frame[28..32], config.server_address.octets());
        assert_eq!(frame[38..42], [10, 1, 0, 2]);
    }

    #[test]
    fn a_neighbour_that_is_silent_is_answered_for() {
        let mut config = plain();
        let neighbour = Ipv4Neighbour {
            address: [169, 254, 1, 1].into(),
            mac: MacAddress([0xee; 6]),
        };
        config.neighbours.push(neighbour);
        let frame = answer(&config, &request(neighbour.address)).unwrap();
        assert_eq!(frame[22..28], neighbour.mac.0);
        assert_eq!(frame[28..32], neighbour.address.octets());
    }

    #[test]
    fn requests_for_others_and_broken_ones_get_no_answer() {
        let config = plain();
        let other = request([10, 1, 0, 1].into());
        assert_eq!(answer(&config, &other), Err(Refusal::OtherServer));
        let good = request(config.server_address);
        for place in [0, 7, 13] {
            let mut bad = good.clone();
            bad[place] ^= 0x40;
            assert!(answer(&config, &bad).is_err(), "{place}");
        }
        for length in 0..good.len() {
            assert!(answer(&config, &good[..length]).is_err(), "{length}");
        }
    }
}
