//! Credit and buffers.

use super::*;

#[test]
fn nothing_is_sent_beyond_the_guests_credit() {
    let mut rig = Rig::ready();
    let listener = rig.listen(1);
    let ports = Ports { guest: 9, host: 1 };
    let request = Header {
        buf_alloc: 10,
        ..rig.packet(ports, Op::Request)
    };
    rig.send_raw(&request, &[]);
    let (mut host, _) = listener.accept().unwrap();
    rig.expect(Op::Response);
    host.write_all(b"0123456789abcdefghij").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"0123456789");
    rig.expect(Op::CreditRequest);
    rig.expect_nothing();
    assert!(!rig.backend_readable());
    // The guest has not read anything yet: it is not asked again.
    rig.credit(ports, 10, 0);
    rig.expect_nothing();
    assert!(!rig.backend_readable());
    // It has consumed 4, then the rest.
    rig.credit(ports, 10, 4);
    assert_eq!(rig.expect(Op::Data).1, b"abcd");
    rig.expect(Op::CreditRequest);
    rig.credit(ports, 10, 14);
    assert_eq!(rig.expect(Op::Data).1, b"efghij");
    rig.expect_nothing();
}

#[test]
fn a_guest_that_sends_beyond_its_credit_is_reset() {
    let mut rig = Rig::ready();
    let (ports, _host) = rig.open_from_guest(1);
    let mut reset = false;
    for _ in 0..20 {
        rig.data(ports, &[7; 64 << 10]);
        reset |= rig.drain().iter().any(|(h, _)| h.op == Op::Reset as u16);
        if reset {
            break;
        }
    }
    assert!(reset);
    assert_eq!(rig.counter("protocol_errors"), 1);
}

#[test]
fn a_slow_host_program_stops_the_guest_and_a_reading_one_frees_it() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.send(ports, Op::CreditRequest);
    let (header, _) = rig.expect(Op::CreditUpdate);
    let total = header.buf_alloc as usize;
    let mut room = (header.buf_alloc, header.fwd_cnt);
    let mut sent = 0u32;
    // Fill the socket and the buffer exactly.
    loop {
        for (header, _) in rig.drain() {
            assert_ne!(header.op, Op::Reset as u16);
            room = (header.buf_alloc, header.fwd_cnt);
        }
        let free = room.0 - (sent - room.1);
        if free == 0 {
            break;
        }
        let n = free.min(50_000);
        rig.data(ports, &vec![1; n as usize]);
        sent += n;
    }
    assert!(sent as usize >= total);
    assert_eq!(sent - room.1, room.0);
    let mut left = sent as usize;
    let mut updates = 0;
    while left > 0 {
        let n = host.read(&mut vec![0; 128 << 10]).unwrap();
        left -= n;
        for (header, _) in rig.drain() {
            assert_eq!(header.op, Op::CreditUpdate as u16);
            updates += 1;
            assert!(header.fwd_cnt > room.1 && header.fwd_cnt <= sent);
            room.1 = header.fwd_cnt;
        }
    }
    assert!((1..=8).contains(&updates), "{updates}");
    assert!(room.0 - (sent - room.1) >= room.0 / 2);
}

#[test]
fn a_guest_that_lies_about_what_it_consumed_is_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    host.write_all(b"abc").unwrap();
    rig.run();
    rig.expect(Op::Data);
    rig.credit(ports, GUEST_BUF_ALLOC, 4);
    rig.expect(Op::Reset);
    assert!(is_closed(&mut host));
}

#[test]
fn an_absurd_buffer_size_is_harmless() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.credit(ports, u32::MAX, 0);
    host.write_all(&pattern(100_000)).unwrap();
    let all: Vec<u8> = rig.drain().into_iter().flat_map(|(_, p)| p).collect();
    assert_eq!(all, pattern(100_000));
}

#[test]
fn nothing_spins_while_the_guest_has_no_receive_buffers() {
    let mut rig = Rig::new();
    let listener = rig.listen(1);
    rig.send(Ports { guest: 9, host: 1 }, Op::Request);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"hello").unwrap();
    rig.run();
    assert!(!rig.backend_readable(), "the event loop may sleep");
    host.write_all(b" world").unwrap();
    rig.run();
    assert!(!rig.backend_readable());
    rig.post_rx(2);
    rig.run();
    rig.expect(Op::Response);
    assert_eq!(rig.expect(Op::Data).1, b"hello world");
}

