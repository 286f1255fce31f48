//! Streams and how they end.

use super::*;

#[test]
fn a_guest_program_reaches_a_host_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1024);
    rig.data(ports, b"podvisor-agent 1\n");
    assert_eq!(read(&mut host, 17), b"podvisor-agent 1\n");
    host.write_all(b"welcome").unwrap();
    rig.run();
    let (header, payload) = rig.expect(Op::Data);
    assert_eq!(payload, b"welcome");
    assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
    assert_eq!((header.src_port, header.dst_port), (1024, ports.guest));
    assert_eq!(header.fwd_cnt, 17);
    assert_eq!(rig.counter("connections_from_guest"), 1);
}

#[test]
fn a_host_program_reaches_a_guest_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_host(1025);
    assert_eq!(ports.guest, 1025);
    host.write_all(b"question").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"question");
    rig.data(ports, b"answer");
    assert_eq!(read(&mut host, 6), b"answer");
    assert_eq!(rig.counter("connections_from_host"), 1);
}

#[test]
fn data_may_follow_the_connect_line_at_once() {
    let mut rig = Rig::ready();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    host.write_all(b"CONNECT 7\nearly").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    rig.expect_nothing();
    let ports = Ports {
        guest: 7,
        host: request.src_port,
    };
    rig.send(ports, Op::Response);
    assert_eq!(rig.expect(Op::Data).1, b"early");
}

#[test]
fn a_port_that_nobody_listens_on_is_refused_both_ways() {
    let mut rig = Rig::ready();
    let ports = Ports { guest: 5, host: 99 };
    rig.send(ports, Op::Request);
    let (reset, _) = rig.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (99, 5));

    let mut host = UnixStream::connect(rig.path()).unwrap();
    limit(&host);
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    let ports = Ports {
        guest: 1,
        host: request.src_port,
    };
    rig.send(ports, Op::Reset);
    assert!(is_closed(&mut host));
    rig.expect_nothing();
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
}

#[test]
fn a_host_program_may_come_before_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let device = VsockDevice::unix_mux(CID, dir.path().join("vsock")).unwrap();
    let mut host = UnixStream::connect(dir.path().join("vsock")).unwrap();
    host.write_all(b"CONNECT 1\n").unwrap();
    let mut rig = Rig::over(device, dir);
    rig.run();
    rig.post_rx(4);
    rig.run();
    rig.expect(Op::Request);
}

#[test]
fn large_data_survives_both_directions() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_host(1);
    let data = pattern(3 << 20);
    let mut writer = host.try_clone().unwrap();
    let to_send = data.clone();
    let sending = std::thread::spawn(move || {
        writer.write_all(&to_send).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut reader = host;
    let reading = std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    // The guest echoes, within both sides' credit.
    let mut echo = VecDeque::new();
    let (mut received, mut sent, mut consumed) = (Vec::new(), 0u32, 0u32);
    let mut room = (0u32, 0u32);
    let mut ended = false;
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !(ended && echo.is_empty()) {
        assert!(
            std::time::Instant::now() < deadline,
            "{} bytes",
            received.len()
        );
        for (header, payload) in rig.drain() {
            room = (header.buf_alloc, header.fwd_cnt);
            match Op::from_raw(header.op).unwrap() {
                Op::Data => {
                    echo.extend(&payload);
                    received.extend(payload);
                    assert!(received.len() as u32 - consumed <= GUEST_BUF_ALLOC);
                }
                Op::Shutdown => ended = true,
                Op::CreditUpdate | Op::CreditRequest => {}
                other => panic!("{other:?}"),
            }
        }
        consumed = received.len() as u32;
        rig.credit(ports, GUEST_BUF_ALLOC, consumed);
        let free = room.0 - (sent - room.1);
        let n = (free as usize).min(echo.len()).min(64 << 10);
        if n > 0 {
            let piece: Vec<u8> = echo.drain(..n).collect();
            sent += n as u32;
            let header = Header {
                len: n as u32,
                fwd_cnt: consumed,
                ..rig.packet(ports, Op::Data)
            };
            rig.send_raw(&header, &piece);
        }
    }
    let header = Header {
        flags: SHUTDOWN_BOTH,
        fwd_cnt: consumed,
        ..rig.packet(ports, Op::Shutdown)
    };
    rig.send_raw(&header, &[]);
    while rig.device.statistics().2 > 0 {
        rig.run();
    }
    sending.join().unwrap();
    assert_eq!(reading.join().unwrap(), data);
    assert_eq!(received, data);
    assert_eq!(rig.counter("rx_bytes"), data.len() as u64);
    assert_eq!(rig.counter("tx_bytes"), data.len() as u64);
}

#[test]
fn the_end_of_the_hosts_sending_is_a_half_close() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    host.write_all(b"last").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"last");
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    rig.data(ports, b"still");
    assert_eq!(read(&mut host, 5), b"still");
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
    rig.send(ports, Op::Reset);
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
    rig.expect_nothing();
}

