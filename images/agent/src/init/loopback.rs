//! Brings `lo` up by one rtnetlink message.

use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// `lo` has index 1 in every network namespace.
const LOOPBACK_INDEX: i32 = 1;
const RTM_NEWLINK: u16 = 16;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
const IFF_UP: u32 = 1;

/// Brings the loopback interface of the current network namespace up; the kernel gives it
/// its addresses.
///
/// # Errors
///
/// What the kernel answers, such as `EPERM`.
pub fn up() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::sendto(
        &socket,
        &request(),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut answer = [0; 256];
    let (_, length) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    acknowledged(answer.get(..length).unwrap_or(&answer))
}

/// `struct nlmsghdr` and `struct ifinfomsg`, in native byte order.
fn request() -> [u8; 32] {
    let mut message = [0; 32];
    message[0..4].copy_from_slice(&32u32.to_ne_bytes());
    message[4..6].copy_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message[6..8].copy_from_slice(&(NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message[20..24].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    message[24..28].copy_from_slice(&IFF_UP.to_ne_bytes());
    message[28..32].copy_from_slice(&IFF_UP.to_ne_bytes());
    message
}

/// Reads the kernel's `struct nlmsgerr`, whose error 0 means done.
fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let (Some(kind), Some(error)) = (
        answer
            .get(4..6)
            .and_then(|b| b.try_into().ok())
            .map(u16::from_ne_bytes),
        answer
            .get(16..20)
            .and_then(|b| b.try_into().ok())
            .map(i32::from_ne_bytes),
    ) else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    match (kind, error) {
        (NLMSG_ERROR, 0) => Ok(()),
        (NLMSG_ERROR, errno) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_kernel_takes_the_request() {
        // Loopback is up wherever tests run, so that this changes nothing.
        match up() {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_panic(answer: Vec<u8>) {
            let _ = acknowledged(&answer);
        }
    }
}
