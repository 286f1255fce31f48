//! The counters of a network device.

use crate::virtio::{Count, Counter, ReadCounters};

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) rx_frames: Count,
    pub(super) rx_bytes: Count,
    pub(super) rx_segmented: Count,
    pub(super) rx_dropped: Count,
    pub(super) rx_errors: Count,
    pub(super) rx_starved: Count,
    pub(super) rx_limited: Count,
    pub(super) tx_frames: Count,
    pub(super) tx_bytes: Count,
    pub(super) tx_segmented: Count,
    pub(super) tx_dropped: Count,
    pub(super) tx_errors: Count,
    pub(super) tx_malformed: Count,
    pub(super) tx_limited: Count,
    pub(super) tx_blocked: Count,
    pub(super) vhost_starts: Count,
    pub(super) commands: Count,
    pub(super) commands_refused: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.rx_frames.named("rx_frames"),
            self.rx_bytes.named("rx_bytes"),
            self.rx_segmented.named("rx_segmented"),
            self.rx_dropped.named("rx_dropped"),
            self.rx_errors.named("rx_errors"),
            self.rx_starved.named("rx_starved"),
            self.rx_limited.named("rx_limited"),
            self.tx_frames.named("tx_frames"),
            self.tx_bytes.named("tx_bytes"),
            self.tx_segmented.named("tx_segmented"),
            self.tx_dropped.named("tx_dropped"),
            self.tx_errors.named("tx_errors"),
            self.tx_malformed.named("tx_malformed"),
            self.tx_limited.named("tx_limited"),
            self.tx_blocked.named("tx_blocked"),
            self.vhost_starts.named("vhost_starts"),
            self.commands.named("commands"),
            self.commands_refused.named("commands_refused"),
        ]
    }
}
