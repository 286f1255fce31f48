//! A network card as a Linux guest sees it, over a tap in a network namespace of the test.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use podvisor_vmm::{LinkState, MacAddress, MemorySize, NetDevice, Transport, VmExit};
use support::tap::tap;
use support::{Console, linux};

/// Bytes that go each way.
const LEN: usize = 2 << 20;

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
    for transport in [Transport::Mmio, Transport::Pci] {
        talks_and_sees_its_link(transport);
    }
}

fn talks_and_sees_its_link(transport: Transport) {
    let tap = tap();
    let there = TcpListener::bind("10.9.0.1:5001").unwrap();
    let console = Console::default();
    let script = "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu\n\
         ip link set lo up; ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up\n\
         ping -c 3 -q 10.9.0.1 > /dev/null && echo pinged\n\
         mkdir /www; nc 10.9.0.1 5001 < /dev/null > /www/file; wc -c < /www/file\n\
         httpd -h /www; echo serving\n\
         carrier() { until [ \"$(cat /sys/class/net/eth0/carrier)\" = $1 ]; do :; done; }\n\
         carrier 0; echo unplugged; carrier 1; echo plugged\n\
         ping -c 1 -q 10.9.0.1 > /dev/null && echo pinged again";
    let card = NetDevice::tap(tap.into())
        .unwrap()
        .mac(MacAddress([2, 0, 0, 0, 0, 9]))
        .mtu(1400);
    let vm = linux(script, &console)
        .transport(transport)
        .memory(MemorySize::mib(256))
        .net(card)
        .build()
        .unwrap();
    vm.start().unwrap();

    let bytes = bytes();
    let (mut connection, _) = there.accept().unwrap();
    connection.write_all(&bytes).unwrap();
    drop(connection);
    // Sends the file at once, and so by segments that are as large as they may be.
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
    for part in [
        "02:00:00:00:00:09\n1400\n",
        "\npinged\n2097152\nserving\n",
        "plugged\npinged again\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let counters = card.counters();
    let count = |name| counters.iter().find(|c| c.name == name).unwrap().value;
    for (size, segmented) in [("rx_bytes", "rx_segmented"), ("tx_bytes", "tx_segmented")] {
        assert!(count(size) > LEN as u64, "{counters:?}");
        assert!(count(segmented) > 0, "{counters:?}");
    }
    for none in ["rx_dropped", "rx_errors", "tx_malformed", "tx_errors"] {
        assert_eq!(count(none), 0, "{counters:?}");
    }
    assert!(vm.faults().is_empty());
}
