//! The packet socket on which a server hears its guest.
//!
//! It is bound to the guest's tap, and sees frames before traffic control redirects or drops them.
//! A filter in the kernel lets only frames for the server through, so that a guest's other frames,
//! however many, wake nobody.
#![allow(unsafe_code)] // options and the address of packet sockets, which rustix does not have

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::net::netdevice::name_to_index;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::config::Config;
use crate::frame::{SERVER_PORT, SERVER_PORT_6};

/// Bytes of frames that wait for the server; later ones are lost, and clients ask again.
const RECEIVE_BUFFER: usize = 64 << 10;
/// Not to be given what is sent to the guest (linux/if_packet.h).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// Ancillary data in a filter: whether there was a VLAN tag (linux/filter.h).
const VLAN_TAG_PRESENT: u32 = 0xffff_f000 + 48;

/// Why a server's socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The interface does not exist in this network namespace.
    #[error("failed to find the tap {name:?} for the guest's DHCP server")]
    NoInterface {
        /// Name of the interface.
        name: String,
        #[allow(missing_docs)]
        source: io::Error,
    },
    /// The kernel refuses; the privilege CAP_NET_RAW is needed.
    #[error(
        "failed to {action} for the DHCP server on {name:?}: it takes CAP_NET_RAW in the \
         namespace of the network"
    )]
    Refused {
        /// What was tried.
        action: &'static str,
        /// Name of the interface.
        name: String,
        #[allow(missing_docs)]
        source: io::Error,
    },
}

/// Opens a socket on the interface `name` of this thread's network namespace, for the server with
/// this configuration. What follows takes no privilege.
///
/// # Errors
///
/// The interface does not exist, or the caller may not open packet sockets.
pub fn open_socket(name: &str, config: &Config) -> Result<OwnedFd, SocketError> {
    let failed = |action| {
        move |source: io::Error| SocketError::Refused {
            action,
            name: name.to_owned(),
            source,
        }
    };
    // Without a protocol it receives nothing until it is bound.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None);
    let socket = socket.map_err(|error| failed("open a packet socket")(error.into()))?;
    let index = name_to_index(&socket, name).map_err(|error| SocketError::NoInterface {
        name: name.to_owned(),
        source: error.into(),
    })?;
    let buffer = set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER);
    buffer.map_err(|error| failed("set the size of the buffer")(error.into()))?;
    set_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1_i32)
        .map_err(failed("leave out frames to the guest"))?;
    attach(&socket, &filter(config)).map_err(failed("attach a filter"))?;
    bind(&socket, index).map_err(failed("bind a packet socket"))?;
    Ok(socket)
}

fn set_option<T>(
    socket: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: the kernel reads `length` bytes of `value`, which are as many as there are.
    let result = unsafe {
        let value = std::ptr::from_ref(value).cast();
        libc::setsockopt(socket.as_raw_fd(), level, name, value, length)
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Attaches `filter`, and keeps it from being taken off again.
fn attach(socket: &OwnedFd, filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).unwrap_or(u16::MAX),
        // The kernel copies the instructions.
        filter: filter.as_ptr().cast_mut(),
    };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, &1_i32)
}

fn bind(socket: &OwnedFd, index: u32) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or(0);
    // SAFETY: the kernel reads `length` bytes of `address`, which are as many as there are.
    let result = unsafe {
        let address = std::ptr::from_ref(&address).cast();
        libc::bind(socket.as_raw_fd(), address, length)
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Where a test of the filter goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// With the next instruction.
    On,
    Accept,
    Drop,
    /// With the instruction that has this number.
    To(usize),
}

/// An instruction of classic BPF.
#[derive(Debug, Clone, Copy)]
enum Instruction {
    /// Loads 1, 2 or 4 bytes from a place in the frame.
    Load8(u32),
    Load16(u32),
    Load32(u32),
    /// Loads the length of the IPv4 header that begins there into X.
    LoadHeaderLength(u32),
    /// Loads 2 bytes from a place behind X.
    LoadIndexed16(u32),
    /// Whether the loaded value is this one.
    Equal(u32, Next, Next),
    /// Whether the loaded value has one of these bits.
    AnyOf(u32, Next, Next),
    /// Ends; a frame with 0 bytes is dropped.
    Return(u32),
}

