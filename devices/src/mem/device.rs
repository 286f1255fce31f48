//! The memory device and its only queue.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vm_memory::{GuestAddress, GuestMemory};

use super::blocks::Blocks;
use crate::GuestRam;
use crate::virtio::{
    Chain, ConfigSpace, Count, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, Queues,
    ReadCounters, RestoreError, SavedDevice, StartError, VirtioDevice, release,
};

/// Bytes of a block: the size of a huge page.
pub const BLOCK_SIZE: u64 = 2 << 20;

const QUEUE_SIZE: u16 = 64;

/// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE` (§5.15.3).
const F_UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;

/// Bytes before the event loop gets control back; a block counts as [`BLOCK_COST`] of them.
const BUDGET: usize = 256 << 10;
const BLOCK_COST: usize = 16 << 10;

/// Blocks that are given back to the host per turn: the kernel takes time for each page of them.
const BLOCKS_PER_TURN: usize = BUDGET / BLOCK_COST;

/// Requests and answers (§5.15.6).
const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;
const ACK: u16 = 0;
const NACK: u16 = 1;
const ERROR: u16 = 3;
const STATE_PLUGGED: u16 = 0;
const STATE_UNPLUGGED: u16 = 1;
const STATE_MIXED: u16 = 2;
const REQUEST_LEN: usize = 24;
const ANSWER_LEN: usize = 10;

/// Offsets in `struct virtio_mem_config` (§5.15.4).
const PLUGGED: usize = 40;
const REQUESTED: usize = 48;

/// Guest memory that a memory device plugs and unplugs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemRegion {
    /// Guest physical address; a multiple of [`BLOCK_SIZE`], and for Linux on x86 of 128 MiB.
    pub start: u64,
    /// Bytes; a multiple of [`BLOCK_SIZE`].
    pub len: u64,
}

/// A virtio memory device.
#[derive(Debug)]
pub struct MemDevice {
    queues: Queues,
    region: MemRegion,
    blocks: Blocks,
    /// The request that is carried out in parts; no other one is taken meanwhile (§5.15.6).
    unplugging: Option<Unplugging>,
    /// In bytes.
    requested: u64,
    /// Notified once that much is plugged in.
    waiting: Option<Sender<()>>,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

/// A request to unplug blocks, which stay plugged in until all their memory is given back: a
/// request that is put back into the ring is then legal once more.
#[derive(Debug)]
struct Unplugging {
    chain: Chain,
    range: Range<usize>,
    /// The first block whose memory is not given back yet.
    next: usize,
}

#[derive(Debug, Default)]
struct Counters {
    plugged: Count,
    unplugged: Count,
    refused: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.plugged.named("plugged_bytes"),
            self.unplugged.named("unplugged_bytes"),
            self.refused.named("refused_requests"),
        ]
    }
}

