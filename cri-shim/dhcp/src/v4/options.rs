//! Options of answers: which ones, and how they are written (RFC 2132).

use std::net::{IpAddr, Ipv4Addr};

use super::code;
use super::request::{Kind, Request};
use super::{LEASE_TIME, REBINDING_TIME, RENEWAL_TIME};
use crate::config::{Config, Ipv4Lease, Ipv4Route};
use crate::names;

/// What a client gets that does not say what it wants.
const UNASKED: [u8; 6] = [
    code::MASK,
    code::ROUTER,
    code::NAME_SERVER,
    code::HOST_NAME,
    code::DOMAIN,
    code::MTU,
];

/// What is left out of an answer that is too long, in this order.
const DISPENSABLE: [u8; 8] = [
    code::SEARCH,
    code::DOMAIN,
    code::ROUTES_MICROSOFT,
    code::ROUTES,
    code::HOST_NAME,
    code::MTU,
    code::NAME_SERVER,
    code::MACHINE_ID,
];

/// Most bytes of one option; longer values are split (RFC 3396).
const MAX_VALUE: usize = 255;

/// The options of an answer, in their order.
#[derive(Debug, Default)]
pub(super) struct Options {
    list: Vec<(u8, Vec<u8>)>,
    /// The router, for an answer that is too short for routes.
    router: Vec<u8>,
    /// The numbers of those that the user has chosen: they are left out first.
    others: Vec<u8>,
}

/// Returns the options of an answer to `request`.
pub(super) fn answer(
    config: &Config,
    lease: &Ipv4Lease,
    request: &Request<'_>,
    kind: Kind,
    is_inform: bool,
) -> Options {
    let mut options = Options::default();
    // The first byte only: a type is a small number.
    options.push(code::MESSAGE_TYPE, vec![kind as u8]);
    options.push(code::SERVER, config.server_address.octets().to_vec());
    if kind == Kind::Nak {
        options.push(code::MESSAGE, b"this address is not the guest's".to_vec());
    } else {
        if !is_inform {
            options.push_seconds(code::LEASE_TIME, LEASE_TIME);
            options.push_seconds(code::RENEWAL_TIME, RENEWAL_TIME);
            options.push_seconds(code::REBINDING_TIME, REBINDING_TIME);
        }
        options.others = config.others.iter().map(|other| other.code).collect();
        options.push_asked(config, lease, request.asked.unwrap_or(&UNASKED));
        if request.asked.is_none() {
            options.push_others(config, |_| true);
        }
    }
    for (code, value) in [
        (code::CLIENT_ID, request.client_id),
        (code::MACHINE_ID, request.machine_id),
    ] {
        if let Some(value) = value {
            options.push(code, value.to_vec());
        }
    }
    options
}

impl Options {
    fn push(&mut self, code: u8, value: Vec<u8>) {
        let is_there = self.list.iter().any(|(other, _)| *other == code);
        // A client that asks for the same option a hundred times gets it once.
        if !value.is_empty() && !is_there {
            self.list.push((code, value));
        }
    }

    fn push_seconds(&mut self, code: u8, seconds: u32) {
        self.push(code, seconds.to_be_bytes().to_vec());
    }

    fn push_asked(&mut self, config: &Config, lease: &Ipv4Lease, asked: &[u8]) {
        let routes = Routes::of(lease);
        self.router = routers(lease);
        // A client that reads routes takes the default one from them, too, and no other
        // (RFC 3442, "DHCP Client Behavior"). One that does not ask for them does not read them.
        let takes_routes = asked.iter().any(|code| is_routes(*code)) && routes.are_needed;
        for code in asked {
            let value = match *code {
                code::MASK => lease.mask().octets().to_vec(),
                code::ROUTER if !takes_routes => self.router.clone(),
                code::NAME_SERVER => name_servers(&config.name_servers),
                code::HOST_NAME => text(config.host_name.as_deref()),
                code::DOMAIN => text(config.domain.as_deref()),
                code::MTU => config.mtu.map(u16::to_be_bytes).map_or(vec![], Vec::from),
                code::SEARCH => names::encode_compressed(&config.search),
                code if is_routes(code) && takes_routes => routes.encode(),
                code => {
                    self.push_others(config, |other| other == code);
                    continue;
                }
            };
            self.push(*code, value);
        }
    }

