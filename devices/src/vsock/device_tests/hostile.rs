//! Hostile guests and hostile host programs.

use super::*;

#[test]
fn a_packet_shorter_than_its_header_or_its_length_is_a_fault() {
    let mut rig = Rig::ready();
    rig.tx.add(&[(TX_BASE, 43)], &[]);
    assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));

    for (len, payload) in [(1, 0), (101, 100), (u32::MAX, 100), (u32::MAX - 43, 100)] {
        let mut rig = Rig::ready();
        let (ports, _host) = rig.open_from_guest(1);
        let header = Header {
            len,
            ..rig.packet(ports, Op::Data)
        };
        rig.mem
            .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
            .unwrap();
        rig.tx.add(&[(TX_BASE, 44 + payload)], &[]);
        assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));
    }
}

#[test]
fn a_buffer_longer_than_the_packet_says_is_used_as_far_as_it_says() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let header = Header {
        len: 3,
        ..rig.packet(ports, Op::Data)
    };
    rig.send_raw(&header, b"abcdef");
    rig.data(ports, b"XYZ");
    assert_eq!(read(&mut host, 6), b"abcXYZ");
}

#[test]
fn packets_that_belong_to_nothing_are_reset_and_resets_are_not() {
    let mut rig = Rig::ready();
    let ports = Ports { guest: 1, host: 2 };
    for op in [
        Op::Response,
        Op::Shutdown,
        Op::Data,
        Op::CreditUpdate,
        Op::CreditRequest,
    ] {
        rig.send(ports, op);
        rig.expect(Op::Reset);
    }
    rig.send(ports, Op::Reset);
    rig.expect_nothing();
    let unknown = Header {
        op: 77,
        ..rig.packet(ports, Op::Data)
    };
    rig.send_raw(&unknown, &[]);
    rig.expect(Op::Reset);
}

#[test]
fn packets_of_other_types_and_to_other_hosts_are_reset_and_forged_ones_dropped() {
    let mut rig = Rig::ready();
    let good = rig.packet(Ports { guest: 1, host: 2 }, Op::Request);
    rig.send_raw(&Header { kind: 2, ..good }, &[]);
    assert_eq!(rig.expect(Op::Reset).0.kind, 2);
    rig.send_raw(&Header { dst_cid: 7, ..good }, &[]);
    assert_eq!(rig.expect(Op::Reset).0.src_cid, 7);
    rig.send_raw(&Header { src_cid: 9, ..good }, &[]);
    rig.expect_nothing();
    assert_eq!(rig.counter("invalid_packets"), 3);
}

#[test]
fn a_second_request_for_the_same_ports_is_a_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.send(ports, Op::Request);
    rig.expect(Op::Reset);
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
}

#[test]
fn a_guest_that_answers_before_it_was_asked_is_not_heeded() {
    let mut rig = Rig::new();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    limit(&host);
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let ports = Ports {
        guest: 1,
        host: 1 << 30,
    };
    rig.send(ports, Op::Response);
    assert!(is_closed(&mut host));
}

#[test]
fn connections_that_come_and_go_while_there_are_no_buffers_leave_nothing() {
    let mut rig = Rig::new();
    let _listener = rig.listen(2);
    let ports = Ports { guest: 1, host: 2 };
    for _ in 0..10 {
        for op in [Op::Request, Op::Reset] {
            rig.send(ports, op);
            rig.tx.take_used().unwrap();
        }
    }
    assert_eq!(rig.device.waiting_for_buffers(), 0);
    rig.post_rx(1);
    rig.expect_nothing();
}

#[test]
fn a_flood_of_resets_stalls_the_flood_and_loses_none() {
    let mut rig = Rig::new();
    let ports = Ports { guest: 1, host: 2 };
    let mut sent = 0;
    let header = rig.packet(ports, Op::Data);
    rig.mem
        .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
        .unwrap();
    let mut pending = 0;
    for _ in 0..MAX_RESETS + 40 {
        if pending == usize::from(QUEUE) {
            break;
        }
        rig.tx.add(&[(TX_BASE, 44)], &[]);
        sent += 1;
        pending += 1;
        rig.run();
        while rig.tx.take_used().is_some() {
            pending -= 1;
        }
    }
    assert_eq!(rig.device.statistics().3, MAX_RESETS);
    assert!(pending > 0, "packets wait in the queue");
    rig.post_rx(usize::from(QUEUE));
    let resets = rig.drain().len();
    assert_eq!(resets, sent);
    assert_eq!(rig.device.statistics().3, 0);
}

