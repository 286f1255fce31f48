//! DHCPv6 (RFC 8415) for a client whose addresses never change.

mod request;

use std::net::Ipv6Addr;

use crate::config::{Config, Ipv6Lease, MacAddress};
use crate::frame;
use crate::names;
use crate::refusal::Refusal;
use crate::router::name_servers;
use crate::v4::{LEASE_TIME, REBINDING_TIME, RENEWAL_TIME};
use request::{Association, AssociationKind, Kind, Request};

/// Numbers of options (RFC 8415 §21, RFC 3646).
mod code {
    pub(super) const CLIENT_ID: u16 = 1;
    pub(super) const SERVER_ID: u16 = 2;
    pub(super) const ADDRESSES: u16 = 3;
    pub(super) const TEMPORARY_ADDRESSES: u16 = 4;
    pub(super) const ADDRESS: u16 = 5;
    pub(super) const ASKED: u16 = 6;
    pub(super) const STATUS: u16 = 13;
    pub(super) const RAPID_COMMIT: u16 = 14;
    pub(super) const NAME_SERVERS: u16 = 23;
    pub(super) const SEARCH: u16 = 24;
    pub(super) const PREFIXES: u16 = 25;
}

const ADVERTISE: u8 = 2;
const REPLY: u8 = 7;

/// Largest message: what fits into a packet of any link.
const MAX_MESSAGE: usize = 1280 - 48;

/// Codes of a status (RFC 8415 §21.13).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Success = 0,
    NoAddresses = 2,
    NoBinding = 3,
    NotOnLink = 4,
    NoPrefix = 6,
}

/// Answers a message of the guest.
pub(crate) fn answer(
    config: &Config,
    source: Ipv6Addr,
    message: &[u8],
) -> Result<Vec<u8>, Refusal> {
    let lease = config.ipv6.as_ref().ok_or(Refusal::NoLease("IPv6"))?;
    if !source.is_unicast_link_local() {
        return Err(Refusal::Source(source));
    }
    let server_id = server_id(config.server);
    let request = Request::parse(message, &server_id)?;
    let mut reply = Reply::new(&request, &server_id);
    match request.kind {
        Kind::Solicit | Kind::Request | Kind::Renew | Kind::Rebind => {
            for (number, association) in request.associations.iter().enumerate() {
                reply.push_association(lease, &request, association, number == 0);
            }
            if request.wants_rapid_commit && request.kind == Kind::Solicit {
                reply.push(code::RAPID_COMMIT, &[]);
            }
        }
        Kind::Confirm => {
            let mut asked = request.associations.iter().flat_map(|one| &one.addresses);
            reply.push_status(match asked.all(|address| lease.has(*address)) {
                true => Status::Success,
                false => Status::NotOnLink,
            });
        }
        Kind::Release | Kind::Decline => {
            if request.kind == Kind::Decline {
                tracing::warn!("the guest found another host with its IPv6 address");
            }
            reply.push_status(Status::Success);
        }
        Kind::Information => {}
    }
    if !matches!(request.kind, Kind::Release | Kind::Decline) {
        reply.push_asked(config, &request.asked);
    }
    let from = (config.server, config.server.link_local());
    Ok(frame::dhcp6(from, (config.client, source), &reply.bytes))
}

/// The server's identity: that of its card (RFC 8415 §11.4).
fn server_id(mac: MacAddress) -> Vec<u8> {
    [&[0, 3, 0, 1][..], &mac.0].concat()
}

impl Ipv6Lease {
    fn has(&self, address: Ipv6Addr) -> bool {
        self.addresses.iter().any(|own| own.address == address)
    }
}

/// An answer in the making.
#[derive(Debug)]
struct Reply {
    bytes: Vec<u8>,
}

impl Reply {
    fn new(request: &Request<'_>, server_id: &[u8]) -> Self {
        let kind = match request.kind {
            Kind::Solicit if !request.wants_rapid_commit => ADVERTISE,
            _ => REPLY,
        };
        let [_, a, b, c] = request.transaction.to_be_bytes();
        let bytes = vec![kind, a, b, c];
        let mut reply = Self { bytes };
        reply.push(code::SERVER_ID, server_id);
        if let Some(client_id) = request.client_id {
            reply.push(code::CLIENT_ID, client_id);
        }
        reply
    }

    /// Adds an option, unless the message would be too long.
    fn push(&mut self, code: u16, value: &[u8]) {
        let length = self
            .bytes
            .len()
            .saturating_add(value.len())
            .saturating_add(4);
        if length <= MAX_MESSAGE {
            push_option(&mut self.bytes, code, value);
        }
    }

    fn push_status(&mut self, status: Status) {
        self.push(code::STATUS, &status_value(status));
    }

    /// Adds the answer to one association: the first one of addresses has them all.
    fn push_association(
        &mut self,
        lease: &Ipv6Lease,
        request: &Request<'_>,
        association: &Association,
        is_first: bool,
    ) {
        let mut value = association.id.to_be_bytes().to_vec();
        let has_times = association.kind != AssociationKind::Temporary;
        let is_ours = association.kind == AssociationKind::Addresses && is_first;
        if has_times {
            let times = match is_ours {
                true => [RENEWAL_TIME, REBINDING_TIME],
                false => [0, 0],
            };
            value.extend(times.into_iter().flat_map(u32::to_be_bytes));
        }
        if is_ours {
            for own in &lease.addresses {
                push_address(&mut value, own.address, LEASE_TIME);
            }
            // What it has from elsewhere it must not use any longer.
            let foreign = association.addresses.iter().filter(|one| !lease.has(**one));
            if request.kind != Kind::Solicit {
                for address in foreign {
                    push_address(&mut value, *address, 0);
                }
            }
            if lease.addresses.is_empty() {
                push_option(&mut value, code::STATUS, &status_value(Status::NoAddresses));
            }
        } else {
            let status = match (association.kind, request.kind) {
                (AssociationKind::Prefixes, _) => Status::NoPrefix,
                (_, Kind::Renew | Kind::Rebind) => Status::NoBinding,
                _ => Status::NoAddresses,
            };
            push_option(&mut value, code::STATUS, &status_value(status));
        }
        self.push(association.kind.code(), &value);
    }

    fn push_asked(&mut self, config: &Config, asked: &[u16]) {
        let servers: Vec<u8> = name_servers(config).flat_map(|one| one.octets()).collect();
        if asked.contains(&code::NAME_SERVERS) && !servers.is_empty() {
            self.push(code::NAME_SERVERS, &servers);
        }
        if asked.contains(&code::SEARCH) && !config.search.is_empty() {
            self.push(code::SEARCH, &names::encode(&config.search));
        }
    }
}

fn push_option(bytes: &mut Vec<u8>, code: u16, value: &[u8]) {
    bytes.extend_from_slice(&code.to_be_bytes());
    let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(value);
}

fn push_address(bytes: &mut Vec<u8>, address: Ipv6Addr, lifetime: u32) {
    let mut value = address.octets().to_vec();
    value.extend([lifetime, lifetime].into_iter().flat_map(u32::to_be_bytes));
    push_option(bytes, code::ADDRESS, &value);
}

fn status_value(status: Status) -> [u8; 2] {
    (status as u16).to_be_bytes()
}

#[cfg(test)]
mod tests;
