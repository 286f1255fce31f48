//! Chains of gigabytes, for which no device may allocate as much as a guest asks for.
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::*;
use crate::testing::{F_INDIRECT, F_NEXT, F_WRITE};

thread_local! {
    /// Bytes that this thread has allocated and not freed; less than 0 if it frees those of others.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The maximum of that.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, which counts for each thread.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(change: isize) {
    // Without a destructor, they exist until the thread ends.
    let live = LIVE.with(|live| {
        live.set(live.get() + change);
        live.get()
    });
    PEAK.with(|peak| peak.set(peak.get().max(live)));
}

// SAFETY: every call is passed to the system's allocator, and what counts does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist for a moment.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// The maximum number of bytes that `work` had allocated at one time.
fn allocated(work: impl FnOnce()) -> usize {
    let before = LIVE.get();
    PEAK.set(before);
    work();
    usize::try_from(PEAK.get() - before).unwrap()
}

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

#[test]
fn allocations_of_a_thread_count() {
    assert_eq!(allocated(|| drop(vec![1u8; 3 << 20])), 3 << 20);
    let grown = allocated(|| {
        let mut bytes = vec![1u8; 1 << 20];
        bytes.reserve_exact(2 << 20);
        drop(bytes);
    });
    assert_eq!(grown, 4 << 20);
    let other = std::thread::spawn(|| drop(vec![1u8; 8 << 20]));
    assert!(allocated(|| other.join().unwrap()) < 1 << 20);
}
