//! A client's message: the fields and options that decide about the answer.

use std::net::Ipv4Addr;

use super::{MAGIC, code};
use crate::config::MacAddress;
use crate::read::Reader;
use crate::refusal::Refusal;

/// The flag of clients that receive no unicast before they have an address.
pub(super) const BROADCAST: u16 = 0x8000;

const BOOT_REQUEST: u8 = 1;
const ETHERNET: u8 = 1;

/// Types of messages (RFC 2132 §9.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Discover = 1,
    Offer = 2,
    Request = 3,
    Decline = 4,
    Ack = 5,
    Nak = 6,
    Release = 7,
    Inform = 8,
}

/// A client's message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) kind: Kind,
    pub(super) transaction: u32,
    pub(super) wants_broadcast: bool,
    /// The address that the client has; unspecified if none.
    pub(super) address: Ipv4Addr,
    /// The client's card by the message.
    pub(super) client: MacAddress,
    /// The address that it asks for.
    pub(super) requested: Option<Ipv4Addr>,
    /// The server that it speaks to, unless to all.
    pub(super) server: Option<Ipv4Addr>,
    /// Numbers of the options that it asks for, unless it leaves that to the server.
    pub(super) asked: Option<&'a [u8]>,
    /// Bytes of the largest IP packet with a message that it takes.
    pub(super) max_size: Option<u16>,
    /// How it calls itself; to be echoed (RFC 6842).
    pub(super) client_id: Option<&'a [u8]>,
    /// The machine's UUID; to be echoed (RFC 4578 §2.3).
    pub(super) machine_id: Option<&'a [u8]>,
}

impl<'a> Request<'a> {
    /// Reads a message; each option has a length that it may have, and is there once.
    pub(super) fn parse(message: &'a [u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(message);
        let mut request = Self::fixed(&mut reader)?;
        let mut kind = None;
        let mut seen = [false; 256];
        // Messages of old clients end without the option for that.
        while let Some(code) = reader.u8() {
            match code {
                code::PAD => continue,
                code::END => break,
                _ => {}
            }
            let value = reader.u8().and_then(|length| reader.take(length.into()));
            let value = value.ok_or(Refusal::Truncated("an option"))?;
            if code == code::OVERLOAD {
                return Err(Refusal::Overload);
            }
            let is_read = request.take_option(code, value, &mut kind)?;
            if let Some(seen) = seen.get_mut(usize::from(code))
                && is_read
                && std::mem::replace(seen, true)
            {
                return Err(Refusal::OptionTwice(code.into()));
            }
        }
        request.kind = kind.ok_or(Refusal::OptionMissing(code::MESSAGE_TYPE.into()))?;
        Ok(request)
    }

    /// Reads what stands before the options (RFC 2131 §2).
    fn fixed(reader: &mut Reader<'a>) -> Result<Self, Refusal> {
        let cut_off = || Refusal::Truncated("the DHCP message");
        let operation: [u8; 3] = reader.array().ok_or_else(cut_off)?;
        if operation != [BOOT_REQUEST, ETHERNET, 6] {
            return Err(Refusal::Invalid("operation or hardware type"));
        }
        let read = |reader: &mut Reader<'a>| {
            reader.u8()?;
            let transaction = reader.u32()?;
            reader.u16()?;
            let flags = reader.u16()?;
            let address = reader.ipv4()?;
            reader.take(8)?;
            let relay = reader.ipv4()?;
            let client = MacAddress(reader.array()?);
            reader.take(10 + 64 + 128)?;
            let magic: [u8; 4] = reader.array()?;
            Some((transaction, flags, address, relay, client, magic))
        };
        let (transaction, flags, address, relay, client, magic) =
            read(reader).ok_or_else(cut_off)?;
        if !relay.is_unspecified() {
            return Err(Refusal::Relayed(relay));
        }
        if magic != MAGIC {
            return Err(Refusal::Invalid("magic number"));
        }
        Ok(Self {
            kind: Kind::Discover,
            transaction,
            wants_broadcast: flags & BROADCAST != 0,
            address,
            client,
            requested: None,
            server: None,
            asked: None,
            max_size: None,
            client_id: None,
            machine_id: None,
        })
    }

    /// Takes an option in; `false` if it does not matter here.
    fn take_option(
        &mut self,
        code: u8,
        value: &'a [u8],
        kind: &mut Option<Kind>,
    ) -> Result<bool, Refusal> {
        let wrong_length = Refusal::OptionLength {
            code: code.into(),
            length: value.len(),
        };
        let mut reader = Reader::new(value);
        match code {
            code::REQUESTED_ADDRESS => self.requested = reader.ipv4(),
            code::SERVER => self.server = reader.ipv4(),
            code::MAX_SIZE => self.max_size = reader.u16(),
            code::MESSAGE_TYPE => {
                *kind = Some(Kind::parse(reader.u8().ok_or(wrong_length)?)?);
            }
            code::PARAMETERS => self.asked = reader.take(value.len()),
            // At least two bytes, and a UUID with its type (RFC 4578).
            code::CLIENT_ID if value.len() >= 2 => self.client_id = reader.take(value.len()),
            code::MACHINE_ID if value.len() == 17 => self.machine_id = reader.take(value.len()),
            code::CLIENT_ID | code::MACHINE_ID => return Err(wrong_length),
            _ => return Ok(false),
        }
        // A field that is too short is unread, and one that is too long is not read to its end.
        match value.is_empty() || !reader.is_empty() {
            true => Err(wrong_length),
            false => Ok(true),
        }
    }
}

impl Kind {
    fn parse(number: u8) -> Result<Self, Refusal> {
        Ok(match number {
            1 => Self::Discover,
            3 => Self::Request,
            4 => Self::Decline,
            7 => Self::Release,
            8 => Self::Inform,
            _ => return Err(Refusal::MessageType(number)),
        })
    }
}
