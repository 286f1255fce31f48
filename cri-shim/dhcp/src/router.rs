//! Router advertisements (RFC 4861), which tell a guest that its addresses come by DHCPv6, what is
//! on the link, and who the default router is.

use std::net::{IpAddr, Ipv6Addr};

use crate::config::{Config, Ipv6Lease, Ipv6Router, MacAddress};
use crate::frame;
use crate::names;
use crate::read::Reader;
use crate::refusal::Refusal;

const SOLICITATION: u8 = 133;
const ADVERTISEMENT: u8 = 134;

/// Hops of a guest's packets.
const HOP_LIMIT: u8 = 64;
/// Addresses, and all else, come by DHCPv6.
const MANAGED_AND_OTHER: u8 = 0xc0;
/// Seconds for which a router is the default one; the longest that RFC 4861 allows, as a guest may
/// be paused for a while. It is announced more often.
const ROUTER_LIFETIME: u16 = 9000;
/// For ever.
const INFINITE: u32 = u32::MAX;

const OPTION_SOURCE_MAC: u8 = 1;
const OPTION_PREFIX: u8 = 3;
const OPTION_MTU: u8 = 5;
const OPTION_NAME_SERVERS: u8 = 25;
const OPTION_SEARCH: u8 = 31;
/// The prefix is on the link; nobody makes an address of it.
const ON_LINK: u8 = 0x80;

/// Answers a solicitation of the guest.
pub(crate) fn answer(
    config: &Config,
    source: Ipv6Addr,
    message: &[u8],
) -> Result<Vec<u8>, Refusal> {
    let lease = config.ipv6.as_ref().ok_or(Refusal::NoLease("IPv6"))?;
    check(config, source, message)?;
    let destination = match source.is_unspecified() {
        true => frame::ALL_NODES,
        false => source,
    };
    Ok(advertise(config, lease, destination))
}

/// Returns the advertisement that is sent without being asked for, so that the router stays one.
pub(crate) fn announce(config: &Config) -> Option<Vec<u8>> {
    let lease = config.ipv6.as_ref()?;
    (lease.router != Ipv6Router::None).then(|| advertise(config, lease, frame::ALL_NODES))
}

/// The checks of RFC 4861 §6.1.1; the hop limit and the checksum were right.
fn check(config: &Config, source: Ipv6Addr, message: &[u8]) -> Result<(), Refusal> {
    let cut_off = Refusal::Truncated("the router solicitation");
    let mut reader = Reader::new(message);
    let [kind, code] = reader.array().ok_or(cut_off)?;
    if kind != SOLICITATION {
        return Err(Refusal::OtherProtocol);
    }
    if code != 0 {
        return Err(Refusal::Invalid("code of a router solicitation"));
    }
    if !source.is_unspecified() && !source.is_unicast_link_local() {
        return Err(Refusal::Source(source));
    }
    reader.take(6).ok_or(cut_off)?;
    while let Some(code) = reader.u8() {
        let eights = reader.u8().ok_or(cut_off)?;
        let length = usize::from(eights).saturating_mul(8).saturating_sub(2);
        if length == 0 {
            let code = code.into();
            return Err(Refusal::OptionLength { code, length });
        }
        let value = reader.take(length).ok_or(cut_off)?;
        if code == OPTION_SOURCE_MAC {
            if source.is_unspecified() {
                return Err(Refusal::OptionForbidden(code.into()));
            }
            if value != config.client.0 {
                return Err(Refusal::OtherClient("a router solicitation"));
            }
        }
    }
    Ok(())
}

