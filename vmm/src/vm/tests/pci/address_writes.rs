//! Writes of the address port, which KVM collects where it can.

use super::*;

/// The bridge's IDs.
const BRIDGE: u32 = 0x0008_1b36;

fn select(guest: &Guest, slot: u32) {
    guest.carry_out(Order::Out32, 0xcf8, 1 << 31 | slot << 11);
}

#[test]
fn any_number_of_them_is_seen_in_order_by_the_access_that_follows() {
    let guest = on_pci(|vm| vm);
    let exits = || guest.counter("vcpu", "port_exits");
    let before = exits();
    // More than KVM keeps.
    for round in 1..=1000 {
        select(&guest, round % 31 + 1);
    }
    let writes = exits() - before;
    if guest.vm.context.address_writes.is_some() {
        assert!(writes < 20, "{writes} exits of 1000 writes");
    } else {
        assert_eq!(writes, 1000, "KVM collects nothing");
    }
    assert_eq!(guest.carry_out(Order::In32, 0xcfc, 0), u32::MAX);
    select(&guest, 5);
    select(&guest, 0);
    assert_eq!(guest.carry_out(Order::In32, 0xcfc, 0), BRIDGE);
    assert_eq!(guest.carry_out(Order::In32, 0xcf8, 0), 1 << 31);
    // A byte is no address, wherever KVM keeps it.
    guest.output(0xcf9, 0xff);
    guest.output(0xcf8, 0xff);
    assert_eq!(guest.carry_out(Order::In32, 0xcf8, 0), 1 << 31);
}

#[test]
fn they_are_part_of_a_paused_vm() {
    let (_dir, place) = place();
    let guest = on_pci(|vm| vm);
    for slot in [7, 0] {
        select(&guest, slot);
        guest.pause();
        let address = guest.vm.pci.as_ref().unwrap().config_address();
        assert_eq!(address, 1 << 31 | slot << 11);
        if slot == 0 {
            guest.vm.snapshot(&place).unwrap();
        }
        guest.vm.resume().unwrap();
    }
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
    assert_eq!(clone.carry_out(Order::In32, 0xcfc, 0), BRIDGE);
    select(&clone, 1);
    assert_eq!(clone.carry_out(Order::In32, 0xcfc, 0), u32::MAX);
}
