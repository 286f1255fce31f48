//! Transmit: from the driver to the backend.

use std::io;

use vm_memory::VolatileSlice;

use super::config::LinkState;
use super::counters::Counters;
use super::header::{HEADER_LEN, Header};
use super::nic::Nic;
use super::offloads::Offloads;
use super::receive::{BUDGET, FRAME_COST, Turn};
use crate::GuestRam;
use crate::virtio::{Chain, Fault, Limiter, Queue, SpareList};

/// The transmit queue and the offloads that the driver may use.
#[derive(Debug)]
pub(super) struct Transmitter {
    queue: Queue,
    offered: Offloads,
    spare: SpareList,
}

impl Transmitter {
    pub(super) fn new(queue: Queue, offered: Offloads) -> Self {
        Self {
            queue,
            offered,
            spare: SpareList::default(),
        }
    }

    pub(super) fn stop(self) -> Queue {
        self.queue
    }

    /// Sends the frames that the driver made available, within budget and rate.
    pub(super) fn turn(
        &mut self,
        nic: &mut dyn Nic,
        limiter: &mut Limiter,
        link: LinkState,
        counters: &Counters,
    ) -> Result<Turn, Fault> {
        let mem = self.queue.shared_memory();
        let mut slices = self.spare.take();
        let mut spent = 0usize;
        let turn = loop {
            self.queue.disable_kicks()?;
            let kept = loop {
                if spent >= BUDGET {
                    break Some(Turn::More);
                }
                if let Some(wait) = limiter.wait() {
                    counters.tx_limited.one();
                    break Some(Turn::Wait(wait));
                }
                if is_full(nic, counters) {
                    break Some(Turn::Blocked);
                }
                let Some(chain) = self.queue.next()? else {
                    break None;
                };
                let len = match link {
                    LinkState::Up => self.send(&chain, nic, counters, &mem, &mut slices)?,
                    LinkState::Down => {
                        counters.tx_dropped.one();
                        0
                    }
                };
                limiter.charge(len);
                spent = spent
                    .saturating_add(len)
                    .saturating_add(chain.cost())
                    .saturating_add(FRAME_COST);
                self.queue.complete(chain, 0)?;
            };
            self.queue.notify()?;
            if let Some(turn) = kept {
                break turn;
            }
            if !self.queue.enable_kicks()? {
                break match is_full(nic, counters) {
                    // The last frame was not sent completely.
                    true => Turn::Blocked,
                    false => Turn::Idle,
                };
            }
        };
        self.spare.put_back(slices);
        Ok(turn)
    }

    /// Sends one frame or drops it; returns its length.
    fn send<'m>(
        &self,
        chain: &Chain,
        nic: &mut dyn Nic,
        counters: &Counters,
        mem: &'m GuestRam,
        slices: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<usize, Fault> {
        let mut raw = [0; HEADER_LEN];
        let Some(len) = chain.readable_len().checked_sub(HEADER_LEN) else {
            return Err(Fault::protocol("a network frame shorter than its header"));
        };
        chain.read(mem, 0, &mut raw)?;
        let Ok(header) = Header::decode(raw).for_backend(len, self.offered) else {
            counters.tx_malformed.one();
            return Ok(0);
        };
        chain.readable_slices(mem, HEADER_LEN, len, slices)?;
        match nic.send(&header.encode(), slices) {
            Ok(()) => {
                counters.tx_frames.one();
                counters.tx_bytes.add(len as u64);
                if header.is_segmented() {
                    counters.tx_segmented.one();
                }
            }
            // Ethernet does not guarantee delivery, and there is no place to store it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => counters.tx_dropped.one(),
            Err(_) => counters.tx_errors.one(),
        }
        Ok(len)
    }
}

/// Whether the backend takes no frames now.
fn is_full(nic: &mut dyn Nic, counters: &Counters) -> bool {
    match nic.flush() {
        Ok(()) => false,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            counters.tx_blocked.one();
            true
        }
        Err(_) => {
            counters.tx_errors.one();
            false
        }
    }
}