#[test]
fn connections_are_bounded_and_room_comes_back() {
    let mut rig = Rig::ready();
    let max = rig.device.connection_limit();
    let listener = rig.listen(1);
    listener.set_nonblocking(true).unwrap();
    let mut hosts = Vec::new();
    let mut first_reset = None;
    for n in 0..max as u32 + 5 {
        rig.send(Ports { guest: n, host: 1 }, Op::Request);
        if let Ok((host, _)) = listener.accept() {
            hosts.push(host);
        }
        for (header, _) in rig.drain() {
            if header.op == Op::Reset as u16 {
                first_reset.get_or_insert(n);
            }
        }
    }
    assert_eq!(first_reset, Some(max as u32));
    assert_eq!(rig.device.statistics().0, max);
    // A host program waits, without a busy loop, until a connection ends.
    let mut late = UnixStream::connect(rig.path()).unwrap();
    late.write_all(b"CONNECT 5\n").unwrap();
    rig.run();
    rig.expect_nothing();
    assert!(!rig.backend_readable());
    rig.shutdown(Ports { guest: 0, host: 1 }, SHUTDOWN_BOTH);
    let ops: Vec<_> = rig.drain().iter().map(|(h, _)| h.op).collect();
    assert_eq!(ops, [Op::Reset as u16, Op::Request as u16]);
}

#[test]
fn connections_that_the_host_left_make_room_for_new_ones() {
    let mut rig = Rig::ready();
    let listener = rig.listen(1);
    let max = rig.device.connection_limit();
    for n in 0..max as u32 + 1 {
        rig.send(Ports { guest: n, host: 1 }, Op::Request);
        drop(listener.accept().unwrap());
        rig.drain();
    }
    assert_eq!(rig.device.statistics().0, max);
    assert_eq!(rig.counter("connections_refused"), 0);
}

#[test]
fn handshakes_are_bounded() {
    let mut rig = Rig::ready();
    let mut silent = Vec::new();
    let most = Shares::now().handshakes;
    for _ in 0..most + 10 {
        silent.push(UnixStream::connect(rig.path()).unwrap());
        rig.run();
    }
    assert_eq!(rig.device.statistics().1, most);
    assert_eq!(rig.counter("handshakes_dropped"), 10);
    limit(&silent[0]);
    assert!(is_closed(&mut silent[0]));
    rig.open_from_host(3);
}

#[test]
fn connections_and_handshakes_are_bounded_by_what_was_set() {
    let dir = tempfile::tempdir().unwrap();
    let device = VsockDevice::unix_mux(CID, dir.path().join("vsock")).unwrap();
    let mut rig = Rig::over(device.max_connections(2), dir);
    rig.post_rx(8);
    let silent = [(); 3].map(|()| {
        let stream = UnixStream::connect(rig.path()).unwrap();
        rig.run();
        stream
    });
    assert_eq!(rig.device.statistics().1, 2);
    assert_eq!(rig.counter("handshakes_dropped"), 1);
    drop(silent);
    rig.run();
    let listener = rig.listen(1);
    listener.set_nonblocking(true).unwrap();
    for guest in 0..3 {
        rig.send(Ports { guest, host: 1 }, Op::Request);
    }
    let ops: Vec<_> = rig.drain().iter().map(|(h, _)| h.op).collect();
    assert_eq!(
        ops,
        [Op::Response, Op::Response, Op::Reset].map(|op| op as u16)
    );
    assert_eq!(rig.device.statistics().0, 2);
    assert_eq!(rig.device.connect(5).unwrap_err().raw_os_error(), Some(24));
    let device = VsockDevice::in_process(CID)
        .unwrap()
        .max_connections(1 << 20);
    assert_eq!(device.connection_limit(), MAX_CONNECTIONS);
}

#[test]
fn a_host_program_that_closes_or_babbles_before_its_line_is_dropped() {
    let mut rig = Rig::ready();
    drop(UnixStream::connect(rig.path()).unwrap());
    let mut partial = UnixStream::connect(rig.path()).unwrap();
    partial.write_all(b"CONN").unwrap();
    rig.run();
    assert_eq!(rig.device.statistics().1, 1);
    partial.shutdown(Shutdown::Write).unwrap();
    rig.run();
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
    let mut babble = UnixStream::connect(rig.path()).unwrap();
    babble.write_all(&[b'A'; 4096]).unwrap();
    rig.run();
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
    rig.expect_nothing();
    assert_eq!(rig.counter("handshakes_dropped"), 3);
}

#[test]
fn a_host_program_that_gives_up_waiting_for_the_guest_is_forgotten() {
    let mut rig = Rig::ready();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    drop(host);
    rig.run();
    rig.expect(Op::Reset);
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
    let ports = Ports {
        guest: 1,
        host: request.src_port,
    };
    rig.send(ports, Op::Response);
    rig.expect(Op::Reset);
}

#[test]
fn what_processes_left_for_a_guest_that_does_not_answer_takes_no_room_from_others() {
    let mut rig = Rig::ready();
    let max = rig.device.connection_limit();
    for _ in 0..=max {
        let mut stream = rig.device.connect(1).unwrap();
        stream.write_all(b"left").unwrap();
        drop(stream);
        rig.run();
        rig.drain();
    }
    assert_eq!(rig.device.statistics().0, max);
}

#[test]
fn many_streams_take_turns() {
    let mut rig = Rig::ready();
    let mut streams: Vec<_> = (1..=8).map(|port| rig.open_from_guest(port)).collect();
    for (_, host) in &mut streams {
        host.write_all(&pattern(60_000)).unwrap();
    }
    let mut got = std::collections::HashMap::<u32, Vec<u8>>::new();
    for (header, payload) in rig.drain() {
        got.entry(header.src_port).or_default().extend(payload);
    }
    assert_eq!(got.len(), 8);
    assert!(got.values().all(|data| *data == pattern(60_000)));
}

