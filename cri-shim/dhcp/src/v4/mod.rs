//! DHCP (RFC 2131) for a client whose one lease never changes.

mod code;
mod options;
mod request;

use std::net::Ipv4Addr;

use crate::config::{Config, Ipv4Lease, MacAddress};
use crate::frame;
use crate::refusal::Refusal;
use options::Options;
use request::{Kind, Request};

/// Seconds of a lease. It is no promise to anybody else: the address is the guest's for ever.
pub(crate) const LEASE_TIME: u32 = 86_400;
/// Seconds after which the client asks its server again.
pub(crate) const RENEWAL_TIME: u32 = 43_200;
/// Seconds after which the client asks any server.
pub(crate) const REBINDING_TIME: u32 = 64_800;

/// Largest IP packet that each client takes (RFC 2131 §2).
const MIN_PACKET: u16 = 576;
/// Largest IP packet that is sent.
const MAX_PACKET: u16 = 1500;
/// Least bytes of a message: relays and old clients drop shorter ones (RFC 1542 §2.1).
const MIN_MESSAGE: usize = 300;
/// Bytes of a message before its options.
const FIXED: usize = 240;

const BOOT_REPLY: u8 = 2;
const MAGIC: [u8; 4] = [99, 130, 83, 99];

/// What is done with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Offer,
    Ack,
    /// The client has an address that is not its own.
    Nak,
    /// Configuration without an address.
    Inform,
    /// The client tells something, and waits for nothing.
    Nothing,
}

/// An answer to the guest.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) frame: Vec<u8>,
    /// The guest has its address from now on.
    pub(crate) is_lease: bool,
}

/// Answers a message of the guest; `Ok(None)` if it waits for no answer.
pub(crate) fn answer(config: &Config, message: &[u8]) -> Result<Option<Answer>, Refusal> {
    let lease = config.ipv4.as_ref().ok_or(Refusal::NoLease("IPv4"))?;
    let request = Request::parse(message)?;
    if request.client != config.client {
        return Err(Refusal::OtherClient("a DHCP message"));
    }
    let verdict = judge(config, lease, &request)?;
    let kind = match verdict {
        Verdict::Offer => Kind::Offer,
        Verdict::Ack | Verdict::Inform => Kind::Ack,
        Verdict::Nak => Kind::Nak,
        Verdict::Nothing => return Ok(None),
    };
    let options = options::answer(config, lease, &request, kind, verdict == Verdict::Inform);
    let reply = write(lease, &request, verdict, &options, space(config, &request));
    let from = (config.server, config.server_address);
    Ok(Some(Answer {
        frame: frame::dhcp4(from, to(lease, &request, verdict), &reply),
        is_lease: verdict == Verdict::Ack,
    }))
}

/// The table of RFC 2131 §4.3, and §4.3.2 for its states of a REQUEST.
fn judge(config: &Config, lease: &Ipv4Lease, request: &Request<'_>) -> Result<Verdict, Refusal> {
    let is_ours = request.server == Some(config.server_address);
    if request.server.is_some() && !is_ours {
        return Err(Refusal::OtherServer);
    }
    let right = |address: Ipv4Addr| match address == lease.address {
        true => Verdict::Ack,
        false => Verdict::Nak,
    };
    let current = (!request.address.is_unspecified()).then_some(request.address);
    match request.kind {
        Kind::Discover => Ok(Verdict::Offer),
        // It selects an offer, or has been started anew: it names the address that it wants.
        // If it has one already, it extends its lease.
        Kind::Request => match (request.requested, current) {
            (Some(wanted), _) => Ok(right(wanted)),
            (None, Some(current)) => Ok(right(current)),
            (None, None) => Err(Refusal::OptionMissing(code::REQUESTED_ADDRESS.into())),
        },
        Kind::Inform => Ok(Verdict::Inform),
        Kind::Decline => {
            let address = lease.address;
            tracing::warn!(%address, "the guest found another host with its address");
            Ok(Verdict::Nothing)
        }
        Kind::Release => Ok(Verdict::Nothing),
        Kind::Offer => Err(Refusal::MessageType(2)),
        Kind::Ack => Err(Refusal::MessageType(5)),
        Kind::Nak => Err(Refusal::MessageType(6)),
    }
}

/// How many bytes of options the client takes.
fn space(config: &Config, request: &Request<'_>) -> usize {
    let link = config.mtu.unwrap_or(MAX_PACKET).min(MAX_PACKET);
    let packet = request
        .max_size
        .unwrap_or(MIN_PACKET)
        .clamp(MIN_PACKET, link.max(MIN_PACKET));
    let message = packet.saturating_sub(frame::IPV4_UDP);
    usize::from(message).saturating_sub(FIXED)
}

/// Where the answer goes (RFC 2131 §4.1). The server writes the frame itself, so that a client
/// without an address is reached as well.
fn to(lease: &Ipv4Lease, request: &Request<'_>, verdict: Verdict) -> (MacAddress, Ipv4Addr) {
    let all = (MacAddress::BROADCAST, Ipv4Addr::BROADCAST);
    match verdict {
        Verdict::Nak => all,
        _ if !request.address.is_unspecified() => (request.client, request.address),
        _ if request.wants_broadcast => all,
        _ => (request.client, lease.address),
    }
}

fn write(
    lease: &Ipv4Lease,
    request: &Request<'_>,
    verdict: Verdict,
    options: &Options,
    space: usize,
) -> Vec<u8> {
    let (current, given) = match verdict {
        Verdict::Offer => (Ipv4Addr::UNSPECIFIED, lease.address),
        Verdict::Ack => (request.address, lease.address),
        Verdict::Inform => (request.address, Ipv4Addr::UNSPECIFIED),
        Verdict::Nak | Verdict::Nothing => (Ipv4Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED),
    };
    let flags: u16 = match request.wants_broadcast || verdict == Verdict::Nak {
        true => request::BROADCAST,
        false => 0,
    };
    let mut bytes = Vec::with_capacity(MIN_MESSAGE);
    // Ethernet, with addresses of 6 bytes, over no relay.
    bytes.extend_from_slice(&[BOOT_REPLY, 1, 6, 0]);
    bytes.extend_from_slice(&request.transaction.to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&current.octets());
    bytes.extend_from_slice(&given.octets());
    // Neither a next server to boot from, nor a relay; 10 bytes after the hardware address, and
    // fields for names that are empty.
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&request.client.0);
    bytes.extend_from_slice(&[0; 10 + 64 + 128]);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend(options.encode(space));
    if bytes.len() < MIN_MESSAGE {
        bytes.resize(MIN_MESSAGE, 0);
    }
    bytes
}

#[cfg(test)]
mod tests;
