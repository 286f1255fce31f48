//! Receive: from the backend to the driver.

use std::collections::VecDeque;
use std::time::Duration;

use vm_memory::VolatileSlice;

use super::counters::Counters;
use super::header::{BEYOND_MTU, HEADER_LEN, Header, MAX_FRAME, MIN_FRAME};
use super::host::Arrivals;
use super::offloads::Offloads;
use crate::GuestRam;
use crate::virtio::{Chain, Fault, Queue, SpareList};

/// Bytes, and descriptors counted as bytes, before the event loop gets control back.
pub(super) const BUDGET: usize = 1 << 20;

/// The cost of a frame besides its bytes and descriptors: a system call.
pub(super) const FRAME_COST: usize = 1024;

/// Enough room for any frame.
const MAX_FRAME_WITH_HEADER: usize = HEADER_LEN + MAX_FRAME;

/// After this number of frames in a row that fit one chain, the next one is expected to fit, too.
const SHORT_FRAMES: u8 = 4;

/// Segments of one vectored read, besides the header.
const MAX_SLICES: usize = 1000;

/// How a turn of one direction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing can be done now.
    Idle,
    /// The budget is spent.
    More,
    /// A rate limit was reached: do not continue before this time has passed.
    Wait(Duration),
    /// The backend takes no frames until it is writable again.
    Blocked,
}

/// The state that outlives a stop of the queue.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// The queue of the backend whose turn it is, counted from the pair's own.
    next: usize,
    /// A frame that was read before there was room for it.
    held: Option<Held>,
    /// Room for one frame, allocated when it is first needed.
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Held {
    header: Header,
    len: usize,
}

impl Inbound {
    pub(super) fn forget(&mut self) {
        self.held = None;
    }
}

/// The receive queue and the chains taken from it.
#[derive(Debug)]
pub(super) struct Receiver {
    queue: Queue,
    mergeable: bool,
    accepted: Offloads,
    /// The maximum size in bytes of a frame without segmentation offload.
    longest: usize,
    /// Chains for the next frames, in order.
    chains: VecDeque<Chain>,
    /// The number of writable bytes in these chains.
    room: usize,
    /// Frames in a row that fitted one chain, counted up to [`SHORT_FRAMES`].
    short_frames: u8,
    /// The part of the budget that is used up in this turn.
    spent: usize,
    spare: SpareList,
}

impl Receiver {
    /// `mtu` is the MTU that the driver was told, if it negotiated that.
    pub(super) fn new(queue: Queue, mergeable: bool, accepted: Offloads, mtu: Option<u16>) -> Self {
        Self {
            queue,
            mergeable,
            accepted,
            longest: mtu.map_or(MAX_FRAME, |mtu| BEYOND_MTU.saturating_add(mtu.into())),
            chains: VecDeque::new(),
            room: 0,
            short_frames: 0,
            spent: 0,
            spare: SpareList::default(),
        }
    }

    /// Sets the offloads that the driver accepts from now on.
    pub(super) fn accept(&mut self, offloads: Offloads) {
        self.accepted = offloads;
    }

    /// Returns the queue, with no chain taken.
    pub(super) fn stop(mut self) -> Queue {
        while let Some(chain) = self.chains.pop_back() {
            self.queue.undo_pop(chain);
        }
        self.queue
    }

    /// Delivers frames to the driver, within the available frames and buffers, the budget and the
    /// rate.
    pub(super) fn turn(
        &mut self,
        arrivals: &mut Arrivals<'_>,
        inbound: &mut Inbound,
        counters: &Counters,
    ) -> Result<Turn, Fault> {
        let mem = self.queue.shared_memory();
        let mut slices = self.spare.take();
        self.spent = 0;
        let turn = loop {
            if self.spent >= BUDGET {
                break Turn::More;
            }
            if inbound.held.is_none() {
                if !arrivals.are_ready() {
                    break Turn::Idle;
                }
                if let Some(wait) = arrivals.limiter.wait() {
                    counters.rx_limited.one();
                    break Turn::Wait(wait);
                }
                let room = if self.expects_short() {
                    1
                } else {
                    MAX_FRAME_WITH_HEADER
                };
                self.fill(room)?;
                if self.chains.is_empty() {
                    counters.rx_starved.one();
                    break Turn::Idle;
                }
                if !self.fetch(arrivals, inbound, counters, &mem, &mut slices)? {
                    break Turn::Idle;
                }
            }
            if let Some(held) = inbound.held.take()
                && !self.deliver_held(&held, inbound, counters, &mem)?
            {
                inbound.held = Some(held);
                break Turn::Idle;
            }
            self.spent = self.spent.saturating_add(FRAME_COST);
        };
        self.spare.put_back(slices);
        self.queue.notify()?;
        Ok(turn)
    }

