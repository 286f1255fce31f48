//! A Linux guest's card and vsock device under the traffic of `traffic.c`: streams both ways,
//! connections by the thousand, datagrams, with offloads on and off.

mod support;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};

use podvisor_vmm::{MacAddress, MemorySize, NetDevice, Transport, Vm, VmExit, VsockDevice};
use support::tap::tap_queues;
use support::{Console, PATIENCE, busybox_with, linux_with, program, raise_limit_of_files};

/// The ports where the host echoes, where the guest waits for it, and where it is called
/// (`traffic.c`).
const ECHO: u16 = 7000;
const BARRIER: u16 = 7001;
const CALLS: u32 = 7002;
/// vsock connections from each side, and bytes over each.
const EACH_WAY: usize = 500;
const MESSAGE: usize = 512;

#[test]
fn guest_long_has_a_thousand_connections_with_offloads_on_mmio_and_without_on_pci() {
    raise_limit_of_files();
    let traffic = program("traffic.c");
    has_a_thousand_connections(Transport::Mmio, 1, Offloads::On, &traffic);
    has_a_thousand_connections(Transport::Pci, 2, Offloads::Off, &traffic);
}

/// Whether the guest disables them, before most of its traffic.
#[derive(Clone, Copy, PartialEq)]
enum Offloads {
    On,
    Off,
}

fn has_a_thousand_connections(transport: Transport, pairs: u8, offloads: Offloads, traffic: &[u8]) {
    let taps = tap_queues(pairs.into());
    echo();
    let barrier = TcpListener::bind((Ipv4Addr::UNSPECIFIED, BARRIER)).unwrap();
    let (sender, from_guest) = channel();
    let mut vsock = VsockDevice::in_process(3).unwrap();
    vsock.listen(ECHO.into(), move |stream| drop(sender.send(stream)));
    let card = NetDevice::tap_queues(taps.into_iter().map(Into::into).collect()).unwrap();

    let words = match offloads {
        Offloads::On => "datagrams shorts barrier vsock",
        Offloads::Off => "offloads-off barrier stream datagrams shorts barrier vsock",
    };
    let script = format!(
        "ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up; traffic stream barrier {words}"
    );
    let console = Console::default();
    let vm = linux_with(busybox_with(&script, &[("traffic", traffic)]), &console)
        .transport(transport)
        .vcpus(pairs)
        .memory(MemorySize::mib(256))
        .net(card.mac(MacAddress([2, 0, 0, 0, 0, 9])))
        .vsock(vsock)
        .build()
        .unwrap();
    vm.start().unwrap();

    let segmented = || ["rx_segmented", "tx_segmented"].map(|name| counter(&vm, "net0", name));
    let waiting = arrival(&barrier, &console);
    let [received, sent] = segmented();
    assert!(received > 0 && sent > 0, "{:?}", vm.counters());
    drop(waiting);
    if offloads == Offloads::Off {
        let waiting = arrival(&barrier, &console);
        let before = segmented();
        drop(waiting);
        let waiting = arrival(&barrier, &console);
        assert_eq!(segmented(), before, "offloads are off");
        drop(waiting);
    } else {
        drop(arrival(&barrier, &console));
    }

    console.wait_for("vsock listens");
    talks_over_vsock(&vm, &from_guest, &console);
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    assert!(
        text.contains("\nvsock ok\n") && !text.contains("bad "),
        "{text}"
    );
    for none in [
        "rx_dropped",
        "rx_errors",
        "tx_dropped",
        "tx_malformed",
        "tx_errors",
    ] {
        assert_eq!(counter(&vm, "net0", none), 0, "{none}");
    }
    for from in ["connections_from_host", "connections_from_guest"] {
        assert_eq!(counter(&vm, "vsock0", from), EACH_WAY as u64, "{from}");
    }
    assert!(vm.faults().is_empty());
}

/// Echoes what is received, over TCP and UDP.
fn echo() {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ECHO)).unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            std::thread::spawn(move || -> std::io::Result<()> {
                std::io::copy(&mut &connection, &mut &connection)?;
                connection.shutdown(Shutdown::Write)
            });
        }
    });
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ECHO)).unwrap();
    std::thread::spawn(move || {
        let mut bytes = [0; 1 << 16];
        while let Ok((len, from)) = datagrams.recv_from(&mut bytes) {
            datagrams.send_to(&bytes[..len], from).unwrap();
        }
    });
}

/// The guest waits at the barrier until the returned stream is dropped.
fn arrival(barrier: &TcpListener, console: &Console) -> TcpStream {
    use rustix::event::{PollFd, PollFlags, poll};
    let patience = PATIENCE.try_into().unwrap();
    let arrived = poll(&mut [PollFd::new(barrier, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(arrived, 1, "{}", console.text());
    barrier.accept().unwrap().0
}

/// Sends a message over each of all connections, which are all open at the same time, and back in
/// another order.
fn talks_over_vsock(vm: &Vm, from_guest: &Receiver<UnixStream>, console: &Console) {
    let calls = (0..EACH_WAY).map(|_| vm.vsock().unwrap().connect(CALLS).unwrap());
    let mut streams: Vec<UnixStream> = calls.collect();
    streams.extend((0..EACH_WAY).map(|n| {
        let stream = from_guest.recv_timeout(PATIENCE);
        stream.unwrap_or_else(|_| panic!("connection {n}: {}", console.text()))
    }));
    let mut messages: Vec<[u8; MESSAGE]> = vec![[0; MESSAGE]; streams.len()];
    for (n, stream) in streams.iter_mut().enumerate() {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let read = stream.read_exact(&mut messages[n]);
        read.unwrap_or_else(|error| panic!("stream {n}: {error}: {}", console.text()));
    }
    for (stream, message) in streams.iter_mut().zip(&messages).rev() {
        stream.write_all(message).unwrap();
    }
    for mut stream in streams {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the guest ends first");
    }
}

fn counter(vm: &Vm, device: &str, name: &str) -> u64 {
    let all = vm.counters();
    let of = all.iter().find(|counters| counters.device == device);
    of.unwrap()
        .counters
        .iter()
        .find(|counter| counter.name == name)
        .unwrap()
        .value
}
