//! Which of the frames for it a driver gets.

use super::*;

#[test]
fn frames_that_the_driver_did_not_accept_are_dropped() {
    let checksum = feature::GUEST_CSUM | feature::CTRL_GUEST_OFFLOADS;
    let all = checksum | feature::GUEST_TSO4;
    // A partial checksum, and a segment of TCP over IPv4, read directly into the buffers and held.
    for (features, flags, gso_type, len) in [
        (feature::MRG_RXBUF, 1, 0, 0x1_1000),
        (feature::MRG_RXBUF | checksum, 1, 1, 0x1_1000),
        (0, 1, 0, 0x1000),
        (checksum, 1, 1, 0x1000),
    ] {
        let mut rig = rig(features);
        rig.buffers(2, len);
        rig.wire.send_with(
            [flags, gso_type, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &frame(2000, 1),
        );
        rig.wire.send(&frame(100, 2));
        rig.work();
        assert_eq!(rig.received(len).unwrap().1, frame(100, 2));
        assert_eq!(
            (rig.counter("rx_dropped"), rig.counter("rx_frames")),
            (1, 1)
        );
    }
    // A frame that waits for buffers while the driver changes its offloads.
    let mut rig = rig(all | feature::MRG_RXBUF);
    rig.buffers(1, 1000);
    rig.wire
        .send_with([1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &frame(2000, 1));
    rig.work();
    assert_eq!(rig.command(5, 0, &feature::GUEST_CSUM.to_le_bytes()), 0);
    rig.buffers(7, 1000);
    rig.notify(RX);
    assert_eq!(
        (rig.counter("rx_dropped"), rig.counter("rx_frames")),
        (1, 0)
    );
}

#[test]
fn frames_that_exceed_the_mtu_are_dropped_but_for_those_that_are_to_be_cut() {
    let segments = feature::GUEST_CSUM | feature::GUEST_TSO4;
    for (features, len, delivered) in [
        (feature::MTU, 1518, 4),
        (feature::MTU, 1519, 1),
        (0, 1519, 4),
    ] {
        for room in [0x1_1000, 0x1000] {
            let mut rig = rig_with(features | segments, |device| device.mtu(1500));
            rig.buffers(8, room);
            for _ in 0..3 {
                rig.wire.send(&frame(len, 1));
            }
            let header = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            rig.wire.send_with(header, &frame(3000, 2));
            rig.work();
            assert_eq!(rig.counter("rx_frames"), delivered, "{features:#x} {len}");
            assert_eq!(rig.counter("rx_dropped"), 4 - delivered);
        }
    }
}