    /// Takes chains until they have `room` bytes. If there are too few, the driver is asked to
    /// notify of more.
    fn fill(&mut self, room: usize) -> Result<(), Fault> {
        while self.room < room && (self.mergeable || self.chains.is_empty()) {
            let Some(chain) = self.queue.next_or_enable_kicks()? else {
                break;
            };
            if chain.writable_len() < HEADER_LEN {
                return Err(Fault::protocol(
                    "a network receive buffer without room for a header",
                ));
            }
            self.room = self.room.saturating_add(chain.writable_len());
            self.chains.push_back(chain);
        }
        Ok(())
    }

    /// Whether the next frame is likely to fit one chain, as acknowledgements do: then the memory
    /// for a frame of any length need not be looked up.
    fn expects_short(&self) -> bool {
        self.mergeable && self.short_frames >= SHORT_FRAMES
    }

    /// Reads one frame: directly into the chains if it fits there, otherwise into the scratch
    /// buffer, from where it is delivered once there is room. `false` if there is no frame.
    fn fetch<'m>(
        &mut self,
        arrivals: &mut Arrivals<'_>,
        inbound: &mut Inbound,
        counters: &Counters,
        mem: &'m GuestRam,
        slices: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<bool, Fault> {
        let mut raw = [0; HEADER_LEN];
        let expects_short = self.expects_short();
        // The number of bytes that go directly to the driver.
        let direct = match expects_short {
            true => self.gather_one(mem, slices)?,
            false if self.room >= MAX_FRAME_WITH_HEADER && self.gather(mem, slices)? => MAX_FRAME,
            false => 0,
        };
        let next = &mut inbound.next;
        let got = if direct >= MAX_FRAME {
            arrivals.receive(next, &mut raw, slices, counters)
        } else {
            inbound.scratch.resize(MAX_FRAME, 0);
            let rest = inbound.scratch.get_mut(direct..).unwrap_or(&mut []);
            let rest = VolatileSlice::from(rest);
            match slices.as_slice() {
                [one] if direct > 0 => arrivals.receive(next, &mut raw, &[*one, rest], counters),
                _ => arrivals.receive(next, &mut raw, &[rest], counters),
            }
        };
        let Some(len) = got else {
            return Ok(false);
        };
        arrivals.limiter.charge(len);
        let header = Header::decode(raw);
        self.expect_like(len);
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            counters.rx_errors.one();
        } else if len <= direct {
            if self.takes(header, len, counters) {
                self.finish(header, len, counters, mem)?;
            }
        } else {
            // The whole frame is held: it may have to wait for more chains.
            if let (Some(one), Some(scratch)) = (slices.first(), inbound.scratch.get_mut(..direct))
            {
                one.copy_to(scratch);
            }
            inbound.held = Some(Held { header, len });
        }
        Ok(true)
    }

    /// Expects the next frame to have this length.
    fn expect_like(&mut self, len: usize) {
        let first = self.chains.front().map_or(0, Chain::writable_len);
        self.short_frames = match len.saturating_add(HEADER_LEN) <= first {
            true => self.short_frames.saturating_add(1).min(SHORT_FRAMES),
            false => 0,
        };
    }

    /// Whether the driver may get this frame, which is dropped otherwise.
    fn takes(&self, header: Header, len: usize, counters: &Counters) -> bool {
        // §5.1.4.1: the MTU does not apply to frames that will be segmented.
        let fits = header.has_segments() || len <= self.longest;
        let takes = fits && header.is_accepted(self.accepted);
        if !takes {
            counters.rx_dropped.one();
        }
        takes
    }

    /// Collects the memory after the header in the chains, for a frame of any length; `false` if it
    /// is in more pieces than one call takes.
    fn gather<'m>(
        &self,
        mem: &'m GuestRam,
        slices: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<bool, Fault> {
        slices.clear();
        let mut offset = HEADER_LEN;
        let mut missing = MAX_FRAME;
        for chain in &self.chains {
            let len = chain.writable_len().saturating_sub(offset).min(missing);
            chain.append_writable_slices(mem, offset, len, slices)?;
            if slices.len() > MAX_SLICES {
                return Ok(false);
            }
            missing = missing.saturating_sub(len);
            offset = 0;
        }
        Ok(missing == 0)
    }

    /// Collects the memory after the header in the first chain; returns its length, or 0 if it is
    /// in several pieces.
    fn gather_one<'m>(
        &self,
        mem: &'m GuestRam,
        slices: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<usize, Fault> {
        slices.clear();
        let Some(chain) = self.chains.front() else {
            return Ok(0);
        };
        let len = chain.writable_len().saturating_sub(HEADER_LEN);
        let len = len.min(MAX_FRAME);
        chain.writable_slices(mem, HEADER_LEN, len, slices)?;
        match slices.as_slice() {
            [one] => Ok(one.len()),
            _ => {
                slices.clear();
                Ok(0)
            }
        }
    }

    /// Copies a frame from the scratch buffer. `false` if more buffers are needed; a frame for
    /// which the queue can never have enough is dropped.
    fn deliver_held(
        &mut self,
        held: &Held,
        inbound: &Inbound,
        counters: &Counters,
        mem: &GuestRam,
    ) -> Result<bool, Fault> {
        // It may have waited while the driver changed its offloads.
        if !self.takes(held.header, held.len, counters) {
            return Ok(true);
        }
        let need = held.len.saturating_add(HEADER_LEN);
        self.fill(need)?;
        if self.room < need {
            let all = usize::from(self.queue.size());
            let full = !self.mergeable && !self.chains.is_empty();
            if full || self.chains.len() >= all {
                counters.rx_dropped.one();
                return Ok(true);
            }
            counters.rx_starved.one();
            return Ok(false);
        }
        let mut rest = inbound.scratch.get(..held.len).unwrap_or(&[]);
        let mut offset = HEADER_LEN;
        for chain in &self.chains {
            let len = chain.writable_len().saturating_sub(offset);
            let (now, later) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            chain.write(mem, offset, now)?;
            rest = later;
            offset = 0;
            if rest.is_empty() {
                break;
            }
        }
        self.finish(held.header, held.len, counters, mem)?;
        Ok(true)
    }

    /// Returns the chains that hold a frame of `len` bytes to the driver, all at the same time
    /// (§5.1.6.4).
    fn finish(
        &mut self,
        header: Header,
        len: usize,
        counters: &Counters,
        mem: &GuestRam,
    ) -> Result<(), Fault> {
        let total = len.saturating_add(HEADER_LEN);
        let mut buffers = 0u16;
        let mut covered = 0usize;
        for chain in &self.chains {
            buffers = buffers.saturating_add(1);
            covered = covered.saturating_add(chain.writable_len());
            if covered >= total {
                break;
            }
        }
        if let Some(first) = self.chains.front() {
            let header = header.for_driver(self.accepted, buffers).encode();
            first.write(mem, 0, &header)?;
        }
        let mut rest = total;
        let (room, spent) = (&mut self.room, &mut self.spent);
        *spent = spent.saturating_add(total);
        let used = self.chains.drain(..usize::from(buffers)).map(|chain| {
            let len = chain.writable_len();
            *room = room.saturating_sub(len);
            *spent = spent.saturating_add(chain.cost());
            let written = len.min(rest);
            rest = rest.saturating_sub(written);
            // At most MAX_FRAME.
            (chain, u32::try_from(written).unwrap_or(0))
        });
        self.queue.complete_all(used)?;
        counters.rx_frames.one();
        counters.rx_bytes.add(len as u64);
        if header.is_segmented() {
            counters.rx_segmented.one();
        }
        Ok(())
    }
}
