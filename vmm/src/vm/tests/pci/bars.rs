//! What a guest finds on the bus, and where it puts BARs.

use kvm_ioctls::{IoEventAddress, NoDatamatch};
use podvisor_devices::blk::BlockDevice;
use podvisor_devices::rng::RngDevice;
use vmm_sys_util::eventfd::EventFd;

use super::*;

#[test]
fn a_guest_finds_its_devices_and_what_they_say_of_themselves() {
    let guest = on_pci(|vm| vm.rng().block(BlockDevice::spare()));
    assert_eq!(guest.config(0, 0), 0x0008_1b36);
    assert_eq!(
        (guest.config(1, 0), guest.config(2, 0)),
        (0x1044_1af4, 0x1042_1af4)
    );
    assert_eq!(guest.config(3, 0), u32::MAX);
    assert_eq!(guest.config(1, 0x3c) >> 8, 0, "no INTx");
    // All of virtio's structures, all in BAR 0, and MSI-X.
    let mut at = guest.config(2, 0x34) & 0xff;
    let mut found = Vec::new();
    while at != 0 {
        let head = guest.config(2, u8::try_from(at).unwrap());
        let kind = if head & 0xff == 9 { head >> 24 } else { 0 };
        found.push(kind);
        if kind != 0 {
            assert_eq!(
                guest.config(2, u8::try_from(at + 4).unwrap()) & 0xff,
                0,
                "BAR 0"
            );
        }
        at = head >> 8 & 0xff;
    }
    assert_eq!(found, [0, 1, 2, 3, 4, 5]);
    // On MMIO there is no bus.
    let guest = Guest::start(VmBuilder::rng);
    assert_eq!(guest.config(0, 0), u32::MAX);
}

#[test]
fn notifications_do_not_leave_the_guest_wherever_the_bar_is() {
    let guest = on_pci(VmBuilder::rng);
    let mut rng = guest.function(1);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    for at in [rng.bar, 0xd000_0000, 0xe012_4000, 0xc000_8000] {
        let before = rng.bar;
        rng.move_to(at);
        assert_eq!(rng.status(), 15);
        if before != at {
            assert_eq!(
                guest.read(before),
                u32::MAX,
                "nothing is left at {before:#x}"
            );
        }
        let exits = guest.counter("vcpu", "mmio_exits");
        fill(rng, &mut queue, 32);
        assert_eq!(guest.counter("vcpu", "mmio_exits"), exits, "{at:#x}");
    }
}

#[test]
fn kvm_knows_notifications_before_a_guest_enables_the_bar() {
    let known = |vm: &Vm, bar: u64| {
        let address = IoEventAddress::Mmio(bar + NOTIFY);
        let eventfd = EventFd::new(0).unwrap();
        let machine = &vm.context.machine.vm_fd;
        let added = machine.register_ioevent(&eventfd, &address, NoDatamatch);
        if added.is_ok() {
            let removed = machine.unregister_ioevent(&eventfd, &address, NoDatamatch);
            removed.unwrap();
        }
        added.is_err_and(|error| error.errno() == libc::EEXIST)
    };
    let bar = |slot: u64| layout::MMIO_START + slot * u64::from(BAR_SIZE);
    let (_dir, place) = place();
    let guest = on_pci(VmBuilder::rng);
    assert!(known(&guest.vm, bar(1)) && !known(&guest.vm, bar(2)));
    guest.vm.plug(RngDevice::new()).unwrap();
    assert!(known(&guest.vm, bar(2)) && !known(&guest.vm, bar(3)));
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let clone = snapshot.builder().rng().rng().build().unwrap();
    assert!(known(&clone, bar(1)) && known(&clone, bar(2)) && !known(&clone, bar(3)));
    guest.vm.resume().unwrap();
    guest.vm.unplug("rng1").unwrap();
    assert!(known(&guest.vm, bar(1)) && !known(&guest.vm, bar(2)));
}

#[test]
fn an_access_beyond_the_ports_of_a_bus_reads_as_ones() {
    let guest = on_pci(|vm| vm);
    guest.carry_out(Order::Out32, 0xcf8, 1 << 31);
    assert_eq!(guest.carry_out(Order::In32, 0xcfc, 0), 0x0008_1b36);
    // The upper half of the register, and what follows it: no access for the bus.
    assert_eq!(guest.carry_out(Order::In32, 0xcfe, 0), u32::MAX);
}

#[test]
fn a_bar_is_sized_disabled_and_enabled_while_the_device_works() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.function(1);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    // As guests do it, and as they must not do it: with the BAR enabled.
    for command in [0, ENABLED] {
        guest.set_config(1, COMMAND, command);
        guest.set_config(1, BAR, u32::MAX);
        assert_eq!(guest.config(1, BAR), !(BAR_SIZE - 1));
        guest.set_config(1, BAR, u32::try_from(rng.bar).unwrap());
        assert_eq!(guest.config(1, 0x14), 0, "one BAR");
        guest.set_config(1, COMMAND, ENABLED);
        fill(rng, &mut queue, 16);
    }
    guest.set_config(1, COMMAND, 0);
    assert_eq!(rng.read(0), u32::MAX);
    rng.write(0, 1);
    guest.set_config(1, COMMAND, ENABLED);
    assert_eq!(rng.status(), 15);
    fill(rng, &mut queue, 16);
}