#[test]
fn one_read_fills_several_buffers_and_one_interrupt_tells_of_all() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    host.write_all(&pattern(100_000)).unwrap();
    let before = rig.irq.queue.load(SeqCst);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert_eq!(rig.irq.queue.load(SeqCst), before + 1);
    let packets = rig.drain();
    let all: Vec<u8> = packets.iter().flat_map(|(_, p)| p.clone()).collect();
    assert_eq!(all, pattern(100_000));
    assert_eq!(packets.len(), 100_000usize.div_ceil(4096));
}

#[test]
fn receive_buffers_in_pieces_are_filled_across() {
    let mut rig = Rig::new();
    let base = 0x40_0000u64;
    for n in 0..4u64 {
        let at = base + n * 0x1000;
        rig.rx.add(&[], &[(at, 10), (at + 100, 40), (at + 200, 7)]);
    }
    let listener = rig.listen(1);
    rig.send(Ports { guest: 9, host: 1 }, Op::Request);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"0123456789ABCDEF").unwrap();
    rig.run();
    assert_eq!(rig.rx.take_used().unwrap().len, 44);
    assert_eq!(rig.rx.take_used().unwrap().len, 57);
    assert_eq!(rig.rx.take_used().unwrap().len, 47);
    let mut got = [0; 13];
    rig.mem
        .read_slice(&mut got[..6], GuestAddress(base + 0x1000 + 134))
        .unwrap();
    rig.mem
        .read_slice(&mut got[6..], GuestAddress(base + 0x1000 + 200))
        .unwrap();
    assert_eq!(&got, b"0123456789ABC");
}

#[test]
fn a_stream_takes_more_buffers_each_time_and_leaves_others_their_turns() {
    let mut rig = Rig::ready();
    let mut streams = [1, 2].map(|port| rig.open_from_guest(port));
    for (_, host) in &mut streams {
        host.write_all(&pattern(15 * 4096)).unwrap();
    }
    rig.run();
    let packets = std::iter::from_fn(|| rig.take());
    let of: Vec<_> = packets.map(|(header, _)| header.src_port).collect();
    let turns = of.chunk_by(|one, next| one == next);
    let turns: Vec<_> = turns.map(<[u32]>::len).collect();
    assert_eq!(turns, [1, 1, 2, 2, 4, 4, 8, 8]);
}

/// Posts a receive buffer with one byte in each of this number of pieces, after the header.
fn post_in_pieces(rig: &mut Rig, head: u16, pieces: u16) {
    let table = 0x50_0000 + u64::from(head) * 0x1_0000;
    let chain = DriverQueue::new(&rig.mem, table, 1024);
    chain.descriptor(0, RX_BASE, HEADER_LEN as u32, F_WRITE | F_NEXT, 1);
    for at in 1..=pieces {
        let next = if at == pieces { 0 } else { F_NEXT };
        let addr = RX_BASE + 0x1000 + u64::from(at) * 2;
        chain.descriptor(at, addr, 1, F_WRITE | next, at + 1);
    }
    let len = 16 * (u32::from(pieces) + 1);
    rig.rx.descriptor(head, table, len, F_INDIRECT, 0);
    rig.rx.make_available(head);
}

#[test]
fn one_read_takes_as_many_pieces_of_memory_as_a_chain_may_have() {
    let most = u16::try_from(MAX_SEGMENTS).unwrap();
    // One system call fills 256 pieces: of the second buffer, or of both.
    for (second, filled) in [(most - 100, 156), (most - 99, 256)] {
        let mut rig = Rig::new();
        rig.post_rx(1);
        let listener = rig.listen(1);
        rig.send(Ports { guest: 9, host: 1 }, Op::Request);
        let (mut host, _) = listener.accept().unwrap();
        host.write_all(&[7; 2000]).unwrap();
        // A read that fills its buffer is followed by one into two.
        rig.rx.add(&[], &[(RX_BASE, HEADER_LEN as u32 + 1)]);
        post_in_pieces(&mut rig, 40, 100);
        post_in_pieces(&mut rig, 41, second);
        rig.run();
        let used = std::iter::from_fn(|| rig.rx.take_used());
        let lens: Vec<_> = used.map(|used| used.len - HEADER_LEN as u32).collect();
        assert_eq!(lens, [0, 1, 100, filled], "{second}");
    }
}

