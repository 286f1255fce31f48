//! Queue numbers, and the state of one pair of a receive and a transmit queue.

use super::receive::{Inbound, Receiver};
use super::transmit::Transmitter;
use crate::virtio::Queue;

/// The maximum number of queue pairs of a device.
pub const MAX_QUEUE_PAIRS: usize = 8;

/// Descriptors of a receive or transmit queue.
const DATA_QUEUE_SIZE: u16 = 256;

/// Descriptors of the control queue.
const CONTROL_QUEUE_SIZE: u16 = 64;

/// The purpose of a queue (§5.1.2), and its pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Receive(usize),
    Transmit(usize),
    Control,
}

impl Role {
    /// Returns the role of queue `index` of a device whose driver knows about `pairs` pairs: the
    /// control queue comes after the last of these.
    pub(super) fn of(index: u16, pairs: usize) -> Option<Self> {
        let pair = usize::from(index / 2);
        let receives = index.is_multiple_of(2);
        match pair {
            _ if pair < pairs && receives => Some(Self::Receive(pair)),
            _ if pair < pairs => Some(Self::Transmit(pair)),
            _ if pair == pairs && receives => Some(Self::Control),
            _ => None,
        }
    }

    /// The ring's number for vhost.
    pub(super) fn ring(self) -> Option<usize> {
        match self {
            Self::Receive(0) => Some(0),
            Self::Transmit(0) => Some(1),
            _ => None,
        }
    }
}

/// Returns the maximum sizes of the queues of this number of pairs, and of the control queue.
pub(super) fn queue_sizes(pairs: usize) -> Vec<u16> {
    let mut sizes = vec![DATA_QUEUE_SIZE; pairs.saturating_mul(2)];
    sizes.push(CONTROL_QUEUE_SIZE);
    sizes
}

/// A receive and a transmit queue, and the state between them.
#[derive(Debug, Default)]
pub(super) struct Pair {
    pub(super) inbound: Inbound,
    pub(super) rx: Option<Receiver>,
    pub(super) tx: Option<Transmitter>,
}

impl Pair {
    pub(super) fn runs(&self) -> bool {
        self.rx.is_some() && self.tx.is_some()
    }

    pub(super) fn stop_receiving(&mut self) -> Option<Queue> {
        self.rx.take().map(Receiver::stop)
    }

    pub(super) fn stop_transmitting(&mut self) -> Option<Queue> {
        self.tx.take().map(Transmitter::stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_queue_follows_the_pairs_that_the_driver_knows_of() {
        use Role::{Control, Receive, Transmit};
        let roles = |pairs| (0..6).map(|n| Role::of(n, pairs)).collect::<Vec<_>>();
        let [rx, tx] = [Some(Receive(0)), Some(Transmit(0))];
        assert_eq!(roles(1), [rx, tx, Some(Control), None, None, None]);
        let [rx1, tx1] = [Some(Receive(1)), Some(Transmit(1))];
        assert_eq!(roles(2), [rx, tx, rx1, tx1, Some(Control), None]);
        assert_eq!(Role::of(u16::MAX, MAX_QUEUE_PAIRS), None);
        assert_eq!(queue_sizes(2), [256, 256, 256, 256, 64]);
    }
}
