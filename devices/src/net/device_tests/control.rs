//! The configuration space and the control queue.

use super::*;

#[test]
fn configuration_space_is_address_status_pairs_and_mtu() {
    let rig = rig_with(0, |device| {
        device.mac(MacAddress([2, 3, 4, 5, 6, 7])).mtu(9000)
    });
    let mut config = [9; 16];
    rig.device.info().config.read(0, &mut config);
    assert_eq!(
        config,
        [2, 3, 4, 5, 6, 7, 1, 0, 1, 0, 0x28, 0x23, 0, 0, 0, 0]
    );
    assert_ne!(rig.device.info().features & feature::MTU, 0);
    let rig = rig_with(0, |device| device.mtu(1));
    rig.device.info().config.read(10, &mut config[..2]);
    assert_eq!(config[..2], [68, 0]);
    let (a, b) = (rig_with(0, |d| d), rig_with(0, |d| d));
    assert_eq!(a.device.info().features & feature::MTU, 0);
    let [mac_a, mac_b] = [&a, &b].map(|rig| {
        let mut mac = [0; 6];
        rig.device.info().config.read(0, &mut mac);
        mac
    });
    assert_eq!(mac_a[0] & 3, 2);
    assert_ne!(mac_a, mac_b);
}

#[test]
fn the_driver_sets_its_address_until_it_resets_the_device() {
    let features = feature::CTRL_MAC_ADDR;
    let mut rig = rig_with(features, |device| {
        device.mac(MacAddress([2, 0, 0, 0, 0, 1]))
    });
    assert_eq!(rig.command(1, 1, &[2, 9, 9, 9, 9, 9]), 0);
    let mac = |rig: &Rig| {
        let mut mac = [0; 6];
        rig.device.info().config.read(0, &mut mac);
        mac
    };
    assert_eq!(mac(&rig), [2, 9, 9, 9, 9, 9]);
    assert!(!rig.device.config.take_changed(), "it knows");
    stop(&mut rig.device);
    rig.device.reset();
    assert_eq!(mac(&rig), [2, 0, 0, 0, 0, 1]);
}

#[test]
fn filters_are_accepted_and_offloads_are_switched_as_far_as_they_were_negotiated() {
    let control = feature::CTRL_RX | feature::CTRL_GUEST_OFFLOADS;
    let negotiated = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::MRG_RXBUF;
    let mut rig = rig(negotiated | control);
    for mode in 0..2 {
        assert_eq!(rig.command(0, mode, &[1]), 0);
    }
    for mode in 2..6 {
        assert_eq!(rig.command(0, mode, &[1]), 1, "needs CTRL_RX_EXTRA");
    }
    let two_and_one = [vec![2, 0, 0, 0], vec![7; 12], vec![1, 0, 0, 0], vec![7; 6]].concat();
    assert_eq!(rig.command(1, 0, &two_and_one), 0);
    assert!(rig.wire.offloads().tso4);
    assert_eq!(rig.command(5, 0, &feature::GUEST_CSUM.to_le_bytes()), 0);
    let offloads = rig.wire.offloads();
    assert!(offloads.checksum && !offloads.tso4);
    assert_eq!(rig.command(5, 0, &feature::GUEST_TSO6.to_le_bytes()), 1);
    assert_eq!(
        rig.command(5, 0, &(feature::GUEST_CSUM | 1).to_le_bytes()),
        1
    );
    assert_eq!(rig.wire.offloads(), offloads);
}

