//! Taps in a network namespace of the test's thread: as root, as some tests of shared directories.

use super::*;
use crate::testing::memory;
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::FromRawFd;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

#[test]
fn other_descriptors_are_refused_with_what_to_do() {
    let file = tempfile::tempfile().unwrap();
    let error = Tap::new(file.into()).unwrap_err();
    assert!(matches!(error, TapError::NotATap(_)));
    assert!(error.to_string().contains("TUNSETIFF"), "{error}");
}

/// Runs `test` on a thread with its own network.
fn alone(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: only the thread's network namespace changes.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
        test();
    });
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn named(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq of zeroes is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Opens a queue of the interface `name`.
fn queue(name: &str, flags: libc::c_int) -> OwnedFd {
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    let tun = tun.expect("the module `tun`");
    let mut request = named(name);
    request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap();
    // SAFETY: TUNSETIFF reads and writes an ifreq.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    check(result).unwrap();
    tun.into()
}

const TAP: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
const SEVERAL: libc::c_int = TAP | libc::IFF_MULTI_QUEUE;

/// The host's end of the interface `name`, which goes up: a socket of raw frames.
fn host_end(name: &str) -> OwnedFd {
    let all = u16::try_from(libc::ETH_P_ALL).unwrap().to_be();
    // SAFETY: no pointers; the result is checked.
    let socket = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            all.into(),
        )
    };
    check(socket).unwrap();
    // SAFETY: the descriptor is new.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let mut request = named(name);
    let fd = socket.as_raw_fd();
    request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
    // SAFETY: these requests read and write an ifreq, and bind reads a sockaddr_ll.
    unsafe {
        check(libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw mut request)).unwrap();
        check(libc::ioctl(fd, libc::SIOCGIFINDEX, &raw mut request)).unwrap();
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = request.ifr_ifru.ifru_ifindex;
        let len = size_of_val(&address) as libc::socklen_t;
        check(libc::bind(fd, (&raw const address).cast(), len)).unwrap();
    }
    socket
}

/// A frame between two made-up addresses, of a made-up protocol.
fn frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![seed; len];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

fn is_mine(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[0x88, 0xb5])
}

#[test]
fn frames_go_from_and_to_the_host_whole_and_in_pieces_of_memory() {
    alone(|| {
        let mut tap = Tap::new(queue("tap0", TAP)).unwrap();
        let host = host_end("tap0");
        let mem = memory(1 << 20);
        let slice = |at, len| mem.get_slice(GuestAddress(at), len).unwrap();
        let mut header = [9; HEADER_LEN];
        let buffers = [slice(0x1000, 100), slice(0x3000, 2000)];
        for (len, seed) in [(60, 1), (1514, 2), (101, 3)] {
            let sent = frame(len, seed);
            rustix::io::write(&host, &sent).unwrap();
            // The kernel's own frames come in between.
            let got = loop {
                let len = match tap.receive(&mut header, &buffers) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    len => len.unwrap(),
                };
                let mut got = vec![0; len];
                let (first, rest) = got.split_at_mut(len.min(100));
                mem.read_slice(first, GuestAddress(0x1000)).unwrap();
                mem.read_slice(rest, GuestAddress(0x3000)).unwrap();
                if is_mine(&got) {
                    break got;
                }
            };
            assert!(got == sent, "{len}");
            assert_eq!(header[..2], [0, 0], "nothing is left to do");
        }

        for (len, seed) in [(60, 4), (1514, 5)] {
            let sent = frame(len, seed);
            let (first, rest) = sent.split_at(50);
            mem.write_slice(first, GuestAddress(0x5000)).unwrap();
            mem.write_slice(rest, GuestAddress(0x7000)).unwrap();
            let pieces = [slice(0x5000, 50), slice(0x7000, len - 50)];
            tap.send(&[0; HEADER_LEN], &pieces).unwrap();
            let mut got = vec![0; 2000];
            let got = loop {
                let len = rustix::io::read(&host, &mut got).unwrap();
                if is_mine(&got[..len]) && got[14] == seed {
                    break &got[..len];
                }
            };
            assert!(got == sent, "{len}");
        }
    });
}

