//! Which pages of guest memory devices have written, for as long as somebody wants to know.
//!
//! A virtual machine that moves to another host is copied while it runs. KVM logs what vCPUs write;
//! what devices write is logged here, in one place for all of them: a device writes only into
//! buffers of a [`crate::virtio::Chain`], and into the used ring, and a queue marks both when it
//! returns the chain. While nobody asks, a chain costs one relaxed load.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The size of a page in bytes.
const PAGE_SIZE: u64 = 4096;

/// A log of written pages that a machine's devices share. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct WriteLog(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_on: AtomicBool,
    /// One bit for each page, from guest physical address 0 on.
    pages: OnceLock<Box<[AtomicU64]>>,
}

impl WriteLog {
    /// Begins to log writes below the guest physical address `end`, which is the same at every
    /// call, with no page marked. No chain may be in a device's hands: it would be marked like all
    /// others, but it may have been written before.
    pub fn start(&self, end: u64) {
        let words = end.div_ceil(PAGE_SIZE).div_ceil(64);
        let words = usize::try_from(words).unwrap_or(usize::MAX);
        let pages = (self.0.pages).get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
        for word in pages {
            word.store(0, Ordering::Relaxed);
        }
        self.0.is_on.store(true, Ordering::SeqCst);
    }

    /// Ends it.
    pub fn stop(&self) {
        self.0.is_on.store(false, Ordering::SeqCst);
    }

    /// Whether writes are logged.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Marks the pages of `len` bytes from guest physical address `start` on, after they were
    /// written. What lies beyond the end is no memory.
    pub fn mark(&self, start: u64, len: u64) {
        let (true, Some(pages)) = (len > 0 && self.is_on(), self.0.pages.get()) else {
            return;
        };
        let last = start.saturating_add(len.saturating_sub(1)) / PAGE_SIZE;
        for page in start / PAGE_SIZE..=last {
            let word = usize::try_from(page / 64).ok().and_then(|at| pages.get(at));
            let Some(word) = word else { return };
            // Whoever takes the mark reads what was written before.
            word.fetch_or(1u64.rotate_left((page % 64) as u32), Ordering::Release);
        }
    }

    /// Returns the marks since the last call, one bit for each page from guest physical address 0
    /// on, and takes them away.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        let pages = self.0.pages.get().map_or(&[][..], |pages| &**pages);
        let take = |word: &AtomicU64| match word.load(Ordering::Relaxed) {
            0 => 0,
            _ => word.swap(0, Ordering::Acquire),
        };
        pages.iter().map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(log: &WriteLog) -> Vec<u64> {
        let words = log.take();
        let bits = words.iter().enumerate().flat_map(|(at, word)| {
            let at = at as u64 * 64;
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at + bit)
        });
        bits.collect()
    }

    #[test]
    fn pages_are_marked_while_the_log_is_on_and_taken_once() {
        let log = WriteLog::default();
        log.mark(0, 4096);
        assert!(!log.is_on() && marked(&log).is_empty());
        log.start(300 * PAGE_SIZE);
        log.mark(PAGE_SIZE - 1, 2);
        log.mark(70 * PAGE_SIZE, 2 * PAGE_SIZE);
        log.mark(5 * PAGE_SIZE, 0);
        assert_eq!(marked(&log), [0, 1, 70, 71]);
        assert!(marked(&log).is_empty());
        log.mark(0, 1);
        log.stop();
        log.mark(PAGE_SIZE, 1);
        log.start(300 * PAGE_SIZE);
        assert!(marked(&log).is_empty(), "an earlier log's marks are gone");
    }

    #[test]
    fn what_lies_beyond_the_end_is_ignored() {
        let log = WriteLog::default();
        log.start(64 * PAGE_SIZE);
        log.mark(63 * PAGE_SIZE, 10 * PAGE_SIZE);
        log.mark(u64::MAX, u64::MAX);
        log.mark(1 << 40, 1);
        assert_eq!(marked(&log), [63]);
    }
}
