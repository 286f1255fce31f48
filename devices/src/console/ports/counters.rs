//! What a device with several ports counts.

use crate::virtio::{Count, Counter, ReadCounters};

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) tx_bytes: Count,
    pub(super) lost_bytes: Count,
    pub(super) rx_bytes: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.tx_bytes.named("tx_bytes"),
            self.lost_bytes.named("lost_bytes"),
            self.rx_bytes.named("rx_bytes"),
        ]
    }
}
