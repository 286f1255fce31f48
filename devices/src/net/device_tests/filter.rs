//! Which frames the backend is told to receive.

use super::super::super::filter::Multicast;
use super::*;
use crate::allocations::allocated;

const FEATURES: u64 = feature::CTRL_RX | feature::CTRL_MAC_ADDR;
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const BROADCAST: [u8; 6] = [0xff; 6];

/// `class, command` of the commands.
const PROMISCUOUS: (u8, u8) = (0, 0);
const ALL_MULTICAST: (u8, u8) = (0, 1);
const TABLES: (u8, u8) = (1, 0);
const SET_MAC: (u8, u8) = (1, 1);

fn card(features: u64) -> Rig {
    rig_with(features, |device| device.mac(MacAddress(OWN)))
}

fn set(rig: &mut Rig, (class, command): (u8, u8), data: &[u8]) {
    assert_eq!(rig.command(class, command, data), 0);
}

/// Addresses of one kind, which their first byte determines.
fn addresses(first: u8, count: u8) -> Vec<[u8; 6]> {
    (0..count).map(|n| [first, 0, 0, 0, 1, n]).collect()
}

/// The data of the command that sets both tables.
fn tables(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> Vec<u8> {
    let table = |list: &[[u8; 6]]| {
        let count = u32::try_from(list.len()).unwrap();
        [&count.to_le_bytes()[..], &list.concat()].concat()
    };
    [table(unicast), table(multicast)].concat()
}

fn macs(list: &[[u8; 6]]) -> Vec<MacAddress> {
    list.iter().copied().map(MacAddress).collect()
}

fn only(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> ReceiveFilter {
    ReceiveFilter::Only {
        unicast: macs(unicast),
        multicast: Multicast::Only(macs(multicast)),
    }
}

fn all_multicast(unicast: &[[u8; 6]]) -> ReceiveFilter {
    ReceiveFilter::Only {
        unicast: macs(unicast),
        multicast: Multicast::All,
    }
}

#[test]
fn the_backend_receives_what_the_driver_wants() {
    let mut rig = card(FEATURES);
    assert_eq!(rig.wire.filters(), [], "all frames at first");
    let [one, two] = [[2, 0, 0, 0, 1, 0], [2, 0, 0, 0, 1, 1]];
    let group = [0x33, 0x33, 0, 0, 0, 1];
    for (command, data, expected) in [
        (ALL_MULTICAST, vec![1], None),
        (PROMISCUOUS, vec![0], Some(all_multicast(&[OWN]))),
        (PROMISCUOUS, vec![0], None),
        (ALL_MULTICAST, vec![0], Some(only(&[OWN], &[BROADCAST]))),
        (
            TABLES,
            tables(&[one, two], &[group]),
            Some(only(&[OWN, one, two], &[BROADCAST, group])),
        ),
        (
            ALL_MULTICAST,
            vec![1],
            Some(all_multicast(&[OWN, one, two])),
        ),
        (PROMISCUOUS, vec![1], Some(ReceiveFilter::All)),
        // Known when the driver no longer wants all.
        (TABLES, tables(&[two], &[]), None),
        (PROMISCUOUS, vec![0], Some(all_multicast(&[OWN, two]))),
        (TABLES, tables(&[], &[]), Some(all_multicast(&[OWN]))),
    ] {
        set(&mut rig, command, &data);
        let expected: Vec<_> = expected.into_iter().collect();
        assert_eq!(rig.wire.filters(), expected, "{command:?} {data:?}");
    }
}

#[test]
fn tables_that_are_too_large_are_all_addresses_of_their_kind() {
    let mut rig = card(FEATURES);
    set(&mut rig, PROMISCUOUS, &[0]);
    let unicast = addresses(2, 8);
    let groups = addresses(3, 65);
    let own_and = |count: usize| [&[OWN], &unicast[..count]].concat();
    for (tables, expected) in [
        (
            tables(&unicast[..7], &groups[..64]),
            only(&own_and(7), &[&[BROADCAST], &groups[..64]].concat()),
        ),
        (tables(&unicast, &groups[..1]), ReceiveFilter::All),
        (tables(&unicast[..1], &groups), all_multicast(&own_and(1))),
    ] {
        set(&mut rig, TABLES, &tables);
        assert_eq!(rig.wire.filters().last(), Some(&expected));
    }

    // 2 MiB, none of which is kept.
    let huge = tables(&[[2; 6]; 1 << 18], &[[3; 6]; 1 << 16]);
    rig.mem
        .write_slice(&[1, 0], GuestAddress(TX_BUF))
        .and_then(|()| rig.mem.write_slice(&huge, GuestAddress(BUF)))
        .unwrap();
    let data = (BUF, u32::try_from(huge.len()).unwrap());
    rig.control.add(&[(TX_BUF, 2), data], &[(TX_BUF + 2, 1)]);
    assert!(allocated(|| rig.notify(CONTROL)) < 1024);
    assert_eq!(rig.bytes(TX_BUF + 2, 1), [0]);
    assert_eq!(rig.wire.filters(), [ReceiveFilter::All]);
}

#[test]
fn a_new_address_of_the_driver_is_received_and_no_longer_the_old_one() {
    let mut rig = card(FEATURES);
    set(&mut rig, PROMISCUOUS, &[0]);
    let new = [2, 9, 9, 9, 9, 9];
    set(&mut rig, SET_MAC, &new);
    let filters = rig.wire.filters();
    assert_eq!(
        filters,
        [only(&[OWN], &[BROADCAST]), only(&[new], &[BROADCAST])]
    );
}

#[test]
fn a_reset_ends_the_filter_and_the_next_driver_has_none() {
    let mut rig = card(FEATURES);
    set(&mut rig, PROMISCUOUS, &[0]);
    set(&mut rig, TABLES, &tables(&addresses(2, 1), &[]));
    stop(&mut rig.device);
    assert_eq!(rig.wire.filters().len(), 2);
    rig.device.reset();
    assert_eq!(rig.wire.filters(), [ReceiveFilter::All]);
    rig.control = DriverQueue::new(&rig.mem, 0x3_0000, 64);
    let queues = [&rig.rx, &rig.tx, &rig.control];
    start(&mut rig.device, &queues, &rig.irq, FEATURES);
    assert_eq!(rig.wire.filters(), []);
    set(&mut rig, PROMISCUOUS, &[0]);
    assert_eq!(rig.wire.filters(), [only(&[OWN], &[BROADCAST])]);
}

#[test]
fn a_backend_that_refuses_a_filter_receives_all_frames() {
    let mut rig = card(FEATURES);
    set(&mut rig, PROMISCUOUS, &[0]);
    let _ = rig.wire.filters();
    rig.wire.refuse_filters();
    set(&mut rig, ALL_MULTICAST, &[1]);
    assert_eq!(
        rig.wire.filters(),
        [all_multicast(&[OWN]), ReceiveFilter::All]
    );
    set(&mut rig, ALL_MULTICAST, &[0]);
    let tried = only(&[OWN], &[BROADCAST]);
    assert_eq!(rig.wire.filters(), [tried, ReceiveFilter::All]);
    rig.buffers(1, 0x1_1000);
    rig.wire.send(&frame(100, 1));
    rig.work();
    assert_eq!(rig.received(0x1_1000).unwrap().1, frame(100, 1));
}

#[test]
fn a_filter_that_changes_too_often_is_off_until_it_may_be_set_again() {
    let mut rig = card(FEATURES);
    for round in 0..300u16 {
        set(&mut rig, PROMISCUOUS, &[0]);
        set(&mut rig, ALL_MULTICAST, &[u8::from(round % 2 == 0)]);
    }
    let filters = rig.wire.filters();
    // Each is followed by at most one that ends it.
    assert!((17..120).contains(&filters.len()), "{}", filters.len());

    set(&mut rig, PROMISCUOUS, &[1]);
    rig.device.filter_changes = Limiter::default();
    set(&mut rig, PROMISCUOUS, &[0]);
    let _ = rig.wire.filters();
    // For hours.
    rig.device.filter_changes = Limiter::new(None, Some(BACKEND_CHANGES));
    for _ in 0..10_000 {
        rig.device.filter_changes.charge(0);
    }
    set(&mut rig, ALL_MULTICAST, &[1]);
    assert_eq!(rig.wire.filters(), [ReceiveFilter::All]);
    rig.wire.send(&frame(100, 1));
    rig.work();
    set(&mut rig, TABLES, &tables(&[], &[]));
    assert_eq!(rig.wire.filters(), []);

    rig.device.filter_changes = Limiter::default();
    rig.wire.send(&frame(100, 1));
    rig.work();
    assert_eq!(rig.wire.filters(), [all_multicast(&[OWN])]);
    rig.wire.send(&frame(100, 1));
    rig.work();
    assert_eq!(rig.wire.filters(), []);
}

#[test]
fn a_card_restored_has_its_drivers_filter() {
    let mut one = card(FEATURES);
    let [address] = [[2, 0, 0, 0, 1, 0]];
    set(&mut one, PROMISCUOUS, &[0]);
    set(&mut one, TABLES, &tables(&[address], &addresses(3, 65)));
    set(&mut one, SET_MAC, &[2, 9, 9, 9, 9, 9]);
    stop(&mut one.device);
    let saved = one.device.save();
    let filter = all_multicast(&[[2, 9, 9, 9, 9, 9], address]);
    let (nic, wire) = MemoryNic::pair();
    let mut two = NetDevice::new(Box::new(nic)).unwrap();
    two.restore(&saved).unwrap();
    two.negotiated(FEATURES);
    assert_eq!(wire.filters().first(), Some(&filter));
    assert_eq!(two.save(), saved);
    two.negotiated(FEATURES);
    assert_eq!(wire.filters(), [ReceiveFilter::All], "another driver");
    two.restore(&saved).unwrap();
    assert_eq!(wire.filters(), [filter], "while it runs");
    two.reset();
    two.restore(&saved).unwrap();
    two.negotiated(feature::CTRL_MAC_ADDR);
    assert_eq!(wire.filters(), [ReceiveFilter::All], "it cannot have one");
}
