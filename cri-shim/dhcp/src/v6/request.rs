//! A client's message: the fields and options that decide about the answer.

use std::net::Ipv6Addr;

use super::code;
use crate::read::Reader;
use crate::refusal::Refusal;

/// Most bytes of an identity (RFC 8415 §11.1).
const MAX_ID: usize = 130;
/// Most associations that are answered.
const MAX_ASSOCIATIONS: usize = 8;
/// Most addresses of an association that are read.
const MAX_ADDRESSES: usize = 8;

/// Types of a client's messages (RFC 8415 §7.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Solicit,
    Request,
    Confirm,
    Renew,
    Rebind,
    Release,
    Decline,
    Information,
}

/// What an association is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AssociationKind {
    Addresses,
    Temporary,
    Prefixes,
}

/// What the client calls one set of addresses (RFC 8415 §12).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Association {
    pub(super) kind: AssociationKind,
    pub(super) id: u32,
    /// Addresses that it has or wants.
    pub(super) addresses: Vec<Ipv6Addr>,
}

/// A client's message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) kind: Kind,
    /// Three bytes.
    pub(super) transaction: u32,
    pub(super) client_id: Option<&'a [u8]>,
    /// Those of addresses come first.
    pub(super) associations: Vec<Association>,
    /// Numbers of the options that it asks for.
    pub(super) asked: Vec<u16>,
    /// Whether it takes its addresses without asking for them again.
    pub(super) wants_rapid_commit: bool,
}

impl<'a> Request<'a> {
    /// Reads a message, and checks it by RFC 8415 §16.
    pub(super) fn parse(message: &'a [u8], own_id: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(message);
        let first = reader
            .u32()
            .ok_or(Refusal::Truncated("the DHCPv6 message"))?;
        let [kind, ..] = first.to_be_bytes();
        let mut request = Self {
            kind: Kind::parse(kind)?,
            transaction: first & 0x00ff_ffff,
            client_id: None,
            associations: Vec::new(),
            asked: Vec::new(),
            wants_rapid_commit: false,
        };
        let mut server_id = None;
        while !reader.is_empty() {
            let (code, value) = option(&mut reader)?;
            match code {
                code::CLIENT_ID => once(&mut request.client_id, code, id(code, value)?)?,
                code::SERVER_ID => once(&mut server_id, code, id(code, value)?)?,
                code::ADDRESSES | code::TEMPORARY_ADDRESSES | code::PREFIXES
                    if request.associations.len() < MAX_ASSOCIATIONS =>
                {
                    request.associations.push(Association::parse(code, value)?);
                }
                code::ASKED => request.asked = asked(value)?,
                code::RAPID_COMMIT => request.wants_rapid_commit = true,
                _ => {}
            }
        }
        let order = |association: &Association| association.kind != AssociationKind::Addresses;
        request.associations.sort_by_key(order);
        request.check(server_id, own_id)?;
        Ok(request)
    }

    fn check(&self, server_id: Option<&[u8]>, own_id: &[u8]) -> Result<(), Refusal> {
        let (needs_client, needs_server) = match self.kind {
            Kind::Solicit | Kind::Confirm | Kind::Rebind => (true, Some(false)),
            Kind::Request | Kind::Renew | Kind::Release | Kind::Decline => (true, Some(true)),
            Kind::Information => (false, None),
        };
        if needs_client && self.client_id.is_none() {
            return Err(Refusal::OptionMissing(code::CLIENT_ID));
        }
        match (needs_server, server_id) {
            (Some(true), None) => Err(Refusal::OptionMissing(code::SERVER_ID)),
            (Some(false), Some(_)) => Err(Refusal::OptionForbidden(code::SERVER_ID)),
            (_, Some(other)) if other != own_id => Err(Refusal::OtherServer),
            _ if self.kind == Kind::Information && !self.associations.is_empty() => {
                Err(Refusal::OptionForbidden(code::ADDRESSES))
            }
            _ => Ok(()),
        }
    }
}

impl Kind {
    fn parse(number: u8) -> Result<Self, Refusal> {
        Ok(match number {
            1 => Self::Solicit,
            3 => Self::Request,
            4 => Self::Confirm,
            5 => Self::Renew,
            6 => Self::Rebind,
            8 => Self::Release,
            9 => Self::Decline,
            11 => Self::Information,
            _ => return Err(Refusal::MessageType(number)),
        })
    }
}

impl AssociationKind {
    pub(super) fn code(self) -> u16 {
        match self {
            Self::Addresses => code::ADDRESSES,
            Self::Temporary => code::TEMPORARY_ADDRESSES,
            Self::Prefixes => code::PREFIXES,
        }
    }
}

impl Association {
    fn parse(code: u16, value: &[u8]) -> Result<Self, Refusal> {
        let wrong_length = Refusal::OptionLength {
            code,
            length: value.len(),
        };
        let kind = match code {
            code::ADDRESSES => AssociationKind::Addresses,
            code::PREFIXES => AssociationKind::Prefixes,
            _ => AssociationKind::Temporary,
        };
        let mut reader = Reader::new(value);
        let id = reader.u32().ok_or(wrong_length)?;
        if kind != AssociationKind::Temporary {
            // The times that the client would like.
            reader.take(8).ok_or(wrong_length)?;
        }
        let mut addresses = Vec::new();
        while !reader.is_empty() {
            let (code, value) = option(&mut reader)?;
            if code == code::ADDRESS && addresses.len() < MAX_ADDRESSES {
                let length = value.len();
                let wrong_length = Refusal::OptionLength { code, length };
                let mut reader = Reader::new(value);
                addresses.push(reader.ipv6().ok_or(wrong_length)?);
                reader.take(8).ok_or(wrong_length)?;
            }
        }
        let id = Self {
            kind,
            id,
            addresses,
        };
        Ok(id)
    }
}

fn option<'a>(reader: &mut Reader<'a>) -> Result<(u16, &'a [u8]), Refusal> {
    let read = |reader: &mut Reader<'a>| {
        let code = reader.u16()?;
        let length = reader.u16()?;
        Some((code, reader.take(length.into())?))
    };
    read(reader).ok_or(Refusal::Truncated("an option"))
}

fn id(code: u16, value: &[u8]) -> Result<&[u8], Refusal> {
    // A type, and at least one byte.
    match (3..=MAX_ID).contains(&value.len()) {
        true => Ok(value),
        false => Err(Refusal::OptionLength {
            code,
            length: value.len(),
        }),
    }
}

fn once<'a>(place: &mut Option<&'a [u8]>, code: u16, value: &'a [u8]) -> Result<(), Refusal> {
    match place.replace(value) {
        Some(_) => Err(Refusal::OptionTwice(code)),
        None => Ok(()),
    }
}

fn asked(value: &[u8]) -> Result<Vec<u16>, Refusal> {
    let mut reader = Reader::new(value);
    let mut codes = Vec::new();
    while !reader.is_empty() {
        let code = reader.u16().ok_or(Refusal::OptionLength {
            code: code::ASKED,
            length: value.len(),
        })?;
        codes.push(code);
    }
    Ok(codes)
}
