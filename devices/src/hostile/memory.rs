//! Chains of gigabytes, for which no device may allocate as much as a guest asks for.

use super::*;
use crate::allocations::allocated;
use crate::testing::{F_INDIRECT, F_NEXT, F_WRITE};

/// Bytes of a long buffer, and how many of them a chain has: almost 4 GiB.
const BUFFER: u32 = 4 << 20;
const BUFFERS: u16 = 1020;

/// What a device may allocate for such chains.
const LIMIT: usize = 1 << 20;

/// Where descriptors lie that no device overwrites.
const TABLE: u64 = 12 << 20;

/// Makes a valid chain available that is continued by long buffers.
fn add_long(rig: &mut Rig, queue: u16, device_writes: bool) {
    let Sound { readable, room } = rig.subject.sound[&queue].clone();
    rig.mem.write_slice(&readable, GuestAddress(DATA)).unwrap();
    let first = (DATA, u32::try_from(readable.len()).unwrap(), 0);
    let last = (ROOM, room, F_WRITE);
    let long = (DATA, BUFFER, if device_writes { F_WRITE } else { 0 });
    let mut all = vec![first];
    all.extend((0..BUFFERS).map(|_| long));
    all.push(last);
    let count = u16::try_from(all.len()).unwrap();
    let mut table = Vec::new();
    for ((addr, len, flags), n) in all.into_iter().zip(1u16..) {
        let next = if n == count { 0 } else { F_NEXT };
        table.extend(addr.to_le_bytes());
        table.extend(len.to_le_bytes());
        table.extend((flags | next).to_le_bytes());
        table.extend(n.to_le_bytes());
    }
    rig.mem.write_slice(&table, GuestAddress(TABLE)).unwrap();
    let len = u32::try_from(table.len()).unwrap();
    let driver = &mut rig.drivers[usize::from(queue)];
    for head in 0..3 {
        driver.descriptor(head, TABLE, len, F_INDIRECT, 0);
        driver.make_available(head);
    }
}

#[test]
fn chains_of_gigabytes_cost_no_more_memory_than_others() {
    for device_writes in [false, true] {
        for_each_queue(|rig, queue| {
            add_long(rig, queue, device_writes);
            let most = allocated(|| rig.poke(queue));
            let name = rig.subject.name;
            assert!(most <= LIMIT, "{name} {queue}: {most} bytes");
            rig.restart();
            rig.works();
        });
    }
}
