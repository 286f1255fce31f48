//! Descriptors and rings.

use super::*;
use crate::testing::{F_INDIRECT, F_NEXT, F_WRITE};

/// Writes descriptors with these `(address, length, flags, next)`, in an indirect table.
fn indirect(rig: &Rig, queue: u16, table: &[(u64, u32, u16, u16)], len: u32) {
    let at = ROOM + 0x1_0000;
    let bytes: Vec<u8> = table
        .iter()
        .flat_map(|(addr, len, flags, next)| {
            let mut raw = [0; 16];
            raw[..8].copy_from_slice(&addr.to_le_bytes());
            raw[8..12].copy_from_slice(&len.to_le_bytes());
            raw[12..14].copy_from_slice(&flags.to_le_bytes());
            raw[14..].copy_from_slice(&next.to_le_bytes());
            raw
        })
        .collect();
    rig.mem.write_slice(&bytes, GuestAddress(at)).unwrap();
    rig.drivers[usize::from(queue)].descriptor(0, at, len, F_INDIRECT, 0);
}

/// Makes a chain available of `count` equal descriptors of `len` bytes in an indirect table.
fn long_chain(rig: &mut Rig, queue: u16, count: u16, len: u32) {
    let device_writes = rig.subject.sound[&queue].readable.is_empty();
    let direction = if device_writes { F_WRITE } else { 0 };
    let table: Vec<_> = (0..count)
        .map(|n| {
            let next = if n + 1 == count { 0 } else { F_NEXT };
            (DATA, len, direction | next, n + 1)
        })
        .collect();
    indirect(rig, queue, &table, u32::from(count) * 16);
    rig.drivers[usize::from(queue)].make_available(0);
}

/// Makes one descriptor available.
fn one(rig: &mut Rig, queue: u16, addr: u64, len: u32, flags: u16, next: u16) {
    let driver = &mut rig.drivers[usize::from(queue)];
    driver.descriptor(0, addr, len, flags, next);
    driver.make_available(0);
}

#[test]
fn a_sound_driver_is_served_by_every_queue_again_and_again() {
    survives(|rig| (0..40).for_each(|_| rig.works()));
}

#[test]
fn a_descriptor_that_follows_itself_parks_the_device() {
    parks(|rig, queue| one(rig, queue, DATA, 8, F_NEXT, 0));
}

#[test]
fn a_cycle_of_all_descriptors_parks_the_device() {
    parks(|rig, queue| {
        let driver = &mut rig.drivers[usize::from(queue)];
        for n in 0..QUEUE {
            driver.descriptor(n, DATA, 8, F_NEXT, (n + 1) % QUEUE);
        }
        driver.make_available(0);
    });
}

#[test]
fn a_next_descriptor_out_of_the_table_parks_the_device() {
    for next in [QUEUE, 0x7fff, u16::MAX] {
        parks(|rig, queue| one(rig, queue, DATA, 8, F_NEXT, next));
    }
}

#[test]
fn a_head_out_of_the_table_parks_the_device() {
    for head in [QUEUE, 0x7fff, u16::MAX] {
        parks(|rig, queue| rig.drivers[usize::from(queue)].make_available(head));
    }
}

#[test]
fn an_available_index_that_jumps_parks_the_device() {
    for index in [QUEUE + 1, 0x7fff, u16::MAX] {
        parks(|rig, queue| rig.drivers[usize::from(queue)].set_avail_idx(index));
    }
}

#[test]
fn a_chain_longer_than_any_device_takes_parks_the_device() {
    parks(|rig, queue| long_chain(rig, queue, 1025, 1));
    parks(|rig, queue| long_chain(rig, queue, 0x7fff, 0));
}

#[test]
fn a_chain_of_more_than_four_gigabytes_parks_the_device() {
    parks(|rig, queue| long_chain(rig, queue, 1024, 0x60_0000));
}

#[test]
fn buffers_that_are_not_guest_memory_park_the_device() {
    for (addr, len) in [
        (MEMORY, 8),
        (MEMORY - 4, 8),
        (0, u32::MAX),
        (u64::MAX - 3, 4),
        (u64::MAX - 3, 64),
        (1 << 52, 8),
        // The registers of the first device.
        (0xc000_0000, 8),
    ] {
        for flags in [0, F_WRITE] {
            parks(|rig, queue| one(rig, queue, addr, len, flags, 0));
        }
    }
}

