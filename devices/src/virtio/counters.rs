//! Counters that the device's owner reads while the device works.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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

/// A histogram of request latencies, from the ring and back to it: a request counts for the first
/// limit, in microseconds, that it did not reach.
#[derive(Debug, Default)]
pub(crate) struct Latency([Count; LATENCIES.len()]);

const LATENCIES: [(u64, &str); 8] = [
    (16, "under_16us"),
    (64, "under_64us"),
    (256, "under_256us"),
    (1 << 10, "under_1ms"),
    (4 << 10, "under_4ms"),
    (16 << 10, "under_16ms"),
    (64 << 10, "under_65ms"),
    (u64::MAX, "65ms_or_more"),
];

impl Latency {
    /// Counts a request that took this long.
    pub(crate) fn add(&self, taken: Duration) {
        let micros = u64::try_from(taken.as_micros()).unwrap_or(u64::MAX - 1);
        let places = LATENCIES.iter().zip(&self.0);
        let place = places.clone().find(|((limit, _), _)| micros < *limit);
        if let Some((_, count)) = place.or(places.last()) {
            count.one();
        }
    }

    /// All classes, in order.
    pub(crate) fn read(&self) -> impl Iterator<Item = Counter> {
        let classes = LATENCIES.iter().zip(&self.0);
        classes.map(|((_, name), count)| count.named(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_counts_in_one_class_of_latency() {
        let latency = Latency::default();
        for micros in [0, 15, 16, 255, 256, 1023, 65_535, 65_536, u64::MAX] {
            latency.add(Duration::from_micros(micros));
        }
        latency.add(Duration::MAX);
        let values: Vec<_> = latency.read().map(|counter| counter.value).collect();
        assert_eq!(values, [2, 1, 1, 2, 0, 0, 1, 3]);
    }
}
