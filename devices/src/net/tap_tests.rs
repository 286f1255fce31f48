//! Taps in a network namespace of the test's thread: as root, as some tests of shared directories.

use super::*;
use crate::GuestRam;
use crate::net::mac::MacAddress;
use crate::net::{NetDevice, feature};
use crate::testing::{CountingInterrupt, DriverQueue, backend_readable, memory, start, stop};
use crate::virtio::{Progress, VirtioDevice};
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
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

/// A network device over the interface `tap0`, with its driver and the host's end.
struct Card {
    mem: GuestRam,
    device: NetDevice,
    irq: Arc<CountingInterrupt>,
    rx: DriverQueue,
    control: DriverQueue,
    host: OwnedFd,
    sent: u8,
}

impl Card {
    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const BROADCAST: [u8; 6] = [0xff; 6];

    const BUFFERS: u64 = 0x10_0000;
    const BUFFER: u32 = 0x1000;
    const COMMAND: u64 = 0x8_0000;

    fn new() -> Self {
        Self::over(queue("tap0", TAP))
    }

    fn over(tap: OwnedFd) -> Self {
        let device = NetDevice::tap(tap).unwrap();
        let host = host_end("tap0");
        let mem = memory(8 << 20);
        let [rx, control] = [0x1_0000, 0x3_0000].map(|at| DriverQueue::new(&mem, at, 64));
        let mut card = Self {
            device: device.mac(MacAddress(Self::OWN)),
            irq: Arc::default(),
            mem,
            rx,
            control,
            host,
            sent: 0,
        };
        card.start();
        card
    }

    fn start(&mut self) {
        let tx = DriverQueue::new(&self.mem, 0x2_0000, 64);
        self.rx = DriverQueue::new(&self.mem, 0x1_0000, 64);
        self.control = DriverQueue::new(&self.mem, 0x3_0000, 64);
        for n in 0..64 {
            let at = Self::BUFFERS + n * u64::from(Self::BUFFER);
            self.rx.add(&[], &[(at, Self::BUFFER)]);
        }
        let features = feature::CTRL_RX | feature::CTRL_MAC_ADDR;
        let queues = [&self.rx, &tx, &self.control];
        start(&mut self.device, &queues, &self.irq, features);
    }

    fn restart(&mut self) {
        stop(&mut self.device);
        self.device.reset();
        self.start();
    }