#[test]
fn a_readable_buffer_after_a_writable_one_parks_the_device() {
    parks(|rig, queue| {
        rig.drivers[usize::from(queue)].descriptor(1, DATA, 64, 0, 0);
        one(rig, queue, ROOM, 64, F_WRITE | F_NEXT, 1);
    });
}

#[test]
fn indirect_tables_that_nest_or_have_no_whole_length_park_the_device() {
    let table = (ROOM + 0x1_0000, 32, F_INDIRECT, 0);
    parks(|rig, queue| {
        indirect(rig, queue, &[table, table], 32);
        rig.drivers[usize::from(queue)].make_available(0);
    });
    for len in [0, 1, 15, 17, u32::MAX] {
        parks(|rig, queue| {
            indirect(rig, queue, &[(DATA, 8, 0, 0)], len);
            rig.drivers[usize::from(queue)].make_available(0);
        });
    }
}

#[test]
fn indirect_tables_that_are_not_guest_memory_park_the_device() {
    for at in [MEMORY, MEMORY - 8, u64::MAX - 15, 0xc000_0000] {
        parks(|rig, queue| one(rig, queue, at, 16, F_INDIRECT, 0));
    }
}

#[test]
fn links_out_of_an_indirect_table_park_the_device() {
    for next in [1, 2, u16::MAX] {
        parks(|rig, queue| {
            indirect(rig, queue, &[(DATA, 8, F_NEXT, next)], 16);
            rig.drivers[usize::from(queue)].make_available(0);
        });
    }
}

#[test]
fn an_indirect_table_that_is_misaligned_is_served_like_another() {
    for_each_queue(|rig, queue| {
        let Sound { readable, room } = rig.subject.sound[&queue].clone();
        rig.mem.write_slice(&readable, GuestAddress(DATA)).unwrap();
        let len = u32::try_from(readable.len()).unwrap();
        let at = ROOM + 0x1_0003;
        let mut table = Vec::new();
        for (addr, len, flags) in [(DATA, len, F_NEXT), (ROOM, room, F_WRITE)] {
            table.extend(addr.to_le_bytes());
            table.extend(len.to_le_bytes());
            table.extend(flags.to_le_bytes());
            table.extend(1u16.to_le_bytes());
        }
        rig.mem.write_slice(&table, GuestAddress(at)).unwrap();
        one(rig, queue, at, 32, F_INDIRECT, 0);
        rig.poke(queue);
        let used = rig.drivers[usize::from(queue)].take_used();
        assert!(used.is_some(), "{} {queue}", rig.subject.name);
    });
}

#[test]
fn empty_buffers_before_between_and_after_sound_ones_are_passed_over() {
    for_each_queue(|rig, queue| {
        let Sound { readable, room } = rig.subject.sound[&queue].clone();
        rig.mem.write_slice(&readable, GuestAddress(DATA)).unwrap();
        let len = u32::try_from(readable.len()).unwrap();
        // An empty buffer may have any address.
        let nowhere = (1 << 60, 0);
        rig.drivers[usize::from(queue)].add(
            &[nowhere, (DATA, len), nowhere],
            &[nowhere, (ROOM, room), nowhere],
        );
        rig.poke(queue);
        let used = rig.drivers[usize::from(queue)].take_used();
        assert!(used.is_some(), "{} {queue}", rig.subject.name);
        assert_eq!(rig.status(), DRIVER_OK);
    });
}

#[test]
fn chains_of_nothing_but_empty_buffers_end_in_an_answer_or_a_fault() {
    for_each_queue(|rig, queue| {
        for _ in 0..3 {
            rig.drivers[usize::from(queue)].add(&[(DATA, 0)], &[(ROOM, 0)]);
        }
        rig.poke(queue);
        let given_back = rig.drivers[usize::from(queue)].take_used().is_some();
        let parked = rig.status() & NEEDS_RESET != 0;
        assert!(given_back != parked, "{} {queue}", rig.subject.name);
        rig.restart();
        rig.works();
    });
}

#[test]
fn a_fault_of_one_device_leaves_the_others_at_work() {
    let mut others: Vec<_> = subjects().into_iter().map(Rig::started).collect();
    parks(|rig, queue| one(rig, queue, 1 << 52, 8, 0, 0));
    others.iter_mut().for_each(Rig::works);
}