#[test]
fn a_host_program_that_closes_ends_both_directions_after_its_data() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    host.write_all(b"last").unwrap();
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"last");
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
}

#[test]
fn the_end_of_the_guests_sending_is_a_half_close() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.data(ports, b"last");
    rig.shutdown(ports, SHUTDOWN_SEND);
    assert_eq!(read(&mut host, 4), b"last");
    assert!(is_closed(&mut host));
    host.write_all(b"still").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"still");
    rig.data(ports, b"x");
    rig.expect(Op::Reset);
    assert_eq!(rig.counter("protocol_errors"), 1);
}

#[test]
fn the_end_of_the_guests_sending_follows_what_a_slow_host_program_has_not_read() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let data = pattern(400 << 10);
    for piece in data.chunks(64 << 10) {
        rig.data(ports, piece);
    }
    rig.shutdown(ports, SHUTDOWN_SEND);
    host.set_nonblocking(true).unwrap();
    let mut all = Vec::new();
    let mut piece = vec![0; 32 << 10];
    loop {
        let len = host.read(&mut piece).unwrap();
        if len == 0 {
            break;
        }
        all.extend_from_slice(&piece[..len]);
        rig.run();
    }
    assert!(all == data, "{} bytes", all.len());
    assert_eq!(rig.device.statistics().0, 1, "the host may still send");
}

#[test]
fn a_guest_that_receives_no_more_breaks_the_hosts_pipe() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    assert_eq!(
        host.write_all(b"x").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    rig.data(ports, b"still");
    assert_eq!(read(&mut host, 5), b"still");
}

#[test]
fn a_host_program_that_closes_for_a_guest_that_receives_no_more_ends_both_directions() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_guest(1);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();

    // With data that the guest has no credit for, and then does not want.
    let (ports, mut host) = rig.open_from_guest(2);
    rig.credit(ports, 0, 0);
    host.write_all(b"unread").unwrap();
    drop(host);
    rig.run();
    rig.expect(Op::CreditRequest);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
}

#[test]
fn a_guest_that_closes_is_answered_by_a_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.data(ports, b"bye");
    rig.shutdown(ports, SHUTDOWN_BOTH);
    let (reset, _) = rig.expect(Op::Reset);
    // §5.10.6.3: every packet of a stream carries the buffer size and the consumed bytes.
    assert_eq!((reset.buf_alloc, reset.fwd_cnt), (512 << 10, 3));
    assert_eq!(read(&mut host, 3), b"bye");
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
}

#[test]
fn both_halves_in_turn_are_a_close() {
    let mut rig = Rig::ready();
    let (ports, _host) = rig.open_from_guest(1);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    rig.expect_nothing();
    rig.shutdown(ports, SHUTDOWN_SEND);
    rig.expect(Op::Reset);
}

#[test]
fn what_a_process_wrote_before_it_closed_reaches_a_guest_that_answers_late() {
    let mut rig = Rig::ready();
    let mut stream = rig.device.connect(1).unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    stream.write_all(b"all of it").unwrap();
    drop(stream);
    rig.run();
    rig.expect_nothing();

    let ports = Ports {
        guest: request.dst_port,
        host: request.src_port,
    };
    rig.send(ports, Op::Response);
    assert_eq!(rig.expect(Op::Data).1, b"all of it");
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
}

#[test]
fn what_a_guest_sent_before_it_closed_reaches_a_slow_host_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let data = pattern(400 << 10);
    for piece in data.chunks(64 << 10) {
        rig.data(ports, piece);
    }
    rig.shutdown(ports, SHUTDOWN_BOTH);
    assert_eq!(rig.device.statistics().0, 0);
    assert_eq!(rig.device.statistics().2, 1, "bytes are waiting");
    let mut all = Vec::new();
    while all.len() < data.len() {
        let mut piece = vec![0; 32 << 10];
        let n = host.read(&mut piece).unwrap();
        all.extend_from_slice(&piece[..n]);
        rig.run();
    }
    assert_eq!(all, data);
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.statistics().2, 0);
}

#[test]
fn data_for_a_host_program_that_is_gone_is_dropped_and_the_guest_hears_of_it() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_guest(1);
    drop(host);
    rig.data(ports, b"x");
    let flags: Vec<_> = rig.drain().iter().map(|(h, _)| (h.op, h.flags)).collect();
    assert_eq!(flags.last(), Some(&(Op::Shutdown as u16, SHUTDOWN_BOTH)));
    for _ in 0..20 {
        rig.data(ports, &[0; 60 << 10]);
    }
    assert!(
        rig.drain().iter().all(|(h, _)| h.op != Op::Reset as u16),
        "dropped data gives its credit back"
    );
}