    fn command(&mut self, class: u8, command: u8, data: &[u8]) {
        let bytes = [&[class, command], data].concat();
        let (at, ack) = (Self::COMMAND, Self::COMMAND + 0x1000);
        self.mem.write_slice(&bytes, GuestAddress(at)).unwrap();
        self.mem.write_slice(&[9], GuestAddress(ack)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.control.add(&[(at, len)], &[(ack, 1)]);
        while self.device.on_queue(2).unwrap() == Progress::More {}
        assert_eq!(self.mem.read_obj::<u8>(GuestAddress(ack)).unwrap(), 0);
    }

    fn promiscuous(&mut self, on: bool) {
        self.command(0, 0, &[on.into()]);
    }

    fn all_multicast(&mut self, on: bool) {
        self.command(0, 1, &[on.into()]);
    }

    fn tables(&mut self, unicast: &[[u8; 6]], multicast: &[[u8; 6]]) {
        let table = |list: &[[u8; 6]]| {
            let count = u32::try_from(list.len()).unwrap();
            [&count.to_le_bytes()[..], &list.concat()].concat()
        };
        self.command(1, 0, &[table(unicast), table(multicast)].concat());
    }

    /// Sends a frame from the host.
    fn send(&mut self, destination: [u8; 6]) -> Vec<u8> {
        self.sent += 1;
        let mut frame = frame(60, self.sent);
        frame[..6].copy_from_slice(&destination);
        rustix::io::write(&self.host, &frame).unwrap();
        frame
    }

    /// Whether the driver gets a frame to `destination`. It gets another one after it in any case.
    fn gets(&mut self, destination: [u8; 6]) -> bool {
        let frame = self.send(destination);
        let last = self.send(Self::BROADCAST);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut arrived = false;
        loop {
            assert!(Instant::now() < deadline, "broadcast does not arrive");
            if backend_readable(&self.device) {
                let _ = self.device.on_backend().unwrap();
            }
            while let Some(used) = self.rx.take_used() {
                let at = Self::BUFFERS + u64::from(used.id) * u64::from(Self::BUFFER);
                let mut got = vec![0; used.len as usize - HEADER_LEN];
                let start = GuestAddress(at + HEADER_LEN as u64);
                self.mem.read_slice(&mut got, start).unwrap();
                self.rx.add(&[], &[(at, Self::BUFFER)]);
                arrived |= got == frame;
                if got == last {
                    return arrived;
                }
            }
        }
    }
}

#[test]
fn the_kernel_keeps_from_a_driver_what_it_does_not_want() {
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 5];
    alone(|| {
        let mut card = Card::new();
        let gets = |card: &mut Card, list: &[[u8; 6]]| -> Vec<bool> {
            list.iter().map(|to| card.gets(*to)).collect()
        };
        let all = [Card::OWN, Card::BROADCAST, OTHER, GROUP];
        assert_eq!(
            gets(&mut card, &all),
            [true; 4],
            "a driver that sets nothing"
        );
        card.promiscuous(false);
        assert_eq!(gets(&mut card, &all), [true, true, false, false]);
        card.all_multicast(true);
        assert_eq!(gets(&mut card, &all), [true, true, false, true]);
        card.all_multicast(false);
        card.tables(&[OTHER], &[GROUP]);
        assert_eq!(gets(&mut card, &all), [true; 4]);
        card.tables(&[], &[]);
        assert_eq!(gets(&mut card, &all), [true, true, false, false]);
        card.promiscuous(true);
        assert_eq!(gets(&mut card, &all), [true; 4]);

        // A driver with a new address.
        card.promiscuous(false);
        card.command(1, 1, &OTHER);
        assert_eq!(gets(&mut card, &all), [false, true, true, false]);
        // Another driver.
        card.restart();
        assert_eq!(gets(&mut card, &all), [true; 4]);
        card.promiscuous(false);
        assert_eq!(gets(&mut card, &all), [true, true, false, false]);
    });
}

/// As many addresses as a driver may have: those that the kernel hashes, and those that it
/// compares.
#[test]
fn the_largest_tables_are_filtered_and_larger_ones_are_not() {
    let unicast: Vec<_> = (0..8).map(|n| [2, 0, 0, 0, 1, n]).collect();
    let groups: Vec<_> = (0..65).map(|n| [1, 0, 0x5e, 0, 1, n]).collect();
    let foreign = [2, 0, 0, 0, 2, 0];
    alone(move || {
        let mut card = Card::new();
        card.promiscuous(false);
        card.tables(&unicast[..7], &groups[..64]);
        for address in unicast[..7].iter().chain(&groups[..64]) {
            assert!(card.gets(*address), "{address:?}");
        }
        assert!(!card.gets(unicast[7]) && !card.gets(foreign));
        assert!(card.gets(Card::OWN));
        card.tables(&unicast, &[]);
        assert!(card.gets(unicast[7]) && card.gets(foreign));
        card.tables(&[], &groups);
        assert!(card.gets(groups[64]) && !card.gets(foreign));
    });
}

#[test]
fn an_interface_that_stays_loses_the_filter_of_its_last_user() {
    alone(|| {
        let tap = queue("tap0", TAP);
        // SAFETY: TUNSETPERSIST takes its argument by value.
        check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1) }).unwrap();
        let foreign = [2, 0, 0, 0, 2, 0];
        let next_user = tap.try_clone().unwrap();
        let mut card = Card::over(tap);
        card.promiscuous(false);
        assert!(!card.gets(foreign));
        let host = card.host.try_clone().unwrap();
        drop(card);
        let mut frame = frame(60, 7);
        frame[..6].copy_from_slice(&foreign);
        rustix::io::write(&host, &frame).unwrap();
        let mut got = [0; 2048];
        // Others are of the kernel itself; without the frame, there is an error at the end.
        while {
            let len = rustix::io::read(&next_user, &mut got).unwrap();
            !got[..len].ends_with(&frame)
        } {}
        // A killed process leaves its filter, which the next card does not keep.
        let mut card = Card::over(next_user.try_clone().unwrap());
        card.promiscuous(false);
        std::mem::forget(card);
        assert!(Card::over(next_user).gets(foreign));
    });
}