    fn push_others(&mut self, config: &Config, is_asked: impl Fn(u8) -> bool) {
        for other in config.others.iter().filter(|other| is_asked(other.code)) {
            self.push(other.code, other.value.clone());
        }
    }

    /// Writes the options into at most `space` bytes. What fits is written whole.
    pub(super) fn encode(&self, space: usize) -> Vec<u8> {
        let mut list = self.list.clone();
        for code in self.others.iter().copied().chain(DISPENSABLE) {
            if length(&list) <= space {
                break;
            }
            let count = list.len();
            list.retain(|(other, _)| *other != code);
            if list.len() == count {
                continue;
            }
            tracing::debug!(code, "an option does not fit into the answer to the guest");
            let has_routes = list.iter().any(|(code, _)| is_routes(*code));
            let has_router = list.iter().any(|(other, _)| *other == code::ROUTER);
            if is_routes(code) && !has_routes && !has_router && !self.router.is_empty() {
                list.push((code::ROUTER, self.router.clone()));
            }
        }
        let mut bytes = Vec::with_capacity(space);
        for (code, value) in &list {
            for part in value.chunks(MAX_VALUE) {
                bytes.push(*code);
                bytes.push(u8::try_from(part.len()).unwrap_or(u8::MAX));
                bytes.extend_from_slice(part);
            }
        }
        bytes.push(code::END);
        bytes
    }
}

/// How many bytes `list` takes, with the option for its end.
fn length(list: &[(u8, Vec<u8>)]) -> usize {
    let one = |(_, value): &(u8, Vec<u8>)| {
        let headers = value.len().div_ceil(MAX_VALUE).saturating_mul(2);
        value.len().saturating_add(headers)
    };
    list.iter().map(one).sum::<usize>().saturating_add(1)
}

fn is_routes(code: u8) -> bool {
    matches!(code, code::ROUTES | code::ROUTES_MICROSOFT)
}

fn text(text: Option<&str>) -> Vec<u8> {
    let text = text.unwrap_or_default();
    text.strip_suffix('.').unwrap_or(text).as_bytes().to_vec()
}

fn name_servers(servers: &[IpAddr]) -> Vec<u8> {
    let of_family = servers.iter().filter_map(|server| match server {
        IpAddr::V4(server) => Some(server.octets()),
        IpAddr::V6(_) => None,
    });
    of_family.flatten().collect()
}

/// The gateways of the default routes.
fn routers(lease: &Ipv4Lease) -> Vec<u8> {
    let gateways = lease.routes.iter().filter(|route| route.is_default());
    gateways
        .filter_map(|route| Some(route.gateway?.octets()))
        .flatten()
        .collect()
}

/// The routes of a lease in the order in which a client can add them.
#[derive(Debug)]
struct Routes {
    list: Vec<Ipv4Route>,
    /// Whether a mask and a router are not enough.
    are_needed: bool,
}

impl Routes {
    fn of(lease: &Ipv4Lease) -> Self {
        let (mut links, mut others): (Vec<_>, Vec<_>) = (lease.routes.iter())
            .copied()
            .partition(|route| route.gateway.is_none() && !route.is_default());
        let gateways = others.iter().filter_map(|route| route.gateway);
        for gateway in gateways {
            let is_reachable = |gateway: Ipv4Addr| {
                (lease.prefix_length < 32 && lease.is_neighbour(gateway))
                    || links.iter().any(|link| link.covers(gateway))
            };
            if !is_reachable(gateway) {
                links.push(Ipv4Route {
                    destination: gateway,
                    prefix_length: 32,
                    gateway: None,
                });
            }
        }
        // Narrow routes first; the default route is the last one.
        others.sort_by_key(|route| std::cmp::Reverse(route.prefix_length));
        let is_plain = |route: &Ipv4Route| route.is_default() && route.gateway.is_some();
        let are_needed = !links.is_empty() || !others.iter().all(is_plain);
        links.append(&mut others);
        Self {
            list: links,
            are_needed,
        }
    }

    /// RFC 3442: the length, as many bytes of the destination as count, the gateway.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for route in &self.list {
            bytes.push(route.prefix_length);
            let count = usize::from(route.prefix_length.div_ceil(8));
            let masked = route.destination & crate::config::mask(route.prefix_length);
            bytes.extend(masked.octets().into_iter().take(count));
            let gateway = route.gateway.unwrap_or(Ipv4Addr::UNSPECIFIED);
            bytes.extend_from_slice(&gateway.octets());
        }
        bytes
    }
}
