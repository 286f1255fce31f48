//! A network card as a Linux guest sees it, over a tap in a network namespace of the test.

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use podvisor_vmm::{
    LinkState, MacAddress, MemorySize, NetDevice, NetDeviceError, Transport, VmExit,
};
use support::tap::{queue, tap_queues, vhost};
use support::{Console, PATIENCE, linux};

/// The number of bytes in each direction.
const LEN: usize = 2 << 20;
/// The memory that the guest gets while it runs.
const PLUGGED: MemorySize = MemorySize::mib(128);

/// Bytes without a pattern (xorshift64*).
fn bytes() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..LEN / 8)
        .flat_map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
        })
        .collect()
}

#[test]
fn guest_talks_tcp_both_ways_with_offloads_and_sees_its_link_on_both_transports() {
    talks_and_sees_its_link(Transport::Mmio, 1, Backend::Own);
    // The guest's driver uses as many queue pairs as it has CPUs.
    talks_and_sees_its_link(Transport::Pci, 2, Backend::Own);
}

#[test]
fn guest_talks_tcp_both_ways_by_the_hosts_kernel_and_sees_its_link_on_both_transports() {
    talks_and_sees_its_link(Transport::Mmio, 1, Backend::Kernel);
    talks_and_sees_its_link(Transport::Pci, 1, Backend::Kernel);
}

/// The code that moves frames.
#[derive(Clone, Copy, PartialEq)]
enum Backend {
    Own,
    Kernel,
}

fn talks_and_sees_its_link(transport: Transport, pairs: u8, backend: Backend) {
    let mut taps = tap_queues(pairs.into());
    let there = TcpListener::bind("10.9.0.1:5001").unwrap();
    let console = Console::default();
    let script = "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu\n\
         ls /sys/class/net/eth0/queues | xargs echo queues\n\
         ip link set lo up; ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up\n\
         until ping -c 1 -W 9 -q 10.9.0.1 > /dev/null; do :; done; echo pinged\n\
         mkdir /www; nc 10.9.0.1 5001 < /dev/null > /www/file; wc -c < /www/file\n\
         httpd -h /www; echo serving\n\
         carrier() { until [ \"$(cat /sys/class/net/eth0/carrier)\" = $1 ]; do :; done; }\n\
         carrier 0; echo unplugged; carrier 1; echo plugged\n\
         until ping -c 1 -W 9 -q 10.9.0.1 > /dev/null; do :; done; echo pinged again";
    let card = match backend {
        Backend::Own => NetDevice::tap_queues(taps.into_iter().map(Into::into).collect()),
        Backend::Kernel => NetDevice::vhost(taps.remove(0).into(), vhost()),
    };
    let card = card.unwrap().mac(MacAddress([2, 0, 0, 0, 0, 9]));
    // The kernel does not serve drivers that were told an MTU.
    let (card, mtu) = match backend {
        Backend::Own => (card.mtu(1400), 1400),
        Backend::Kernel => (card, 1500),
    };
    let vm = linux(script, &console)
        .transport(transport)
        .vcpus(pairs)
        .memory(MemorySize::mib(256))
        .hotplug_memory(PLUGGED)
        .net(card)
        .build()
        .unwrap();
    vm.start().unwrap();
    // Files are stored there, and sent from there.
    let memory = vm.hotplug_memory().unwrap();
    assert_eq!(memory.request_and_wait(PLUGGED, PATIENCE).unwrap(), PLUGGED);

    let bytes = bytes();
    let (mut connection, _) = there.accept().unwrap();
    connection.write_all(&bytes).unwrap();
    drop(connection);
    // Sends the whole file in one call, and so in segments of the maximum size.
    console.wait_for("serving");
    let mut connection = TcpStream::connect("10.9.0.2:80").unwrap();
    connection.write_all(b"GET /file HTTP/1.0\r\n\r\n").unwrap();
    let mut returned = Vec::new();
    connection.read_to_end(&mut returned).unwrap();
    drop(connection);
    assert!(
        returned.ends_with(&bytes),
        "{} bytes came back",
        returned.len()
    );

    let card = vm.net("net0").unwrap();
    card.set_link(LinkState::Down).unwrap();
    console.wait_for("unplugged");
    card.set_link(LinkState::Up).unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    let queues = match pairs {
        1 => "queues rx-0 tx-0\n",
        _ => "queues rx-0 rx-1 tx-0 tx-1\n",
    };
    for part in [
        queues,
        &format!("02:00:00:00:00:09\n{mtu}\n"),
        "\npinged\n2097152\nserving\n",
        "plugged\npinged again\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let counters = card.counters();
    let count = |name| counters.iter().find(|c| c.name == name).unwrap().value;
    if backend == Backend::Kernel {
        assert_eq!(count("rx_frames") + count("tx_frames"), 0, "{counters:?}");
        assert!(count("vhost_starts") > 0, "{counters:?}");
        assert!(vm.faults().is_empty());
        return;
    }
    for (size, segmented) in [("rx_bytes", "rx_segmented"), ("tx_bytes", "tx_segmented")] {
        assert!(count(size) > LEN as u64, "{counters:?}");
        assert!(count(segmented) > 0, "{counters:?}");
    }
    for none in ["rx_dropped", "rx_errors", "tx_malformed", "tx_errors"] {
        assert_eq!(count(none), 0, "{counters:?}");
    }
    assert!(vm.faults().is_empty());
}

#[test]
fn guest_cards_are_refused_queues_that_are_not_of_one_tap() {
    let _own_namespace = tap_queues(1);
    let several = libc::IFF_MULTI_QUEUE;
    let refused = |queues: Vec<File>| {
        let card = NetDevice::tap_queues(queues.into_iter().map(Into::into).collect());
        let NetDeviceError::Tap(error) = card.unwrap_err() else {
            panic!("another error");
        };
        error.to_string()
    };
    let error = refused(vec![queue("tap1", 0), queue("tap2", 0)]);
    assert!(error.contains("IFF_MULTI_QUEUE"), "{error}");
    let error = refused(vec![queue("tap3", several), queue("tap4", several)]);
    assert!(error.contains("tap3") && error.contains("tap4"), "{error}");
    let none = NetDevice::tap_queues(Vec::new()).unwrap_err();
    assert!(matches!(none, NetDeviceError::QueuePairs { count: 0 }));
}
