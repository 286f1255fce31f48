//! The counters of a block device.

use crate::virtio::{Count, Counter, Latency, ReadCounters};

/// The counters of a device since it was created.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Requests that were taken from the queues; those that are answered have a latency.
    pub(super) begun: Count,
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

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        let mut all = vec![
            self.begun.named("begun"),
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
        all.extend(self.latency.read());
        all
    }
}
