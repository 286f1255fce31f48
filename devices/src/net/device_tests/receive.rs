//! Frames to the driver, and their buffers.

use super::*;

#[test]
fn a_frame_is_spread_over_mergeable_buffers_and_they_come_back_together() {
    let mut rig = rig(feature::MRG_RXBUF);
    rig.buffers(64, 1536);
    let header = [2, 0, 1, 0, 2, 0, 3, 0, 4, 0, 99, 99];
    rig.wire.send_with(header, &frame(4000, 5));
    rig.work();
    let (got, bytes) = rig.received(1536).unwrap();
    assert_eq!(bytes, frame(4000, 5));
    // Without GUEST_CSUM the driver is not told that checksums are right.
    assert_eq!(got, [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 3, 0]);
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
    // The buffer after those is untouched.
    assert_eq!(rig.bytes(BUF + 3 * 1536, 1536), [0; 1536]);
}

#[test]
fn the_longest_frame_arrives_in_buffers_of_any_size() {
    for (count, len) in [(1, 65_605u32), (2, 40_000), (50, 1536), (250, 300)] {
        let mut rig = rig(feature::MRG_RXBUF);
        rig.buffers(count, len);
        rig.wire.send(&frame(MAX_FRAME, 8));
        rig.work();
        let (_, bytes) = rig.received(len).unwrap();
        assert!(bytes == frame(MAX_FRAME, 8), "{count} of {len}");
    }
}

#[test]
fn frames_of_any_lengths_arrive_whole_one_after_the_other() {
    // A buffer has room for 1524 bytes after the header.
    let lens = [
        60, 60, 60, 60, 60, 4000, 60, 1524, 1525, 60, 60, 60, 60, 1524, 1525,
    ];
    let ends = [60, 60, 60, 60, MAX_FRAME, 60, 1000, 1524, 60, 60, 9000];
    for at_once in [1, 2, 64] {
        let mut rig = rig(feature::MRG_RXBUF);
        let lens = lens.iter().chain(&ends).copied();
        let frames: Vec<Vec<u8>> = lens.zip(1..).map(|(len, seed)| frame(len, seed)).collect();
        for frame in &frames {
            rig.wire.send(frame);
        }
        rig.work();
        let mut given = 0;
        let mut got = Vec::new();
        while given < 128 {
            rig.buffers(at_once, 1536);
            given += at_once;
            rig.work();
            while let Some((_, bytes)) = rig.received(1536) {
                got.push(bytes);
            }
        }
        assert!(
            got == frames,
            "{at_once} buffers at once: {} frames",
            got.len()
        );
        assert_eq!(rig.counter("rx_dropped") + rig.counter("rx_errors"), 0);
    }
}

#[test]
fn nothing_is_lost_and_nothing_spins_without_buffers() {
    let mut rig = rig(feature::MRG_RXBUF);
    for n in 0..200 {
        rig.wire.send(&frame(1000, n));
    }
    assert!(rig.work() <= 2);
    assert!(rig.wire.receives() <= 1);
    // A few buffers, too few for any frame: all are used.
    rig.buffers(2, 1536);
    rig.work();
    rig.buffers(98, 1536);
    rig.work();
    let mut seen = 0;
    while let Some((_, bytes)) = rig.received(1536) {
        assert!(bytes == frame(1000, seen), "frame {seen}");
        seen += 1;
    }
    assert_eq!(seen, 100);
    assert_eq!(rig.wire.waiting() + usize::from(seen), 200);
    assert_eq!(rig.counter("rx_dropped"), 0);
    assert!(rig.counter("rx_starved") > 0);
}

#[test]
fn a_frame_that_waits_for_buffers_survives_a_pause_and_not_a_reset() {
    for reset in [false, true] {
        let mut rig = rig(feature::MRG_RXBUF);
        rig.buffers(2, 1536);
        rig.wire.send(&frame(6000, 4));
        rig.work();
        assert!(rig.rx.take_used().is_none());
        let queues = stop(&mut rig.device);
        if reset {
            rig.device.reset();
            rig.device.negotiated(feature::MRG_RXBUF);
        }
        for queue in queues {
            rig.device.start_queue(queue).unwrap();
        }
        for n in 2..8 {
            rig.rx.add(&[], &[(BUF + n * 1536, 1536)]);
        }
        rig.notify(RX);
        let got = rig.received(1536).map(|(_, bytes)| bytes);
        assert_eq!(got, (!reset).then(|| frame(6000, 4)));
    }
}

#[test]
fn a_driver_without_mergeable_buffers_gets_what_fits_one_and_the_rest_is_dropped() {
    let mut rig = rig(0);
    rig.buffers(3, 1526);
    for len in [1514, 1515, 60] {
        rig.wire.send(&frame(len, 6));
    }
    rig.work();
    for len in [1514, 60] {
        let (header, bytes) = rig.received(1526).unwrap();
        assert_eq!(bytes, frame(len, 6));
        assert_eq!(header[10..], [1, 0]);
    }
    assert!(rig.rx.take_used().is_none());
    assert_eq!(rig.counter("rx_dropped"), 1);
}

#[test]
fn the_longest_frame_that_a_buffer_takes_arrives_whatever_buffers_a_driver_chose() {
    // §5.1.6.3.1: buffer sizes of drivers that accept segments of IPv4 or of IPv6, and one for any
    // frame.
    for buffer in [65_562, 65_601, 65_605u32] {
        let mut rig = rig(0);
        rig.buffers(3, buffer);
        let most = buffer as usize - HEADER_LEN;
        for (len, seed) in [(most, 1), (60, 2)] {
            rig.wire.send(&frame(len, seed));
            rig.work();
            let (header, bytes) = rig.received(buffer).unwrap();
            assert!(bytes == frame(len, seed), "{len} in {buffer}");
            assert_eq!(header[10..], [1, 0]);
        }
        if most < MAX_FRAME {
            rig.wire.send(&frame(most + 1, 3));
            rig.work();
            assert!(rig.rx.take_used().is_none());
            assert_eq!(rig.counter("rx_dropped"), 1, "{buffer}");
        }
    }
}

#[test]
fn a_frame_that_no_ring_of_buffers_takes_is_dropped() {
    let mut rig = rig(feature::MRG_RXBUF);
    // All 256 descriptors: 16 KiB.
    rig.buffers(256, 64);
    rig.wire.send(&frame(30_000, 1));
    rig.wire.send(&frame(100, 2));
    rig.work();
    assert_eq!(rig.received(64).unwrap().1, frame(100, 2));
    assert_eq!(rig.counter("rx_dropped"), 1);
}

#[test]
fn receive_buffers_without_room_for_a_header_are_a_fault() {
    for buffers in [vec![], vec![(BUF, 11)]] {
        let mut rig = rig(feature::MRG_RXBUF);
        rig.rx.add(&[(BUF, 5)], &buffers);
        rig.wire.send(&frame(60, 1));
        assert!(matches!(rig.device.on_backend(), Err(Fault::Guest(_))));
        stop(&mut rig.device);
    }
}
