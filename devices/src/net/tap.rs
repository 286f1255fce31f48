//! A tap (`/dev/net/tun`) as a backend.
#![allow(unsafe_code)] // ioctls of tun, readv and writev on guest memory

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use vm_memory::VolatileSlice;

use super::filter::{Multicast, ReceiveFilter};
use super::header::HEADER_LEN;
use super::nic::Nic;
use super::offloads::Offloads;
use super::segments::{Guards, with_iovecs};

/// Flags of a tap that this device can use.
const NEEDED: [(i32, &str); 3] = [
    (libc::IFF_TAP, "IFF_TAP"),
    (libc::IFF_NO_PI, "IFF_NO_PI"),
    (libc::IFF_VNET_HDR, "IFF_VNET_HDR"),
];

/// Segments of UDP: the kernel takes both versions of IP or none.
const USO: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// Why a descriptor cannot be a network device's backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// Not `/dev/net/tun`, or without an interface.
    #[error("the descriptor is not a tap: open /dev/net/tun and call TUNSETIFF first")]
    NotATap(#[source] io::Error),
    /// It was created with other flags.
    #[error("the tap was created without {flag}: TUNSETIFF needs IFF_TAP|IFF_NO_PI|IFF_VNET_HDR")]
    Flag {
        /// The missing flag.
        flag: &'static str,
    },
    /// It has only one queue, but several are needed.
    #[error("the tap was created without IFF_MULTI_QUEUE, which several queues need")]
    OneQueue,
    /// Not a queue of the same tap.
    #[error("tap queue {number} belongs to interface {found}, but the first one to {expected}")]
    OtherInterface {
        /// The queue's index, from 0 on.
        number: usize,
        /// Its interface.
        found: String,
        /// The first queue's interface.
        expected: String,
    },
    /// The kernel refused to set it up.
    #[error("{what} failed on the tap")]
    Setup {
        /// The ioctl.
        what: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

/// A tap with a header of 12 bytes before each frame.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    /// What its kernel can do.
    offloads: Offloads,
    /// A filter was set once.
    is_filtered: bool,
}

impl Tap {
    /// Takes a tap that the caller has opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`; no
    /// capability is needed for that. Its descriptor becomes non-blocking.
    ///
    /// # Errors
    /// If `fd` is not such a tap.
    pub fn new(fd: OwnedFd) -> Result<Self, TapError> {
        let interface = Interface::of(&fd).map_err(TapError::NotATap)?;
        Self::set_up(fd, &interface)
    }

    /// Takes the queues of a tap that the caller has opened, with `IFF_MULTI_QUEUE` as well, each
    /// by opening `/dev/net/tun` and calling `TUNSETIFF` with the same name. All of them are read
    /// as long as they are open. None is ever detached (`TUNSETQUEUE`): otherwise a guest could
    /// make the host wait for all its CPUs.
    ///
    /// # Errors
    /// If `fds` are not such queues of one tap.
    pub fn queues(fds: Vec<OwnedFd>) -> Result<Vec<Self>, TapError> {
        let several = fds.len() > 1;
        let mut expected: Option<String> = None;
        let queue = |(number, fd)| {
            let interface = Interface::of(&fd).map_err(TapError::NotATap)?;
            if several && interface.flags & libc::IFF_MULTI_QUEUE == 0 {
                return Err(TapError::OneQueue);
            }
            let expected = expected.get_or_insert_with(|| interface.name.clone());
            if *expected != interface.name {
                return Err(TapError::OtherInterface {
                    number,
                    found: interface.name,
                    expected: expected.clone(),
                });
            }
            Self::set_up(fd, &interface)
        };
        fds.into_iter().enumerate().map(queue).collect()
    }

    fn set_up(fd: OwnedFd, interface: &Interface) -> Result<Self, TapError> {
        for (bit, flag) in NEEDED {
            if interface.flags & bit == 0 {
                return Err(TapError::Flag { flag });
            }
        }
        let setup = |what| move |source| TapError::Setup { what, source };
        // The length of the header.
        set_int(&fd, libc::TUNSETVNETHDRSZ, 12).map_err(setup("TUNSETVNETHDRSZ"))?;
        // §5.1.6.1: little-endian, also on a big-endian host.
        set_int(&fd, libc::TUNSETVNETLE, 1).map_err(setup("TUNSETVNETLE"))?;
        let mut tap = Self {
            fd,
            offloads: Offloads::ALL,
            is_filtered: false,
        };
        // Linux before 6.2 knows no segments of UDP.
        tap.offloads.uso = tap.offload(libc::TUN_F_CSUM | USO).is_ok();
        tap.offload(0).map_err(setup("TUNSETOFFLOAD"))?;
        // An interface that exists longer than its users keeps the last one's filter. One without
        // filters, as those of macvtap, refuses this.
        let _ = tap.filter(&ReceiveFilter::All);
        let flags = rustix::fs::fcntl_getfl(&tap.fd)
            .and_then(|flags| {
                rustix::fs::fcntl_setfl(&tap.fd, flags | rustix::fs::OFlags::NONBLOCK)
            })
            .map_err(io::Error::from);
        flags.map_err(setup("F_SETFL"))?;
        Ok(tap)
    }

    fn offload(&self, flags: libc::c_uint) -> io::Result<()> {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let result = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(flags),
            )
        };
        check(result)
    }

    /// Sets which frames of the host the interface takes, for all of its queues. Others count as
    /// dropped there.
    fn filter(&self, filter: &ReceiveFilter) -> io::Result<()> {
        let request = tun_filter(filter);
        // SAFETY: TUNSETTXFILTER reads a `struct tun_filter` and as many addresses after it as its
        // field `count` says; `tun_filter` returns that many.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETTXFILTER, request.as_ptr()) };
        check(result)
    }
}