#[test]
fn data_that_use_up_the_credit_are_sent_whatever_buffer_follows() {
    let mut rig = Rig::new();
    rig.post_rx(1);
    let listener = rig.listen(1);
    let request = Header {
        buf_alloc: 11,
        ..rig.packet(Ports { guest: 9, host: 1 }, Op::Request)
    };
    rig.send_raw(&request, &[]);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(&[7; 20]).unwrap();
    // The last one is a fault once it is taken.
    for room in [1, 10, 0] {
        rig.rx.add(&[], &[(RX_BASE, HEADER_LEN as u32 + room)]);
    }
    assert!(matches!(rig.device.on_queue(RX), Err(Fault::Guest(_))));
    let used = std::iter::from_fn(|| rig.rx.take_used());
    let lens: Vec<_> = used.map(|used| used.len - HEADER_LEN as u32).collect();
    assert_eq!(lens, [0, 1, 10]);
}

#[test]
fn receive_buffers_without_room_are_a_fault() {
    for len in [1, 43, 44] {
        let mut rig = Rig::new();
        rig.rx.add(&[], &[(RX_BASE, len)]);
        let header = rig.packet(Ports { guest: 1, host: 1 }, Op::Data);
        rig.mem
            .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
            .unwrap();
        rig.tx.add(&[(TX_BASE, 44)], &[]);
        assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));
    }
}

#[test]
fn the_first_connections_have_large_buffers_and_others_small_ones_until_one_goes() {
    let mut rig = Rig::ready();
    let mut streams = Vec::new();
    let mut open = |rig: &mut Rig, count: u32| {
        let ports = 2000..2000 + count;
        streams.extend(ports.map(|port| rig.device.connect(port).unwrap()));
        let requests = rig.drain();
        assert_eq!(requests.len(), count as usize);
        requests
    };
    let sizes = |requests: &[(Header, Vec<u8>)]| {
        let sizes = requests.iter().map(|(header, _)| header.buf_alloc);
        sizes.collect::<Vec<_>>()
    };
    let (large, small) = (512 << 10, 32 << 10);
    let first = open(&mut rig, 32);
    assert_eq!(sizes(&first), [large; 32]);
    assert_eq!(sizes(&open(&mut rig, 3)), [small; 3]);
    for (header, _) in &first[..2] {
        let ports = Ports {
            guest: header.dst_port,
            host: header.src_port,
        };
        rig.send(ports, Op::Reset);
    }
    assert_eq!(sizes(&open(&mut rig, 4)), [large, large, small, small]);
}

#[test]
fn packets_of_a_connection_that_is_read_need_no_allocation() {
    const FROM_GUEST: usize = 8;
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let payload = pattern(3000);
    let mut received = 0;
    let mut round = |to_guest: usize| {
        host.write_all(&pattern(to_guest)).unwrap();
        let header = Header {
            len: payload.len() as u32,
            fwd_cnt: received,
            ..rig.packet(ports, Op::Data)
        };
        rig.send_many(FROM_GUEST, &header, &payload);
        let allocations = allocations(|| rig.run());
        assert_eq!(
            read(&mut host, FROM_GUEST * payload.len()),
            payload.repeat(FROM_GUEST)
        );
        let mut bytes = Vec::new();
        while let Some((_, data)) = rig.take() {
            bytes.extend(data);
            rig.post_rx(1);
        }
        assert!(bytes == pattern(to_guest));
        received += bytes.len() as u32;
        allocations
    };
    // More than the largest batch of receive buffers: the lists get their final size.
    round(200 << 10);
    round(200 << 10);
    for to_guest in [1, 4096, 50_000, 1, 150_000, 0, 10] {
        assert_eq!(round(to_guest), 0, "{to_guest}");
    }
}
