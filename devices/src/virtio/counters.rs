//! Counters that the device's owner reads while the device works.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

/// One of a device's counters, as read by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// In snake case; a counter of bytes ends in `_bytes`.
    pub name: &'static str,
    /// Since the device was created.
    pub value: u64,
}

/// A device's counters, readable from any thread without waiting.
pub trait ReadCounters: Debug + Send + Sync {
    /// All of them, in a fixed order.
    fn read(&self) -> Vec<Counter>;
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn one(&self) {
        self.add(1);
    }

    /// The sum so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The sum so far, under a name.
    #[must_use]
    pub fn named(&self, name: &'static str) -> Counter {
        Counter {
            name,
            value: self.get(),
        }
    }
}
