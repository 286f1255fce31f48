//! Ports that are given to programs of the host, and what the counters say.

use super::*;

/// Where ports for programs of the host begin, and the last one.
const FIRST: u32 = 1 << 30;
const LAST: u32 = u32::MAX - 1;

/// Connects to port 7 of the guest; returns the port of the host that it got.
fn port_of_next(rig: &mut Rig) -> (u32, UnixStream) {
    let stream = rig.device.connect(7).unwrap();
    rig.run();
    (rig.expect(Op::Request).0.src_port, stream)
}

#[test]
fn the_last_port_of_the_host_is_followed_by_the_first() {
    let mut rig = Rig::ready();
    assert!(rig.device.mux.continue_from_host_port(LAST - 1));
    let streams = [(); 3].map(|()| port_of_next(&mut rig));
    assert_eq!(streams.map(|(port, _)| port), [LAST - 1, LAST, FIRST]);
}

#[test]
fn a_port_of_the_host_that_is_in_use_with_the_same_peer_is_passed_over() {
    let mut rig = Rig::ready();
    let (first, _stream) = port_of_next(&mut rig);
    assert_eq!(first, FIRST);
    assert!(rig.device.mux.continue_from_host_port(FIRST));
    assert_eq!(port_of_next(&mut rig).0, FIRST + 1);
    // Ports are pairs: with another port of the guest it is free.
    assert!(rig.device.mux.continue_from_host_port(FIRST));
    let _other = rig.device.connect(8).unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Request).0.src_port, FIRST);
}

#[test]
fn a_stream_that_lives_and_ends_as_it_should_counts_no_error() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1024);
    rig.data(ports, b"hello");
    assert_eq!(read(&mut host, 5), b"hello");
    rig.credit(ports, GUEST_BUF_ALLOC, 0);
    rig.shutdown(ports, SHUTDOWN_BOTH);
    rig.drain();
    rig.send(ports, Op::Reset);
    let (ports, _host) = rig.open_from_host(1025);
    rig.send(ports, Op::Reset);
    let counted = |name| rig.counter(name);
    assert_eq!(counted("protocol_errors"), 0);
    assert_eq!(counted("invalid_packets"), 0);
    assert_eq!(counted("connections_refused"), 0);
    assert_eq!(counted("handshakes_dropped"), 0);
    assert_eq!(counted("connections_from_guest"), 1);
    assert_eq!(counted("connections_from_host"), 1);
}