/// Frames for the server of `config`: of the guest's card, without a VLAN, and a message to a DHCP
/// server, one to a DHCPv6 server, a router solicitation or an ARP packet about its address.
/// Fragments and extension headers do not occur there.
fn filter(config: &Config) -> Vec<libc::sock_filter> {
    use Instruction::{
        AnyOf, Equal, Load8, Load16, Load32, LoadHeaderLength, LoadIndexed16, Return,
    };
    use Next::{Accept, Drop, On, To};
    let [a, b, c, d, e, f] = config.client.0;
    let mut program = vec![
        Load32(VLAN_TAG_PRESENT),
        Equal(0, On, Drop),
        Load32(6),
        Equal(u32::from_be_bytes([a, b, c, d]), On, Drop),
        Load16(10),
        Equal(u16::from_be_bytes([e, f]).into(), On, Drop),
        Load16(12),
        Equal(0x86dd, To(17), On),
        Equal(0x0806, To(24), On),
        // IPv4: UDP, no fragment, the port.
        Equal(0x0800, On, Drop),
        Load8(23),
        Equal(17, On, Drop),
        Load16(20),
        AnyOf(0x1fff, Drop, On),
        LoadHeaderLength(14),
        LoadIndexed16(16),
        Equal(SERVER_PORT.into(), Accept, Drop),
        // 17, IPv6: UDP with the port, or ICMPv6 with the type.
        Load8(20),
        Equal(17, On, To(21)),
        Load16(56),
        Equal(SERVER_PORT_6.into(), Accept, Drop),
        Equal(58, On, Drop),
        Load8(54),
        Equal(133, Accept, Drop),
        // 24, ARP: the address that is asked for.
        Load32(38),
    ];
    let neighbours = config.neighbours.iter().map(|neighbour| neighbour.address);
    let own = std::iter::once(config.server_address);
    program.extend(
        own.chain(neighbours)
            .map(|address| Equal(address.to_bits(), Accept, On)),
    );
    // Where `Drop` and `Accept` lead.
    program.extend([Return(0), Return(0xffff)]);
    let accept = program.len().saturating_sub(1);
    let assemble = |(place, instruction): (usize, &Instruction)| {
        let jump = |next: Next| {
            let target = match next {
                On => return 0,
                Accept => accept,
                Drop => accept.saturating_sub(1),
                To(target) => target,
            };
            u8::try_from(target.saturating_sub(place).saturating_sub(1)).unwrap_or(u8::MAX)
        };
        let (code, jt, jf, k) = match *instruction {
            Load8(place) => (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, place),
            Load16(place) => (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, place),
            Load32(place) => (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, place),
            LoadHeaderLength(place) => (libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, place),
            LoadIndexed16(place) => (libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, place),
            Equal(value, yes, no) => {
                let code = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
                (code, jump(yes), jump(no), value)
            }
            AnyOf(value, yes, no) => {
                let code = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
                (code, jump(yes), jump(no), value)
            }
            Return(bytes) => (libc::BPF_RET | libc::BPF_K, 0, 0, bytes),
        };
        // Codes of classic BPF are small.
        let code = u16::try_from(code).unwrap_or(0);
        libc::sock_filter { code, jt, jf, k }
    };
    program.iter().enumerate().map(assemble).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{CLIENT, plain};
    use crate::frame;
    use crate::frame::tests::{request4, request6};

    /// Runs a filter as the kernel does: how many bytes of the frame pass.
    fn run(filter: &[libc::sock_filter], frame: &[u8], vlan: u32) -> u32 {
        let load = |place: u32, length: usize| {
            let bytes = frame.get(place as usize..)?.get(..length)?;
            Some(
                bytes
                    .iter()
                    .fold(0, |value, byte| value << 8 | u32::from(*byte)),
            )
        };
        let (mut a, mut x, mut place) = (0, 0, 0);
        loop {
            let one = &filter[place];
            place += 1;
            let loaded = match one.code {
                0x20 if one.k == VLAN_TAG_PRESENT => Some(vlan),
                0x20 => load(one.k, 4),
                0x28 => load(one.k, 2),
                0x30 => load(one.k, 1),
                0x48 => load(x + one.k, 2),
                0xb1 => match load(one.k, 1) {
                    Some(byte) => {
                        x = (byte & 0xf) * 4;
                        Some(a)
                    }
                    None => None,
                },
                0x15 | 0x45 => {
                    let yes = if one.code == 0x15 {
                        a == one.k
                    } else {
                        a & one.k != 0
                    };
                    place += usize::from(if yes { one.jt } else { one.jf });
                    continue;
                }
                0x06 => return one.k,
                other => panic!("{other:#x}"),
            };
            match loaded {
                Some(value) => a = value,
                None => return 0,
            }
        }
    }

    #[test]
    fn the_filter_passes_what_is_for_the_server_and_nothing_else() {
        let mut config = plain();
        let neighbours = (1..=64).map(|last| crate::config::Ipv4Neighbour {
            address: [169, 254, 1, last].into(),
            mac: config.server,
        });
        config.neighbours = neighbours.collect();
        assert_eq!(config.validate(), Ok(()));
        let filter = filter(&config);
        let passes = |frame: &[u8]| run(&filter, frame, 0) > 0;
        let link = (CLIENT, CLIENT.link_local());
        let arp = |target: [u8; 4]| {
            let packet = [&[0; 24][..], &target].concat();
            frame::arp(CLIENT, config.server, &packet)
        };
        let solicit = frame::icmp6(link, (config.server, frame::ALL_NODES), vec![133; 8]);
        let own = config.server_address.octets();
        for good in [
            request4(&[0; 300]),
            request6(&[0; 30]),
            solicit.clone(),
            arp(own),
        ] {
            assert!(passes(&good), "{good:?}");
            assert_eq!(run(&filter, &good, 1), 0, "with a VLAN tag");
            for length in 0..38 {
                assert!(!passes(&good[..length]), "{length}");
            }
            let mut other_card = good;
            other_card[11] ^= 1;
            assert!(!passes(&other_card));
        }
        let mut fragment = request4(&[0; 300]);
        fragment[21] = 1;
        let mut tcp = request4(&[0; 300]);
        tcp[23] = 6;
        let mut port = request4(&[0; 300]);
        port[37] = 53;
        let mut port_6 = request6(&[0; 300]);
        port_6[57] = 53;
        let neighbour = frame::icmp6(link, (config.server, frame::ALL_NODES), vec![135; 8]);
        let tcp_6 = {
            let mut frame = solicit;
            frame[20] = 6;
            frame
        };
        for bad in [
            fragment,
            tcp,
            port,
            port_6,
            neighbour,
            tcp_6,
            arp([10, 1, 0, 1]),
        ] {
            assert!(!passes(&bad), "{bad:?}");
        }
        // A longer header of IPv4 moves the port.
        let mut options = request4(&[0; 300]);
        options[14] = 0x46;
        options.splice(34..34, [0; 4]);
        assert!(passes(&options));
    }
}
