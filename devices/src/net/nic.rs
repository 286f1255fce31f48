//! The interface of a network device to its backend.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use vm_memory::VolatileSlice;

use super::filter::ReceiveFilter;
use super::header::HEADER_LEN;

/// A hardware address (EUI-48).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Creates a random unicast address that is locally administered.
    pub(super) fn random() -> io::Result<Self> {
        let mut bytes = [0; 6];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        let [first, ..] = &mut bytes;
        *first = *first & !1 | 2;
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A string that is not a hardware address.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a MAC address: write six bytes, such as 52:54:00:12:34:56")]
pub struct ParseMacAddressError {
    text: String,
}

impl FromStr for MacAddress {
    type Err = ParseMacAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMacAddressError {
            text: text.to_owned(),
        };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(error)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(error());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() {
            return Err(error());
        }
        Ok(Self(bytes))
    }
}

/// Work that one side of the header leaves to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Checksums of TCP and UDP may be partial.
    pub checksum: bool,
    /// TCP over IPv4 may be unsegmented, up to 64 KiB.
    pub tso4: bool,
    /// The same for TCP over IPv6.
    pub tso6: bool,
    /// Such frames may have the CWR bit.
    pub ecn: bool,
    /// UDP may be unsegmented: datagrams of one length, the last one shorter, under one header.
    pub uso: bool,
}

impl Offloads {
    /// All work is left to the other side.
    pub const ALL: Self = Self {
        checksum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        uso: true,
    };

    /// The intersection of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            checksum: self.checksum && other.checksum,
            tso4: self.tso4 && other.tso4,
            tso6: self.tso6 && other.tso6,
            ecn: self.ecn && other.ecn,
            uso: self.uso && other.uso,
        }
    }

    /// Each side does its own work.
    pub const NONE: Self = Self {
        checksum: false,
        tso4: false,
        tso6: false,
        ecn: false,
        uso: false,
    };
}

/// A source and sink of Ethernet frames, each with a header as in §5.1.6 before it.
///
/// The calls never wait: the device is served by an event loop.
pub trait Nic: fmt::Debug + Send {
    /// The offloads that it supports in both directions. Always the same.
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    /// Sends the rest of earlier frames. Called before each frame that is sent, and after the last
    /// one.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if nothing can be sent before [`Self::fd`] is writable: the
    /// driver's frames stay in its queue until then. Others are failures of the backend, and the
    /// rest is lost.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Sends one frame from guest memory.
    ///
    /// # Errors
    /// Any reason why the frame cannot be sent: then it is lost.
    fn send(&mut self, header: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()>;

    /// Receives one frame into guest memory; returns its length without the header. A frame that is
    /// longer than the slices is truncated.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none; others are failures of the backend.
    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize>;

    /// A descriptor that is readable when there is a frame to receive, and writable when one can
    /// be sent again, for an edge-triggered epoll instance.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Sets the offloads that received frames may use. Called before the first frame of each driver
    /// whose accepted offloads differ from the previous ones; if a backend has several queues, on
    /// the first one, for all of them.
    ///
    /// # Errors
    /// If the backend cannot do so.
    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()>;

    /// Sets which frames the driver wants; all until the first call. If a backend has several
    /// queues, it is called on the first one, for all of them. A backend may receive others too
    /// (§5.1.6.5.1), and by default it ignores this.
    ///
    /// # Errors
    /// If the backend cannot do so; then it is called with [`ReceiveFilter::All`].
    fn set_filter(&mut self, filter: &ReceiveFilter) -> io::Result<()> {
        let _ = filter;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_read_as_they_are_written() {
        let mac: MacAddress = "52:54:00:Ab:cd:0f".parse().unwrap();
        assert_eq!(mac.0, [0x52, 0x54, 0, 0xab, 0xcd, 0x0f]);
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
        for bad in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:0f:1",
            "52:54:00:ab:cd:+f",
            "5254:00:ab:cd:0f:11",
        ] {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad}");
        }
    }
}