#[test]
fn of_bars_that_overlap_the_first_one_answers_until_it_goes() {
    let guest = on_pci(|vm| vm.rng().rng());
    let (mut one, mut two) = (guest.function(1), guest.function(2));
    let mut first = one.start(RINGS, NO_VECTOR);
    let mut second = two.start(RINGS + 0x10_0000, NO_VECTOR);
    let (place, other) = (one.bar, two.bar);
    two.move_to(place);
    fill(one, &mut first, 8);
    assert_eq!(guest.counter("rng1", "requests"), 0);
    assert_eq!(guest.read(other), u32::MAX);
    // The first one is moved away: the second one answers immediately, with its notifications.
    one.move_to(other);
    fill(one, &mut first, 8);
    fill(two, &mut second, 8);
    // Over guest memory, an APIC, and the end of the address space.
    for at in [0, 0x30_0000, APIC, 0xffff_c000] {
        two.move_to(at);
        fill(one, &mut first, 8);
        guest.runs_on();
    }
    guest.set_config(2, COMMAND, 0);
    two.move_to(place);
    guest.set_config(2, COMMAND, ENABLED);
    fill(two, &mut second, 8);
    assert_eq!(guest.counter("rng1", "requests"), 2);
}

#[test]
fn a_bar_that_is_not_enabled_takes_no_notifications_of_one_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    let guest = on_pci(VmBuilder::rng);
    let mut rng = guest.function(1);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    let (first, second) = (rng.bar, rng.bar + u64::from(BAR_SIZE));
    // Where the device that is plugged in would be.
    rng.move_to(second);
    guest.vm.plug(RngDevice::new()).unwrap();
    assert_eq!(u64::from(guest.config(2, BAR)), second);
    fill(rng, &mut queue, 8);
    guest.set_config(2, BAR, u32::try_from(first).unwrap());
    let plugged = guest.function(2);
    let mut other = plugged.start(RINGS + 0x10_0000, NO_VECTOR);
    fill(plugged, &mut other, 8);
    fill(rng, &mut queue, 8);
    // The same in a guest that is restored from a snapshot.
    guest.set_config(2, COMMAND, 0);
    guest.set_config(2, BAR, u32::try_from(second).unwrap());
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let clone = Guest::restore(&snapshot, |vm| vm.rng().rng());
    let mut queue = queue.clone_in(&clone.mem);
    fill(rng.of(&clone), &mut queue, 8);
}

#[test]
fn a_hostile_driver_parks_its_device_alone_and_a_reset_mends_it() {
    let guest = on_pci(|vm| vm.rng().rng());
    let (one, two) = (guest.function(1), guest.function(2));
    let mut healthy = two.start(RINGS + 0x10_0000, NO_VECTOR);
    let mut queue = one.start(RINGS, NO_VECTOR);
    queue.make_available(99);
    one.notify();
    wait_for("a request for a reset", || one.status() & 64 != 0);
    fill(two, &mut healthy, 32);
    let mut queue = one.start(RINGS, NO_VECTOR);
    fill(one, &mut queue, 32);
    assert!(guest.vm.faults().is_empty(), "no fault of the host's");
}

#[test]
fn ports_registers_and_vectors_take_any_access() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.function(1);
    for port in 0xcf8..0xd00 {
        for order in [Order::Out8, Order::Out32, Order::In8, Order::In32] {
            guest.carry_out(order, port, 0xdead_beef);
        }
    }
    for address in [
        u32::MAX,
        0,
        1 << 31 | 0xffff << 8,
        1 << 31 | 7 << 8,
        1 << 31 | 1 << 24,
    ] {
        guest.carry_out(Order::Out32, 0xcf8, address);
        guest.carry_out(Order::Out32, 0xcfc, u32::MAX);
        guest.carry_out(Order::In32, 0xcfc, 0);
    }
    let rng = Function {
        bar: guest.function(1).bar,
        ..rng
    };
    for offset in (0..u64::from(BAR_SIZE)).step_by(0x3c) {
        for order in [
            Order::Write8,
            Order::Write16,
            Order::Write32,
            Order::Read8,
            Order::Read16,
            Order::Read32,
        ] {
            guest.carry_out(order, rng.bar + offset, u32::MAX);
        }
    }
    // A queue and vectors that do not exist.
    rng.write16(0x16, 0xffff);
    rng.write16(0x1a, 1);
    assert_eq!((rng.read16(0x1a), rng.read16(0x18)), (0xffff, 0));
    rng.write16(0x16, 0);
    rng.write16(0x1a, 2);
    assert_eq!(rng.read16(0x1a), 0xffff);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    fill(rng, &mut queue, 8);
}

#[test]
fn nothing_of_a_bus_is_left_of_a_vm_that_ended() {
    let guest = on_pci(|vm| vm.rng().block(BlockDevice::spare()));
    let rng = guest.function(1);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    fill(rng, &mut queue, 8);
    guest.vm.plug(BlockDevice::spare()).unwrap();
    let map = Arc::downgrade(&guest.vm.context.bus.mmio);
    let machine = Arc::downgrade(&guest.vm.context.machine.vm_fd);
    guest.vm.stop().unwrap();
    drop(guest);
    assert!(map.upgrade().is_none() && machine.upgrade().is_none());
}
