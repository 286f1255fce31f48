//! Hostile guests, for the fuzz target.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::config::{
    Config, Ipv4Lease, Ipv4Option, Ipv4Route, Ipv6Address, Ipv6Lease, Ipv6Router, MacAddress,
};
use crate::frame;
use crate::server::Server;

const CLIENT: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);

/// Plays a guest whose frames are parts of `data`: a byte for the kind, two for the length, and the
/// frame or the message in it.
///
/// # Panics
/// If an answer is not one that a guest may get.
pub fn run(data: &[u8]) {
    let start = Instant::now();
    let mut elapsed = Duration::ZERO;
    let Ok(mut server) = Server::new(config()) else {
        return;
    };
    let mut rest = data;
    while let [kind, high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (part, after) = more.split_at(length);
        rest = after;
        let now = start.checked_add(elapsed).unwrap_or(start);
        elapsed = elapsed.saturating_add(Duration::from_millis(100));
        let answer = server.answer(&wrap(*kind, part), now);
        if let Some(answer) = answer {
            let bytes = answer.as_ref();
            assert!(
                bytes.len() <= frame::MAX_FRAME,
                "an answer of {} bytes",
                bytes.len()
            );
            assert!(
                frame::parse(bytes).is_err() || *kind % 8 >= 4,
                "it answers itself"
            );
        }
    }
    let _ = server.announce();
}

fn wrap(kind: u8, part: &[u8]) -> Vec<u8> {
    let all = MacAddress::BROADCAST;
    let link = CLIENT.link_local();
    match kind % 8 {
        // A message with headers that are right: the ports are those of a client.
        0 | 1 => {
            let mut message = part.to_vec();
            if kind % 8 == 1 {
                // The fields before the options are right, too.
                message = vec![1, 1, 6, 0];
                message.resize(28, 0);
                message.extend_from_slice(&CLIENT.0);
                message.resize(236, 0);
                message.extend_from_slice(&[99, 130, 83, 99]);
                message.extend_from_slice(part);
            }
            let mut frame = frame::dhcp4(
                (CLIENT, Ipv4Addr::UNSPECIFIED),
                (all, Ipv4Addr::BROADCAST),
                &message,
            );
            if let Some(ports) = frame.get_mut(34..38) {
                ports.rotate_left(2);
            }
            frame
        }
        2 | 3 => {
            let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
            let mut frame = frame::dhcp6((CLIENT, link), (all, group), part);
            if let Some(ports) = frame.get_mut(54..58) {
                ports.rotate_left(2);
            }
            frame
        }
        4 => {
            let mut message = vec![133, 0, 0, 0, 0, 0, 0, 0];
            message.extend_from_slice(part);
            frame::icmp6((CLIENT, link), (all, frame::ALL_NODES), message)
        }
        5 => frame::arp(CLIENT, all, part),
        _ => part.to_vec(),
    }
}

fn config() -> Config {
    let names = |text: &str| text.split(' ').map(str::to_owned).collect();
    Config {
        mtu: Some(1450),
        host_name: Some("guest".to_owned()),
        domain: Some("example".to_owned()),
        search: names("a.example b.example"),
        name_servers: vec![
            IpAddr::V4(Ipv4Addr::new(10, 0, 0, 10)),
            IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 10)),
        ],
        others: vec![Ipv4Option {
            code: 240,
            value: vec![7; 255],
        }],
        ipv4: Some(Ipv4Lease {
            address: Ipv4Addr::new(10, 0, 0, 2),
            prefix_length: 32,
            routes: vec![Ipv4Route {
                destination: Ipv4Addr::UNSPECIFIED,
                prefix_length: 0,
                gateway: Some(Ipv4Addr::new(169, 254, 1, 1)),
            }],
        }),
        ipv6: Some(Ipv6Lease {
            addresses: vec![Ipv6Address {
                address: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
                prefix_length: 64,
            }],
            router: Ipv6Router::Server,
        }),
        ..Config::new(CLIENT)
    }
}
