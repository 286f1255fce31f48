//! Any actions of either side.

use super::*;

#[derive(Clone, Debug)]
enum Action {
    Packet {
        conn: u32,
        op: u16,
        len: u16,
        flags: u32,
        fwd_cnt: u32,
    },
    Credit(u32),
    HostWrite(usize, u16),
    HostRead(usize),
    HostClose(usize),
    HostHalf(usize),
    HostConnect,
    Accept,
    Respond,
    PostRx(u8),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0u32..4, 0u16..9, 0u16..6000, 0u32..4, prop_oneof![Just(0u32), any::<u32>(), 0u32..9000])
            .prop_map(|(conn, op, len, flags, fwd_cnt)| Action::Packet { conn, op, len, flags, fwd_cnt }),
        2 => (0u32..4).prop_map(Action::Credit),
        3 => (any::<usize>(), 0u16..20_000).prop_map(|(i, n)| Action::HostWrite(i, n)),
        2 => any::<usize>().prop_map(Action::HostRead),
        1 => any::<usize>().prop_map(Action::HostClose),
        1 => any::<usize>().prop_map(Action::HostHalf),
        1 => Just(Action::HostConnect),
        2 => Just(Action::Accept),
        2 => Just(Action::Respond),
        3 => (0u8..16).prop_map(Action::PostRx),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// For any actions of the guest and host programs: no panic, no busy loop, never more in flight
    /// than the guest buffers, never more forwarded than was received.
    #[test]
    fn any_sequence_of_events_keeps_the_invariants(actions in proptest::collection::vec(action(), 1..60)) {
        let mut rig = Rig::ready();
        let listener = rig.listen(1);
        listener.set_nonblocking(true).unwrap();
        let mut hosts: Vec<UnixStream> = Vec::new();
        // Per connection: bytes we received, as the device counts them, and bytes we sent.
        let mut received = std::collections::HashMap::<(u32, u32), u32>::new();
        let mut sent = std::collections::HashMap::<(u32, u32), u32>::new();
        let mut requested = Vec::new();
        for action in actions {
            match action {
                Action::Packet { conn, op, len, flags, fwd_cnt } => {
                    let ports = Ports { guest: conn, host: 1 };
                    let key = (ports.guest, ports.host);
                    if op == Op::Request as u16 {
                        sent.insert(key, 0);
                        received.insert(key, 0);
                    }
                    let len = if op == Op::Data as u16 { len } else { 0 };
                    *sent.entry(key).or_default() += u32::from(len);
                    let header = Header {
                        op,
                        len: u32::from(len),
                        flags,
                        fwd_cnt,
                        ..rig.packet(ports, Op::Data)
                    };
                    rig.send_raw(&header, &vec![3; usize::from(len)]);
                }
                Action::Credit(conn) => {
                    let ports = Ports { guest: conn, host: 1 };
                    let got = *received.get(&(conn, 1)).unwrap_or(&0);
                    rig.credit(ports, GUEST_BUF_ALLOC, got);
                }
                Action::Accept => {
                    while let Ok((host, _)) = listener.accept() {
                        host.set_nonblocking(true).unwrap();
                        hosts.push(host);
                    }
                }
                Action::HostWrite(i, n) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].write(&vec![5; usize::from(n)]);
                }
                Action::HostRead(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].read(&mut vec![0; 100_000]);
                }
                Action::HostClose(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    hosts.swap_remove(i);
                }
                Action::HostHalf(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].shutdown(Shutdown::Write);
                }
                Action::HostConnect => {
                    let mut host = UnixStream::connect(rig.path()).unwrap();
                    host.write_all(b"CONNECT 2\n").unwrap();
                    host.set_nonblocking(true).unwrap();
                    hosts.push(host);
                }
                Action::Respond => {
                    if let Some(ports) = requested.pop() {
                        rig.send(ports, Op::Response);
                    }
                }
                Action::PostRx(n) => {
                    let free = usize::from(QUEUE) - rig.posted.len();
                    rig.post_rx(free.min(usize::from(n)));
                }
                _ => {}
            }
            rig.run();
            prop_assert!(!rig.backend_readable());
            while rig.tx.take_used().is_some() {}
            while let Some((header, payload)) = rig.take() {
                let key = (header.dst_port, header.src_port);
                let op = Op::from_raw(header.op).unwrap();
                match op {
                    Op::Request => {
                        requested.push(Ports { guest: key.0, host: key.1 });
                        received.insert(key, 0);
                        sent.insert(key, 0);
                    }
                    Op::Data => {
                        prop_assert!(!payload.is_empty());
                        let got = received.entry(key).or_default();
                        *got += payload.len() as u32;
                    }
                    _ => prop_assert!(payload.is_empty()),
                }
                if op != Op::Reset {
                    let total = *sent.get(&key).unwrap_or(&0);
                    prop_assert!(header.fwd_cnt <= total, "{} of {}", header.fwd_cnt, total);
                }
            }
        }
        let (connections, handshakes, lingering, resets) = rig.device.statistics();
        prop_assert!(connections + lingering <= MAX_CONNECTIONS);
        prop_assert!(handshakes <= MAX_HANDSHAKES && resets <= MAX_RESETS + MAX_CONNECTIONS);
    }
}