fn advertise(config: &Config, lease: &Ipv6Lease, destination: Ipv6Addr) -> Vec<u8> {
    let (source, lifetime) = match lease.router {
        Ipv6Router::None => (config.server.link_local(), 0),
        Ipv6Router::Server => (config.server.link_local(), ROUTER_LIFETIME),
        Ipv6Router::Other(router) => (router, ROUTER_LIFETIME),
    };
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, HOP_LIMIT, MANAGED_AND_OTHER];
    message.extend_from_slice(&lifetime.to_be_bytes());
    // How long neighbours are believed to be there is the guest's own decision.
    message.extend_from_slice(&[0; 8]);
    // Another router's card is not known here; the guest asks for it.
    if lease.router == Ipv6Router::Server {
        message.extend_from_slice(&[OPTION_SOURCE_MAC, 1]);
        message.extend_from_slice(&config.server.0);
    }
    if let Some(mtu) = config.mtu {
        message.extend_from_slice(&[OPTION_MTU, 1, 0, 0]);
        message.extend_from_slice(&u32::from(mtu).to_be_bytes());
    }
    push_prefixes(&mut message, lease);
    push_name_servers(&mut message, config);
    push_search(&mut message, config);
    // The frame's source is the server in each case: a switch must not learn that another router
    // is here.
    let to = match destination == frame::ALL_NODES {
        true => MacAddress([0x33, 0x33, 0, 0, 0, 1]),
        false => config.client,
    };
    frame::icmp6((config.server, source), (to, destination), message)
}