#[test]
fn a_driver_that_changes_its_mind_again_and_again_does_not_keep_the_host_busy() {
    let [csum, tso4, tso6] = [
        feature::GUEST_CSUM,
        feature::GUEST_TSO4,
        feature::GUEST_TSO6,
    ];
    let features = csum | tso4 | tso6 | feature::CTRL_GUEST_OFFLOADS | feature::MRG_RXBUF;
    let mut rig = rig(features);
    let first = rig.wire.switches();
    for _ in 0..100 {
        assert_eq!(rig.command(5, 0, &(csum | tso4 | tso6).to_le_bytes()), 0);
    }
    assert_eq!(rig.wire.switches(), first, "nothing is new");
    // By commands, and by resets.
    for round in 0..300 {
        let wanted = csum | if round % 2 == 0 { tso4 } else { tso6 };
        if round < 200 {
            assert_eq!(rig.command(5, 0, &wanted.to_le_bytes()), 0);
        } else {
            stop(&mut rig.device);
            rig.device.reset();
            let queues = [&rig.rx, &rig.tx, &rig.control];
            start(&mut rig.device, &queues, &rig.irq, wanted);
        }
        let (left, may) = (rig.wire.offloads(), accepted(wanted));
        assert!(may.tso4 || !left.tso4);
        assert!(may.tso6 || !left.tso6);
    }
    let switches = rig.wire.switches() - first;
    assert!(switches < 60, "{switches}");
}

#[test]
fn commands_whose_feature_was_not_negotiated_are_refused() {
    let tables = vec![0; 8];
    for (class, command, data, feature) in [
        (0, 0, vec![1], feature::CTRL_RX),
        (0, 1, vec![1], feature::CTRL_RX),
        (1, 0, tables, feature::CTRL_RX),
        (1, 1, vec![2; 6], feature::CTRL_MAC_ADDR),
        (5, 0, vec![0; 8], feature::CTRL_GUEST_OFFLOADS),
    ] {
        let all = feature::CTRL_RX | feature::CTRL_MAC_ADDR | feature::CTRL_GUEST_OFFLOADS;
        let mut with = rig(feature);
        let mut without = rig(all & !feature);
        assert_eq!(with.command(class, command, &data), 0, "{class} {command}");
        assert_eq!(without.command(class, command, &data), 1);
    }
}

#[test]
fn commands_that_are_none_are_refused() {
    let mut rig = rig(feature::CTRL_RX | feature::CTRL_MAC_ADDR | feature::CTRL_GUEST_OFFLOADS);
    let endless_table = [vec![0xff; 4], vec![0; 12]].concat();
    for (class, command, data) in [
        (0, 6, vec![1]),
        (0, 0, vec![]),
        (0, 0, vec![1, 1]),
        (1, 0, vec![]),
        (1, 0, endless_table),
        (1, 1, vec![1; 5]),
        (1, 1, vec![1; 7]),
        (3, 0, vec![1, 0]),
        (4, 0, vec![4, 0]),
        (5, 0, vec![0; 4]),
        (0xff, 0xff, vec![0; 64]),
    ] {
        assert_eq!(
            rig.command(class, command, &data),
            1,
            "{class} {command} {data:?}"
        );
    }
    assert_eq!(rig.counter("commands_refused"), 11);
    for head in [&[][..], &[(TX_BUF, 1)]] {
        rig.mem.write_slice(&[9], GuestAddress(BUF)).unwrap();
        rig.control.add(head, &[(BUF, 1)]);
        rig.notify(CONTROL);
        assert_eq!(rig.control.take_used().unwrap().len, 1);
        assert_eq!(rig.bytes(BUF, 1), [1], "{head:?}");
    }
    assert_eq!(rig.counter("commands_refused"), 13);
    rig.control.add(&[(TX_BUF, 2)], &[]);
    assert!(matches!(rig.device.on_queue(CONTROL), Err(Fault::Guest(_))));
}

#[test]
fn a_driver_may_leave_the_control_queue_alone() {
    let mut rig = rig(0);
    rig.device.stop_queue(CONTROL).unwrap();
    assert!(rig.device.stop_queue(CONTROL).is_none());
    assert_eq!(rig.device.on_queue(CONTROL).unwrap(), Progress::Idle);
    assert_eq!(rig.device.on_queue(77).unwrap(), Progress::Idle);
}
