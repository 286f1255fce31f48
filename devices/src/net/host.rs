//! The backend's queues, as seen by the driver's queue pairs.

use std::io;

use vm_memory::VolatileSlice;

use super::counters::Counters;
use super::header::HEADER_LEN;
use super::nic::Nic;
use crate::virtio::Limiter;

/// One queue of the backend.
#[derive(Debug)]
pub(super) struct HostQueue {
    pub(super) nic: Box<dyn Nic>,
    /// It may have a frame: since it was last reported, it has not returned `WouldBlock`.
    pub(super) ready: bool,
}

impl HostQueue {
    pub(super) fn new(nic: Box<dyn Nic>) -> Self {
        Self { nic, ready: false }
    }
}

/// The queues of the backend whose frames one pair receives: its own, and every `active`th after
/// it, whose pairs are not active. So all are read, however many pairs the driver uses.
#[derive(Debug)]
pub(super) struct Arrivals<'a> {
    /// From the pair's own queue on.
    queues: &'a mut [HostQueue],
    active: usize,
    pub(super) limiter: &'a mut Limiter,
}

impl<'a> Arrivals<'a> {
    /// Returns those of `pair` if `active` pairs are active; `None` if it is not one of these.
    pub(super) fn of(
        queues: &'a mut [HostQueue],
        pair: usize,
        active: usize,
        limiter: &'a mut Limiter,
    ) -> Option<Self> {
        let queues = queues.get_mut(pair..).filter(|_| pair < active)?;
        Some(Self {
            queues,
            active,
            limiter,
        })
    }

    /// Whether one of the queues may have a frame.
    pub(super) fn are_ready(&mut self) -> bool {
        let mut queues = self.queues.iter().step_by(self.active);
        queues.any(|queue| queue.ready)
    }

    /// Receives one frame from any queue that has one, starting with queue `next`; `None` if none
    /// has. The queues take turns.
    pub(super) fn receive(
        &mut self,
        next: &mut usize,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
        counters: &Counters,
    ) -> Option<usize> {
        let count = self.queues.len().div_ceil(self.active);
        let first = (*next).min(count);
        for at in (first..count).chain(0..first) {
            let queue = self.queues.get_mut(at.saturating_mul(self.active));
            let Some(queue) = queue.filter(|queue| queue.ready) else {
                continue;
            };
            match queue.nic.receive(header, frame) {
                Ok(len) => {
                    *next = at.saturating_add(1);
                    return Some(len);
                }
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        counters.rx_errors.one();
                    }
                    // The next frame will be reported as an edge.
                    queue.ready = false;
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryNic;
    use super::*;

    /// Returns the queues whose frames `pair` receives if `active` pairs are active.
    fn heard(pair: usize, active: usize) -> Vec<u8> {
        let (mut queues, wires): (Vec<_>, Vec<_>) = (0..5)
            .map(|_| {
                let (nic, wire) = MemoryNic::pair();
                (HostQueue::new(Box::new(nic)), wire)
            })
            .unzip();
        for (number, wire) in (0..).zip(&wires) {
            wire.send(&[number; 2]);
            wire.send(&[number; 2]);
        }
        for queue in &mut queues {
            queue.ready = true;
        }
        let mut limiter = Limiter::default();
        let Some(mut arrivals) = Arrivals::of(&mut queues, pair, active, &mut limiter) else {
            return Vec::new();
        };
        let (mut next, mut heard, counters) = (0, Vec::new(), Counters::default());
        let mut bytes = [0; 2];
        while let Some(len) = arrivals.receive(
            &mut next,
            &mut [0; HEADER_LEN],
            &[VolatileSlice::from(bytes.as_mut_slice())],
            &counters,
        ) {
            assert_eq!(len, 2);
            heard.push(bytes[0]);
        }
        assert!(!arrivals.are_ready());
        heard
    }

    #[test]
    fn every_queue_of_the_backend_is_read_by_one_active_pair_and_they_take_turns() {
        assert_eq!(heard(0, 1), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
        assert_eq!(heard(0, 2), [0, 2, 4, 0, 2, 4]);
        assert_eq!(heard(1, 2), [1, 3, 1, 3]);
        assert_eq!(heard(1, 3), [1, 4, 1, 4]);
        assert_eq!(heard(4, 5), [4, 4]);
        for (pair, active) in [(1, 1), (4, 4), (5, 5), (9, 2)] {
            assert_eq!(heard(pair, active), []);
        }
    }
}