#[test]
fn a_tap_has_its_flags_and_its_queues_are_of_one_interface() {
    alone(|| {
        for (flags, missing) in [
            (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR, "TAP"),
            (libc::IFF_TAP | libc::IFF_NO_PI, "VNET_HDR"),
        ] {
            let error = Tap::new(queue("tap0", flags)).unwrap_err();
            let TapError::Flag { flag } = error else {
                panic!("{error}")
            };
            assert!(flag.contains(missing), "{flag}");
        }
        assert!(Tap::queues(Vec::new()).unwrap().is_empty());
        assert_eq!(Tap::queues(vec![queue("one", TAP)]).unwrap().len(), 1);
        let queues = |names: [&str; 2], flags| {
            let fds = names.map(|name| queue(name, flags));
            Tap::queues(fds.into())
        };
        assert_eq!(queues(["many", "many"], SEVERAL).unwrap().len(), 2);
        let error = queues(["one", "two"], TAP).unwrap_err();
        assert!(matches!(error, TapError::OneQueue), "{error}");
        let error = queues(["one", "two"], SEVERAL).unwrap_err();
        let TapError::OtherInterface {
            number,
            found,
            expected,
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((number, &*found, &*expected), (1, "two", "one"));
    });
}

/// The offloads of an interface that the kernel uses towards the tap: `NETIF_F_HW_CSUM`,
/// `NETIF_F_TSO`, `NETIF_F_TSO_ECN`, `NETIF_F_TSO6` and `NETIF_F_GSO_UDP_L4`, in the order of their
/// bits.
fn used_offloads(name: &str, socket: &OwnedFd) -> [bool; 5] {
    const GFEATURES: u32 = 0x3a;
    // The command and the number of blocks; available, requested, active and unchangeable bits of
    // each of two blocks.
    let mut features = [GFEATURES, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut request = named(name);
    request.ifr_ifru.ifru_data = features.as_mut_ptr().cast();
    let fd = socket.as_raw_fd();
    // SAFETY: SIOCETHTOOL writes as much as the request has room for.
    let result = unsafe { libc::ioctl(fd, libc::SIOCETHTOOL, &raw mut request) };
    check(result).unwrap();
    let active = u64::from(features[8]) << 32 | u64::from(features[4]);
    [3, 16, 18, 20, 33].map(|bit| active >> bit & 1 != 0)
}

#[test]
fn the_kernel_leaves_to_a_guest_what_its_driver_accepts() {
    alone(|| {
        let mut tap = Tap::new(queue("tap0", TAP)).unwrap();
        let host = host_end("tap0");
        assert_eq!(used_offloads("tap0", &host), [false; 5]);
        assert_eq!(tap.offloads().uso, kernel() >= (6, 2));
        for (checksum, tso4, tso6, ecn, used) in [
            (true, false, false, false, [true, false, false, false]),
            (true, true, false, false, [true, true, false, false]),
            (true, false, true, false, [true, false, false, true]),
            (true, true, false, true, [true, true, true, false]),
            (true, false, true, true, [true, false, true, true]),
            (true, true, true, true, [true; 4]),
            // Marked segments without segments, and segments without checksums.
            (true, false, false, true, [true, false, false, false]),
            (false, true, true, true, [false; 4]),
            (false, false, false, false, [false; 4]),
        ] {
            for uso in [false, tap.offloads().uso] {
                let offloads = Offloads {
                    checksum,
                    tso4,
                    tso6,
                    ecn,
                    uso,
                };
                tap.set_offloads(offloads).unwrap();
                let [csum, tso4, ecn, tso6] = used;
                let used = [csum, tso4, ecn, tso6, checksum && uso];
                assert_eq!(used_offloads("tap0", &host), used, "{offloads:?}");
            }
        }
    });
}

/// The version of the running kernel.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']);
    let mut number = || numbers.next().unwrap().parse().unwrap();
    (number(), number())
}

/// Gives the interface `name` the IPv4 address `address`.
fn set_address(name: &str, address: [u8; 4]) {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let mut request = named(name);
    // SAFETY: a sockaddr of zeroes is a valid one.
    let mut to: libc::sockaddr = unsafe { std::mem::zeroed() };
    to.sa_family = libc::AF_INET as u16;
    for (to, from) in to.sa_data.iter_mut().skip(2).zip(address) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_addr = to;
    // SAFETY: SIOCSIFADDR reads an ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw mut request) }).unwrap();
}

/// Ones' complement sum of 16-bit words, as in the checksums of IP and UDP.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| match *word {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    });
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// An Ethernet frame to `mac` with one UDP packet over IPv4, and the sum of its pseudo header as
/// its checksum.
fn udp_frame(mac: [u8; 6], [from, to]: [[u8; 4]; 2], port: u16, data: &[u8]) -> Vec<u8> {
    let udp_len = (8 + data.len() as u16).to_be_bytes();
    let ip_len = (28 + data.len() as u16).to_be_bytes();
    let mut ip = [
        &[0x45, 0][..],
        &ip_len,
        &[0, 0, 0, 0, 64, 17, 0, 0],
        &from,
        &to,
    ]
    .concat();
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let pseudo = sum(&[&from[..], &to, &[0, 17], &udp_len].concat());
    [
        &mac[..],
        &[2, 0, 0, 0, 0, 2, 8, 0],
        &ip,
        &[0x30, 0x39],
        &port.to_be_bytes(),
        &udp_len,
        &pseudo.to_be_bytes(),
        data,
    ]
    .concat()
}

/// Frames that a guest sends unsegmented arrive as the datagrams that its program sent.
#[test]
fn the_kernel_segments_a_guests_udp_if_it_says_that_it_can() {
    alone(|| {
        let mut tap = Tap::new(queue("tap0", TAP)).unwrap();
        let host = host_end("tap0");
        let mut request = named("tap0");
        // SAFETY: SIOCGIFHWADDR fills in an ifreq.
        let mac = unsafe {
            let fd = host.as_raw_fd();
            check(libc::ioctl(fd, libc::SIOCGIFHWADDR, &raw mut request)).unwrap();
            request.ifr_ifru.ifru_hwaddr.sa_data
        };
        let mac: [u8; 6] = std::array::from_fn(|at| mac[at].cast_unsigned());
        set_address("tap0", [10, 9, 8, 1]);
        let socket = UdpSocket::bind("10.9.8.1:0").unwrap();
        let timeout = Duration::from_secs(10);
        socket.set_read_timeout(Some(timeout)).unwrap();
        let port = socket.local_addr().unwrap().port();

        // Three datagrams, the last one shorter.
        let data: Vec<u8> = (0..2500u32).map(|at| at as u8).collect();
        let frame = udp_frame(mac, [[10, 9, 8, 2], [10, 9, 8, 1]], port, &data);
        let mut header = [0; HEADER_LEN];
        header[..2].copy_from_slice(&[1, 5]);
        header[2..4].copy_from_slice(&42u16.to_le_bytes());
        header[4..6].copy_from_slice(&1000u16.to_le_bytes());
        header[6..8].copy_from_slice(&34u16.to_le_bytes());
        header[8..10].copy_from_slice(&6u16.to_le_bytes());
        let mem = memory(1 << 20);
        mem.write_slice(&frame, GuestAddress(0x1000)).unwrap();
        let pieces = [mem.get_slice(GuestAddress(0x1000), frame.len()).unwrap()];
        let sent = tap.send(&header, &pieces);
        if !tap.offloads().uso {
            sent.expect_err("the kernel does not know such frames");
            return;
        }
        sent.unwrap();
        for expected in data.chunks(1000) {
            let mut got = [0; 3000];
            let len = socket.recv(&mut got).unwrap();
            assert_eq!(&got[..len], expected);
        }
    });
}