impl MemDevice {
    /// Creates a device for `region`, of which nothing is plugged in or requested.
    ///
    /// # Errors
    /// If the region is not aligned to blocks, or does not end within 64 bits.
    pub fn new(region: MemRegion) -> io::Result<Self> {
        let aligned = (region.start | region.len).is_multiple_of(BLOCK_SIZE);
        let count = usize::try_from(region.len / BLOCK_SIZE);
        match count {
            Ok(count) if aligned && region.start.checked_add(region.len).is_some() => {
                Ok(Self::with_blocks(region, count))
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{} bytes at {:#x} are not blocks of 2 MiB",
                    region.len, region.start
                ),
            )),
        }
    }

    fn with_blocks(region: MemRegion, count: usize) -> Self {
        let words = [BLOCK_SIZE, 0, region.start, region.len, region.len, 0, 0];
        let config: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Self {
            queues: Queues::new(1),
            region,
            blocks: Blocks::new(count),
            unplugging: None,
            requested: 0,
            waiting: None,
            config: Arc::new(ConfigSpace::new(config)),
            counters: Arc::default(),
        }
    }

    /// The region of guest memory.
    #[must_use]
    pub fn region(&self) -> MemRegion {
        self.region
    }

    /// Asks the driver to have `bytes` of the region plugged in, rounded up to blocks and at most
    /// all of it. It does so as far as its guest can: memory in use is not unplugged.
    pub fn request(&mut self, bytes: u64) {
        let bytes = bytes.min(self.region.len);
        self.requested = bytes.next_multiple_of(BLOCK_SIZE);
        self.config.update(REQUESTED, &self.requested.to_le_bytes());
    }

    /// As [`Self::request`]. The returned channel receives a message when exactly the requested
    /// memory is plugged in; its sender is dropped if another size is requested first.
    pub fn request_and_tell(&mut self, bytes: u64) -> Receiver<()> {
        let (tell, told) = channel();
        self.waiting = Some(tell);
        self.request(bytes);
        self.tell();
        told
    }

    /// Notifies the waiting caller if the driver has reached the requested size.
    fn tell(&mut self) {
        if self.plugged() == self.requested
            && let Some(waiting) = self.waiting.take()
        {
            // The receiver is gone if the caller has timed out.
            let _ = waiting.send(());
        }
    }

    /// Bytes that the driver is requested to have plugged in.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// Bytes that are plugged in.
    #[must_use]
    pub fn plugged(&self) -> u64 {
        (self.blocks.plugged() as u64).saturating_mul(BLOCK_SIZE)
    }

    /// The offset in the region, in bytes, after which nothing is plugged in.
    #[must_use]
    pub fn plugged_end(&self) -> u64 {
        (self.blocks.end() as u64).saturating_mul(BLOCK_SIZE)
    }

    /// Serves the queue: first the request that is partly done.
    fn serve(&mut self, queue: &mut Queue) -> Result<Progress, Fault> {
        let mut room = BLOCKS_PER_TURN;
        let spent = self.go_on(queue, &mut room)?;
        let budget = BUDGET.saturating_sub(spent);
        queue.serve(budget, |queue, chain| self.begin(queue, chain, &mut room))
    }

    /// Handles one request, or begins to; returns the cost. `room` is how many blocks may be given
    /// back in this turn.
    fn begin(&mut self, queue: &mut Queue, chain: Chain, room: &mut usize) -> Result<usize, Fault> {
        let mut request = [0; REQUEST_LEN];
        // For UNPLUG_ALL only the type is read.
        let len = chain.readable_len().min(REQUEST_LEN);
        let given = request.get_mut(..len).unwrap_or(&mut []);
        chain.read(queue.memory(), 0, given)?;
        let (kind, range) = self.parse(&request);
        let (answer, state, blocks) = match (kind, range) {
            (PLUG, Some(range)) => self.plug(range),
            (UNPLUG, Some(range)) if self.blocks.each(range.clone()) => {
                return self.unplug(queue, chain, range, room);
            }
            (UNPLUG_ALL, _) => return self.unplug(queue, chain, self.blocks.all(), room),
            (UNPLUG, Some(range)) => (ERROR, 0, range.len()),
            (STATE, Some(range)) => (ACK, self.state(&range), range.len()),
            _ => (ERROR, 0, 0),
        };
        self.answer(queue, chain, answer, state)?;
        Ok(blocks.saturating_mul(BLOCK_COST))
    }

    fn answer(
        &mut self,
        queue: &mut Queue,
        chain: Chain,
        answer: u16,
        state: u16,
    ) -> Result<(), Fault> {
        if answer != ACK {
            self.counters.refused.one();
        }
        let plugged = self.plugged().to_le_bytes();
        self.config.update_quietly(PLUGGED, &plugged);
        self.tell();
        let mut bytes = [0; ANSWER_LEN];
        for (to, from) in bytes.iter_mut().zip(answer.to_le_bytes()) {
            *to = from;
        }
        for (to, from) in bytes.iter_mut().skip(8).zip(state.to_le_bytes()) {
            *to = from;
        }
        let len = chain.writable_len().min(ANSWER_LEN);
        chain.write(queue.memory(), 0, bytes.get(..len).unwrap_or(&[]))?;
        // At most ANSWER_LEN.
        let written = u32::try_from(len).unwrap_or(0);
        queue.complete(chain, written)?;
        Ok(())
    }

    /// Returns the request's type, and its blocks if they exist.
    fn parse(&self, request: &[u8; REQUEST_LEN]) -> (u16, Option<Range<usize>>) {
        let number = |at: usize, len: usize| {
            let bytes = request.iter().skip(at).take(len).rev();
            bytes.fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
        };
        let (address, count) = (number(8, 8), number(16, 2));
        let range = || {
            let offset = address.checked_sub(self.region.start)?;
            let len = count.checked_mul(BLOCK_SIZE)?;
            let end = offset.checked_add(len)?;
            let exists = count > 0 && offset.is_multiple_of(BLOCK_SIZE) && end <= self.region.len;
            let first = usize::try_from(offset / BLOCK_SIZE).ok()?;
            let last = usize::try_from(end / BLOCK_SIZE).ok()?;
            exists.then_some(first..last)
        };
        (u16::try_from(number(0, 2)).unwrap_or(u16::MAX), range())
    }

    fn plug(&mut self, range: Range<usize>) -> (u16, u16, usize) {
        let count = range.len();
        if self.blocks.any(range.clone()) {
            return (ERROR, 0, count);
        }
        let bytes = (count as u64).saturating_mul(BLOCK_SIZE);
        if self.plugged().saturating_add(bytes) > self.requested {
            return (NACK, 0, count);
        }
        self.blocks.set(range, true);
        self.counters.plugged.add(bytes);
        (ACK, 0, count)
    }

    /// Unplugs blocks as far as there is room in this turn; returns the cost.
    fn unplug(
        &mut self,
        queue: &mut Queue,
        chain: Chain,
        range: Range<usize>,
        room: &mut usize,
    ) -> Result<usize, Fault> {
        let next = range.start;
        self.unplugging = Some(Unplugging { chain, range, next });
        self.go_on(queue, room)
    }

    /// Continues the request that is partly done, if there is one. Returns the cost: the rest of
    /// any budget if it is still not done.
    fn go_on(&mut self, queue: &mut Queue, room: &mut usize) -> Result<usize, Fault> {
        let Some(Unplugging { chain, range, next }) = self.unplugging.take() else {
            return Ok(0);
        };
        let end = range.end.min(next.saturating_add(*room));
        let count = end.saturating_sub(next);
        *room = room.saturating_sub(count);
        self.give_back(queue.memory(), next..end);
        if end < range.end {
            self.unplugging = Some(Unplugging {
                chain,
                range,
                next: end,
            });
            return Ok(usize::MAX);
        }
        let before = self.plugged();
        self.blocks.set(range, false);
        let unplugged = before.saturating_sub(self.plugged());
        self.counters.unplugged.add(unplugged);
        self.answer(queue, chain, ACK, 0)?;
        Ok(count.saturating_mul(BLOCK_COST))
    }

    /// Gives the memory of blocks back to the host, whether they are plugged in or not.
    fn give_back(&self, mem: &GuestRam, range: Range<usize>) {
        let bytes = |blocks: usize| (blocks as u64).saturating_mul(BLOCK_SIZE);
        let start = self.region.start.saturating_add(bytes(range.start));
        let len = usize::try_from(bytes(range.len())).unwrap_or(usize::MAX);
        for slice in mem.get_slices(GuestAddress(start), len) {
            // Ignored: pages that cannot be released, and a region that is not guest memory.
            let _ = slice.map(|slice| release(&slice));
        }
    }

    fn state(&self, range: &Range<usize>) -> u16 {
        match self.blocks.any(range.clone()) {
            false => STATE_UNPLUGGED,
            true if self.blocks.each(range.clone()) => STATE_PLUGGED,
            true => STATE_MIXED,
        }
    }
}

