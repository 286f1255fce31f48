//! Counters of the device.

use crate::virtio::{Count, Counter, ReadCounters};

/// Counters since the device was created.
#[derive(Debug, Default)]
pub(in crate::vsock) struct Counters {
    pub(in crate::vsock) from_host: Count,
    pub(in crate::vsock) from_guest: Count,
    pub(in crate::vsock) refused: Count,
    pub(in crate::vsock) handshakes_dropped: Count,
    pub(in crate::vsock) tx_packets: Count,
    pub(in crate::vsock) tx_bytes: Count,
    pub(in crate::vsock) rx_packets: Count,
    pub(in crate::vsock) rx_bytes: Count,
    pub(in crate::vsock) resets_sent: Count,
    pub(in crate::vsock) resets_received: Count,
    pub(in crate::vsock) invalid_packets: Count,
    pub(in crate::vsock) protocol_errors: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.from_host.named("connections_from_host"),
            self.from_guest.named("connections_from_guest"),
            self.refused.named("connections_refused"),
            self.handshakes_dropped.named("handshakes_dropped"),
            self.tx_packets.named("tx_packets"),
            self.tx_bytes.named("tx_bytes"),
            self.rx_packets.named("rx_packets"),
            self.rx_bytes.named("rx_bytes"),
            self.resets_sent.named("resets_sent"),
            self.resets_received.named("resets_received"),
            self.invalid_packets.named("invalid_packets"),
            self.protocol_errors.named("protocol_errors"),
        ]
    }
}