fn push_prefixes(message: &mut Vec<u8>, lease: &Ipv6Lease) {
    let mut known = Vec::new();
    for own in lease.addresses.iter().filter(|own| own.prefix_length < 128) {
        let host = 128_u32.saturating_sub(own.prefix_length.into());
        let mask = u128::MAX.checked_shl(host).unwrap_or(0);
        let prefix = Ipv6Addr::from_bits(own.address.to_bits() & mask);
        if known.contains(&(prefix, own.prefix_length)) {
            continue;
        }
        known.push((prefix, own.prefix_length));
        message.extend_from_slice(&[OPTION_PREFIX, 4, own.prefix_length, ON_LINK]);
        message.extend_from_slice(&INFINITE.to_be_bytes());
        message.extend_from_slice(&INFINITE.to_be_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(&prefix.octets());
    }
}

/// RFC 8106 §5.1.
fn push_name_servers(message: &mut Vec<u8>, config: &Config) {
    let servers: Vec<Ipv6Addr> = name_servers(config).collect();
    if servers.is_empty() {
        return;
    }
    let eights = servers.len().saturating_mul(2).saturating_add(1);
    message.extend_from_slice(&[OPTION_NAME_SERVERS, u8::try_from(eights).unwrap_or(u8::MAX)]);
    message.extend_from_slice(&[0; 2]);
    message.extend_from_slice(&INFINITE.to_be_bytes());
    message.extend(servers.iter().flat_map(Ipv6Addr::octets));
}

/// RFC 8106 §5.2; left out if it would not fit into a packet of any link.
fn push_search(message: &mut Vec<u8>, config: &Config) {
    let mut names = names::encode(&config.search);
    let length = names.len().saturating_add(8).next_multiple_of(8);
    let whole = length.saturating_add(message.len()).saturating_add(40);
    if names.is_empty() || whole > 1280 {
        return;
    }
    names.resize(length.saturating_sub(8), 0);
    let eights = u8::try_from(length / 8).unwrap_or(u8::MAX);
    message.extend_from_slice(&[OPTION_SEARCH, eights, 0, 0]);
    message.extend_from_slice(&INFINITE.to_be_bytes());
    message.extend_from_slice(&names);
}

/// The IPv6 addresses among the name servers.
pub(crate) fn name_servers(config: &Config) -> impl Iterator<Item = Ipv6Addr> {
    config
        .name_servers
        .iter()
        .filter_map(|server| match server {
            IpAddr::V6(server) => Some(*server),
            IpAddr::V4(_) => None,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{CLIENT, SERVER, plain};
    use crate::frame::{Payload, parse};

    const SOLICIT: [u8; 8] = [SOLICITATION, 0, 0, 0, 0, 0, 0, 0];

    fn solicit(option: &[u8]) -> Vec<u8> {
        [&SOLICIT[..], option].concat()
    }

    /// The message of a frame whose checksum and hop limit are right.
    fn advertisement(frame: &[u8]) -> (Ipv6Addr, &[u8]) {
        match parse(frame).unwrap().payload {
            Payload::Icmp6 { source, message } => (source, message),
            other => panic!("{other:?}"),
        }
    }

    fn options(message: &[u8]) -> Vec<(u8, &[u8])> {
        let mut options = Vec::new();
        let mut rest = &message[16..];
        while let [code, eights, ..] = *rest {
            let (option, more) = rest.split_at(usize::from(eights) * 8);
            options.push((code, &option[2..]));
            rest = more;
        }
        options
    }

    #[test]
    fn a_guest_learns_the_link_and_its_router() {
        let config = plain();
        let own = [&[OPTION_SOURCE_MAC, 1][..], &CLIENT.0].concat();
        let frame = answer(&config, CLIENT.link_local(), &solicit(&own)).unwrap();
        assert_eq!(frame[..6], CLIENT.0);
        let (source, message) = advertisement(&frame);
        assert_eq!(source, SERVER.link_local());
        assert_eq!(message[..2], [ADVERTISEMENT, 0]);
        assert_eq!(message[5], MANAGED_AND_OTHER);
        assert_eq!(message[6..8], ROUTER_LIFETIME.to_be_bytes());
        let options = options(message);
        let codes: Vec<u8> = options.iter().map(|(code, _)| *code).collect();
        assert_eq!(codes, [1, 5, 3, 25, 31]);
        assert_eq!(options[0].1, SERVER.0);
        assert_eq!(options[1].1[2..], 1450_u32.to_be_bytes());
        assert_eq!(options[2].1[..2], [64, ON_LINK]);
        assert_eq!(
            options[2].1[14..],
            "fd00::".parse::<Ipv6Addr>().unwrap().octets()
        );
        assert_eq!(
            options[3].1[6..],
            "fd00::a".parse::<Ipv6Addr>().unwrap().octets()
        );
    }

    #[test]
    fn a_guest_without_an_address_yet_is_answered_by_a_group() {
        let frame = answer(&plain(), Ipv6Addr::UNSPECIFIED, &SOLICIT).unwrap();
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(frame[38..54], frame::ALL_NODES.octets());
    }

    #[test]
    fn another_router_is_announced_by_its_own_address() {
        let mut config = plain();
        let router = "fe80::ecee:eeff:feee:eeee".parse().unwrap();
        config.ipv6.as_mut().unwrap().router = Ipv6Router::Other(router);
        let frame = announce(&config).unwrap();
        let (source, message) = advertisement(&frame);
        assert_eq!(source, router);
        assert_eq!(message[6..8], ROUTER_LIFETIME.to_be_bytes());
        assert!(
            options(message)
                .iter()
                .all(|(code, _)| *code != OPTION_SOURCE_MAC)
        );
    }

    #[test]
    fn without_a_router_nobody_is_announced() {
        let mut config = plain();
        config.ipv6.as_mut().unwrap().router = Ipv6Router::None;
        assert_eq!(announce(&config), None);
        let frame = answer(&config, CLIENT.link_local(), &SOLICIT).unwrap();
        let (_, message) = advertisement(&frame);
        assert_eq!(message[6..8], [0, 0]);
        config.ipv6 = None;
        let refused = answer(&config, CLIENT.link_local(), &SOLICIT);
        assert_eq!(refused, Err(Refusal::NoLease("IPv6")));
    }

    #[test]
    fn solicitations_that_no_host_sends_are_refused() {
        let config = plain();
        let link = CLIENT.link_local();
        let global: Ipv6Addr = "fd00::2".parse().unwrap();
        assert_eq!(
            answer(&config, global, &SOLICIT),
            Err(Refusal::Source(global))
        );
        let other = answer(&config, link, &solicit(&[1, 1, 9, 9, 9, 9, 9, 9]));
        assert_eq!(other, Err(Refusal::OtherClient("a router solicitation")));
        let own = [&[OPTION_SOURCE_MAC, 1][..], &CLIENT.0].concat();
        let early = answer(&config, Ipv6Addr::UNSPECIFIED, &solicit(&own));
        assert_eq!(early, Err(Refusal::OptionForbidden(1)));
        let empty = answer(&config, link, &solicit(&[9, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(empty, Err(Refusal::OptionLength { code: 9, length: 0 }));
        for cut in [
            &SOLICIT[..7],
            &SOLICIT[..1],
            &solicit(&[9, 2, 0, 0]),
            &solicit(&[9]),
        ] {
            assert!(answer(&config, link, cut).is_err(), "{cut:?}");
        }
        let advertisement = [ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            answer(&config, link, &advertisement),
            Err(Refusal::OtherProtocol)
        );
    }
}