impl VirtioDevice for MemDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Mem,
            queue_sizes: vec![QUEUE_SIZE],
            features: F_UNPLUGGED_INACCESSIBLE,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        let mut queue = self.queues.stop(index)?;
        if let Some(Unplugging { chain, .. }) = self.unplugging.take() {
            // It begins anew when the queue runs again, here or in a clone.
            queue.undo_pop(chain);
        }
        Some(queue)
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        let Some(mut queue) = self.queues.stop(index) else {
            return Ok(Progress::Idle);
        };
        let progress = self.serve(&mut queue);
        // Its slot is free: it was taken from there.
        let _ = self.queues.start(queue);
        progress
    }

    fn save(&self) -> SavedDevice {
        let mut bytes = self.region.start.to_le_bytes().to_vec();
        bytes.extend(self.requested.to_le_bytes());
        bytes.extend(self.blocks.bits());
        SavedDevice { version: 1, bytes }
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let invalid = |what| RestoreError::Invalid { what };
        let words = saved.of_version(1)?.split_first_chunk::<8>();
        let (start, rest) = words.ok_or(invalid("a memory device without an address"))?;
        let words = rest.split_first_chunk::<8>();
        let (requested, bits) = words.ok_or(invalid("a memory device without a request"))?;
        if u64::from_le_bytes(*start) != self.region.start {
            return Err(invalid("a memory device elsewhere"));
        }
        let requested = u64::from_le_bytes(*requested);
        if requested > self.region.len || !requested.is_multiple_of(BLOCK_SIZE) {
            return Err(invalid("a memory device asked for what it cannot have"));
        }
        let count = self.blocks.all().len();
        self.blocks = Blocks::from_bits(bits, count)
            .ok_or(invalid("a memory device of another number of blocks"))?;
        self.requested = requested;
        self.config.update(PLUGGED, &self.plugged().to_le_bytes());
        self.config.update(REQUESTED, &requested.to_le_bytes());
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