#[test]
fn a_flood_of_packets_leaves_the_event_loop_its_turn() {
    let mut rig = Rig::new();
    stop(&mut rig.device);
    let mut tx = DriverQueue::new(&rig.mem, 0x40000, 1024);
    start(&mut rig.device, &[&rig.rx, &tx, &rig.event], &rig.irq, 1);
    let packet = rig.packet(Ports { guest: 1, host: 2 }, Op::Reset);
    rig.mem
        .write_slice(&packet.to_bytes(), GuestAddress(TX_BASE))
        .unwrap();
    for _ in 0..1000 {
        tx.add(&[(TX_BASE, HEADER_LEN as u32)], &[]);
    }
    assert_eq!(rig.device.on_queue(TX).unwrap(), Progress::More);
    let taken = std::iter::from_fn(|| tx.take_used()).count();
    assert!((1..1000).contains(&taken), "{taken}");
    while rig.device.on_queue(TX).unwrap() == Progress::More {}
    assert_eq!(taken + std::iter::from_fn(|| tx.take_used()).count(), 1000);
}

/// Writes a table of `count` descriptors, of which all but the first are empty, to `at`.
fn mostly_empty(mem: &GuestRam, at: u64, buffer: (u64, u32), flags: u16, count: u16) {
    for n in 0..count {
        let (addr, len) = if n == 0 { buffer } else { (0, 0) };
        let next = if n + 1 == count { 0 } else { F_NEXT };
        let words = [addr, u64::from(len) | u64::from(flags | next) << 32];
        let words = [words[0], words[1] | u64::from(n + 1) << 48];
        let place = GuestAddress(at + 16 * u64::from(n));
        mem.write_obj(words, place).unwrap();
    }
}

#[test]
fn empty_descriptors_of_packets_leave_the_event_loop_its_turn() {
    const TABLE: u64 = 0x40_0000;
    let mut rig = Rig::new();
    stop(&mut rig.device);
    let mut tx = DriverQueue::new(&rig.mem, 0x40000, 256);
    start(&mut rig.device, &[&rig.rx, &tx, &rig.event], &rig.irq, 1);
    let packet = rig.packet(Ports { guest: 1, host: 2 }, Op::Reset);
    rig.mem
        .write_slice(&packet.to_bytes(), GuestAddress(TX_BASE))
        .unwrap();
    mostly_empty(&rig.mem, TABLE, (TX_BASE, HEADER_LEN as u32), 0, 1024);
    for head in 0..256 {
        tx.descriptor(head, TABLE, 16 * 1024, F_INDIRECT, 0);
        tx.make_available(head);
    }
    let mut heads = Vec::new();
    for turn in 1.. {
        let progress = rig.device.on_queue(TX).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| tx.take_used()).collect();
        assert!(taken.len() <= 5, "turn {turn}: {} chains", taken.len());
        heads.extend(taken.iter().map(|used| used.id));
        if progress == Progress::Idle {
            break;
        }
    }
    assert_eq!(heads, (0..256).collect::<Vec<_>>());
    assert_eq!(rig.counter("tx_packets"), 256);
}

#[test]
fn empty_descriptors_of_receive_buffers_leave_the_event_loop_its_turn() {
    const TABLES: u64 = 0x40_0000;
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    let [_, tx, event] = stop(&mut rig.device).try_into().unwrap();
    rig.rx = DriverQueue::new(&rig.mem, 0x50000, QUEUE);
    let rx = rig.rx.device_queue(RX, rig.irq.clone());
    for queue in [rx, tx, event] {
        rig.device.start_queue(queue).unwrap();
    }
    // Each has room for a few bytes.
    let len = HEADER_LEN as u32 + 4;
    for head in 0..QUEUE {
        let at = TABLES + 0x4000 * u64::from(head);
        let buffer = (RX_BASE + 64 * u64::from(head), len);
        mostly_empty(&rig.mem, at, buffer, F_WRITE, 1024);
        rig.rx.descriptor(head, at, 16 * 1024, F_INDIRECT, 0);
        rig.rx.make_available(head);
    }
    let sent = pattern(4 * usize::from(QUEUE));
    host.write_all(&sent).unwrap();
    let mut got = Vec::new();
    let mut turns = 0;
    while rig.backend_readable() {
        let _ = rig.device.on_backend().unwrap();
        turns += 1;
        let taken: Vec<_> = std::iter::from_fn(|| rig.rx.take_used()).collect();
        assert!(taken.len() <= 5, "turn {turns}: {} chains", taken.len());
        for used in taken {
            let at = RX_BASE + 64 * u64::from(used.id) + HEADER_LEN as u64;
            let mut bytes = vec![0; used.len as usize - HEADER_LEN];
            rig.mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            got.extend(bytes);
        }
    }
    assert_eq!(got, sent);
    assert!(turns >= usize::from(QUEUE) / 5, "{turns}");
}
