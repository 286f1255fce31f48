//! What the thread of a test allocates.
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed; less than 0 if it frees those of others.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The maximum of that.
    static PEAK: Cell<isize> = const { Cell::new(0) };
    /// How often this thread has allocated.
    static CALLS: Cell<usize> = const { Cell::new(0) };
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
    if change > 0 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
    }
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
pub(crate) fn allocated(work: impl FnOnce()) -> usize {
    let before = LIVE.get();
    PEAK.set(before);
    work();
    usize::try_from(PEAK.get() - before).unwrap()
}

/// How often `work` allocated.
pub(crate) fn allocations(work: impl FnOnce()) -> usize {
    let before = CALLS.get();
    work();
    CALLS.get() - before
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
    let mut list = Vec::with_capacity(1);
    assert_eq!(allocations(|| list.push(1)), 0);
    assert_eq!(allocations(|| list.push(2)), 1);
    assert_eq!(allocations(|| drop(list)), 0);
    let other = std::thread::spawn(|| drop(vec![1u8; 8 << 20]));
    assert!(allocated(|| other.join().unwrap()) < 1 << 20);
}