/// Returns a `struct tun_filter`: flags, the number of addresses, and the addresses. The kernel
/// compares the first eight, and hashes the others, which must be multicast; without any address
/// there is no filter.
fn tun_filter(filter: &ReceiveFilter) -> Vec<u8> {
    let (unicast, multicast) = match filter {
        ReceiveFilter::All => return vec![0; 4],
        ReceiveFilter::Only { unicast, multicast } => (unicast, multicast),
    };
    let (flags, multicast) = match multicast {
        Multicast::All => (libc::TUN_FLT_ALLMULTI, &[][..]),
        Multicast::Only(list) => (0, &list[..]),
    };
    let addresses: Vec<u8> = unicast
        .iter()
        .chain(multicast)
        .flat_map(|mac| mac.0)
        .collect();
    // Neither is large.
    let header = [flags, i32::try_from(addresses.len() / 6).unwrap_or(0)];
    let header = header.map(|field| u16::try_from(field).unwrap_or(0));
    [&header.map(u16::to_ne_bytes).concat()[..], &addresses].concat()
}

impl Nic for Tap {
    fn send(&mut self, header: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()> {
        let guards = Guards::readable(frame);
        let header = libc::iovec {
            iov_base: header.as_ptr().cast_mut().cast(),
            iov_len: HEADER_LEN,
        };
        with_iovecs(header, &guards, |iovecs, count| {
            // SAFETY: the first iovec covers `header`, the others guest memory that
            // stays mapped while it is borrowed; writev only reads from them.
            unsafe { libc::writev(self.fd.as_raw_fd(), iovecs, count) }
        })
        .map(drop)
    }

    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize> {
        let guards = Guards::writable(frame);
        let header = libc::iovec {
            iov_base: header.as_mut_ptr().cast(),
            iov_len: HEADER_LEN,
        };
        let len = with_iovecs(header, &guards, |iovecs, count| {
            // SAFETY: the first iovec covers `header`, which has no other user, the others guest
            // memory that stays mapped while it is borrowed, and may be written.
            unsafe { libc::readv(self.fd.as_raw_fd(), iovecs, count) }
        })?;
        len.checked_sub(HEADER_LEN)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn offloads(&self) -> Offloads {
        self.offloads
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        let mut flags = 0;
        if offloads.checksum {
            flags |= libc::TUN_F_CSUM;
            // The kernel refuses segments without checksums.
            if offloads.tso4 {
                flags |= libc::TUN_F_TSO4;
            }
            if offloads.tso6 {
                flags |= libc::TUN_F_TSO6;
            }
            if offloads.ecn && (offloads.tso4 || offloads.tso6) {
                flags |= libc::TUN_F_TSO_ECN;
            }
            if offloads.uso {
                flags |= USO;
            }
        }
        self.offload(flags)
    }

    fn set_filter(&mut self, filter: &ReceiveFilter) -> io::Result<()> {
        self.is_filtered |= *filter != ReceiveFilter::All;
        self.filter(filter)
    }
}

impl Drop for Tap {
    /// The interface may have another user next, who knows nothing of the guest's filter.
    fn drop(&mut self) {
        if self.is_filtered {
            let _ = self.filter(&ReceiveFilter::All);
        }
    }
}

/// The interface that an open `/dev/net/tun` is a queue of.
#[derive(Debug)]
struct Interface {
    flags: i32,
    name: String,
}

impl Interface {
    fn of(fd: &OwnedFd) -> io::Result<Self> {
        // SAFETY: an ifreq of zeroes is a valid one.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: TUNGETIFF writes an ifreq; a descriptor that is not a tap refuses it.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
        check(result)?;
        // SAFETY: the kernel filled in the flags.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let name = request.ifr_name.iter().take_while(|byte| **byte != 0);
        let name: Vec<u8> = name.map(|byte| byte.cast_unsigned()).collect();
        Ok(Self {
            // The upper bit would be taken as a sign.
            flags: i32::from(flags.cast_unsigned()),
            name: String::from_utf8_lossy(&name).into_owned(),
        })
    }
}

fn set_int(fd: &OwnedFd, request: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: these requests read an int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const value) };
    check(result)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
#[path = "tap_tests.rs"]
mod tests;
