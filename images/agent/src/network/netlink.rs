//! A netlink socket for the kernel's routing tables, and its messages (rtnetlink(7)).
//!
//! Knows the framing of messages and their attributes, not their meaning.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
/// Replace an existing object.
pub(super) const NLM_F_REPLACE: u16 = 0x100;
/// Create a missing object.
pub(super) const NLM_F_CREATE: u16 = 0x400;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// `struct nlmsghdr`: length, kind, flags, sequence, port.
const HEADER_BYTES: usize = 16;
/// Maximum size of one piece of the kernel's dumps.
const RECEIVE_BYTES: usize = 32 << 10;
/// Maximum number of messages that answer one dump; each of our networks is far smaller.
const MAX_ANSWERS: usize = 65_536;

/// A message to be sent.
#[derive(Debug)]
pub(super) struct Message {
    bytes: Vec<u8>,
    flags: u16,
}

impl Message {
    /// Creates a message whose fixed part, such as `struct ifinfomsg`, is `body`.
    pub(super) fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend_from_slice(body);
        Self { bytes, flags }
    }

    /// Adds an attribute (`struct rtattr`), padded to four bytes.
    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        // Callers' values are a few bytes long.
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    fn finish(mut self, flags: u16, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        let flags = self.flags | NLM_F_REQUEST | flags;
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A socket in the current network namespace.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends a message and waits for the kernel's acknowledgement, which comes immediately.
    pub(super) fn call(&mut self, message: Message) -> io::Result<()> {
        self.exchange(message, NLM_F_ACK, |_, _| ())
    }

    /// Requests a table; `each` gets the kind and the contents of every message of the answer.
    pub(super) fn dump(
        &mut self,
        message: Message,
        each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.exchange(message, NLM_F_DUMP, each)
    }

    fn exchange(
        &mut self,
        message: Message,
        flags: u16,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = message.finish(flags, self.sequence);
        rustix::net::sendto(
            &self.socket,
            &request,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )?;
        let mut buffer = vec![0; RECEIVE_BYTES];
        for _ in 0..MAX_ANSWERS {
            let received =
                match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                    Ok((_, received)) => received,
                    Err(Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                };
            let answer = buffer.get(..received).unwrap_or_default();
            if let Some(end) = read_answer(answer, self.sequence, &mut each) {
                return end;
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// Reads the data of one receive; `Some` if the answer is complete.
fn read_answer(
    mut bytes: &[u8],
    sequence: u32,
    each: &mut impl FnMut(u16, &[u8]),
) -> Option<io::Result<()>> {
    while let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        let length = usize::try_from(u32_at(header, 0)?).ok()?;
        let kind = u16_at(header, 4)?;
        let Some(body) = bytes.get(HEADER_BYTES..length) else {
            return Some(Err(io::ErrorKind::InvalidData.into()));
        };
        if u32_at(header, 8) == Some(sequence) {
            match kind {
                // Both start with an error number, of which 0 means done.
                NLMSG_ERROR | NLMSG_DONE => {
                    return Some(match u32_at(body, 0).map(u32::cast_signed) {
                        Some(0) => Ok(()),
                        Some(errno) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
                        None => Err(io::ErrorKind::UnexpectedEof.into()),
                    });
                }
                _ => each(kind, body),
            }
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

/// Returns the value of the attribute `wanted` among those that follow a message's fixed part.
pub(super) fn attribute(message: &[u8], fixed: usize, wanted: u16) -> Option<&[u8]> {
    let mut rest = message.get(fixed..)?;
    loop {
        let length = usize::from(u16_at(rest, 0)?);
        let value = rest.get(4..length)?;
        if u16_at(rest, 2)? == wanted {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

pub(super) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let field = bytes.get(offset..)?.first_chunk()?;
    Some(u16::from_ne_bytes(*field))
}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let field = bytes.get(offset..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn attributes_are_padded_and_found_again() {
        let message = Message::new(16, 0, &[0; 16])
            .attribute(3, b"eth0\0")
            .attribute(4, &1500u32.to_ne_bytes())
            .finish(0, 7);
        assert_eq!(message.len(), 16 + 16 + 12 + 8);
        assert_eq!(u32_at(&message, 0), Some(52));
        let body = &message[16..];
        assert_eq!(attribute(body, 16, 3), Some(&b"eth0\0"[..]));
        assert_eq!(attribute(body, 16, 4), Some(&1500u32.to_ne_bytes()[..]));
        assert_eq!(attribute(body, 16, 5), None);
    }

    #[test]
    fn the_kernels_refusal_is_an_error_with_its_number() {
        let mut netlink = Netlink::open().unwrap();
        // RTM_NEWLINK for an interface that does not exist.
        let mut body = [0; 16];
        body[4..8].copy_from_slice(&i32::MAX.to_ne_bytes());
        let error = netlink.call(Message::new(16, 0, &body)).unwrap_err();
        let errno = error.raw_os_error();
        assert!(
            matches!(errno, Some(libc::ENODEV | libc::EPERM)),
            "{error:?}"
        );
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_panic(bytes: Vec<u8>, fixed in 0usize..40) {
            let _ = read_answer(&bytes, 1, &mut |_, body| {
                let _ = attribute(body, fixed, 3);
            });
            let _ = attribute(&bytes, fixed, 1);
        }
    }
}
