//! Requests in progress, and how much of each is done.

use std::time::Instant;

use super::request::Request;
use crate::virtio::Chain;

/// Bytes of one piece. Between pieces the event loop may do other work, and the driver is
/// interrupted.
pub(super) const CHUNK_SIZE: usize = 1 << 20;

/// The maximum number of queues of a device.
pub(super) const MAX_QUEUES: usize = 8;

/// The cost of a flush in a budget of bytes.
pub(super) const FLUSH_COST: usize = CHUNK_SIZE / 4;

/// A request that is partly done.
#[derive(Debug)]
pub(super) struct Flight {
    /// The index of its queue.
    pub(super) queue: u16,
    pub(super) chain: Chain,
    pub(super) request: Request,
    pub(super) since: Instant,
    /// Bytes that were transferred.
    pub(super) done: usize,
    /// Bytes that the disk is working on now.
    pub(super) piece: usize,
    /// All data is transferred, and is being made durable.
    pub(super) flushing: bool,
}

impl Flight {
    /// A number that no other request in flight has.
    pub(super) fn token(&self) -> u16 {
        // Queues have no more than 256 descriptors, and there are fewer than 256 of them.
        self.queue << 8 | self.chain.head() & 0xff
    }

    /// Bytes to transfer.
    pub(super) fn len(&self) -> usize {
        match self.request {
            Request::Read { len, .. } | Request::Write { len, .. } => len,
            _ => 0,
        }
    }

    /// Bytes that count for the rate limit: including zeroes that the disk may have to write.
    pub(super) fn rated(&self) -> usize {
        match self.request {
            Request::WriteZeroes { len, .. } => usize::try_from(len).unwrap_or(usize::MAX),
            _ => self.len(),
        }
    }

    /// Bytes that are left to do; other operations count with a fixed cost.
    pub(super) fn left(&self) -> usize {
        match self.request {
            Request::Read { len, .. } | Request::Write { len, .. } => len.saturating_sub(self.done),
            Request::WriteZeroes { len, .. } => usize::try_from(len).unwrap_or(usize::MAX),
            Request::Flush | Request::Discard { .. } => FLUSH_COST,
            Request::GetId { .. } | Request::Refuse(_) => 0,
        }
    }

    /// Whether it changes the disk.
    pub(super) fn changes(&self) -> bool {
        matches!(
            self.request,
            Request::Write { .. } | Request::Discard { .. } | Request::WriteZeroes { .. }
        )
    }
}

/// Requests that the disk is working on, by [`Flight::token`].
#[derive(Debug, Default)]
pub(super) struct InFlight {
    flights: Vec<Option<Flight>>,
    of_queue: [usize; MAX_QUEUES],
}

impl InFlight {
    pub(super) fn insert(&mut self, flight: Flight) {
        let token = usize::from(flight.token());
        if self.flights.len() <= token {
            // Grows with the heads that a driver uses.
            let len = token.saturating_add(1).next_power_of_two();
            self.flights.resize_with(len, || None);
        }
        let queue = flight.queue;
        if let Some(place) = self.flights.get_mut(token) {
            *place = Some(flight);
            self.count(queue, |count| count.saturating_add(1));
        }
    }

    pub(super) fn remove(&mut self, token: u16) -> Option<Flight> {
        let flight = self.flights.get_mut(usize::from(token))?.take()?;
        self.count(flight.queue, |count| count.saturating_sub(1));
        Some(flight)
    }

    /// The number of requests of a queue.
    pub(super) fn of_queue(&self, queue: u16) -> usize {
        let count = self.of_queue.get(usize::from(queue));
        count.copied().unwrap_or_default()
    }

    pub(super) fn len(&self) -> usize {
        self.of_queue.iter().sum()
    }

    /// Forgets them all.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn count(&mut self, queue: u16, change: impl FnOnce(usize) -> usize) {
        if let Some(count) = self.of_queue.get_mut(usize::from(queue)) {
            *count = change(*count);
        }
    }
}
