//! The counters of a block device.

use std::time::Duration;

use crate::virtio::{Count, Counter, ReadCounters};

/// The counters of a device since it was created.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: Count,
    pub(super) read_bytes: Count,
    pub(super) writes: Count,
    pub(super) write_bytes: Count,
    pub(super) flushes: Count,
    pub(super) discards: Count,
    pub(super) discard_bytes: Count,
    pub(super) zeroed_bytes: Count,
    pub(super) errors: Count,
    pub(super) limited: Count,
    pub(super) latency: Latency,
}

/// A histogram of request latencies, from the ring and back to it: a request counts for the first
/// limit, in microseconds, that it did not reach.
#[derive(Debug, Default)]
pub(super) struct Latency([Count; LATENCIES.len()]);

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
    pub(super) fn add(&self, taken: Duration) {
        let micros = u64::try_from(taken.as_micros()).unwrap_or(u64::MAX - 1);
        let places = LATENCIES.iter().zip(&self.0);
        let place = places.clone().find(|((limit, _), _)| micros < *limit);
        if let Some((_, count)) = place.or(places.last()) {
            count.one();
        }
    }
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        let latencies = LATENCIES.iter().zip(&self.latency.0);
        let mut all = vec![
            self.reads.named("reads"),
            self.read_bytes.named("read_bytes"),
            self.writes.named("writes"),
            self.write_bytes.named("write_bytes"),
            self.flushes.named("flushes"),
            self.discards.named("discards"),
            self.discard_bytes.named("discard_bytes"),
            self.zeroed_bytes.named("zeroed_bytes"),
            self.errors.named("errors"),
            self.limited.named("limited"),
        ];
        all.extend(latencies.map(|((_, name), count)| count.named(name)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_counts_in_one_class_of_latency() {
        let counters = Counters::default();
        for micros in [0, 15, 16, 255, 256, 1023, 65_535, 65_536, u64::MAX] {
            counters.latency.add(Duration::from_micros(micros));
        }
        counters.latency.add(Duration::MAX);
        let values: Vec<_> = counters.read().iter().map(|c| c.value).collect();
        assert_eq!(values[values.len() - 8..], [2, 1, 1, 2, 0, 0, 1, 3]);
    }
}
