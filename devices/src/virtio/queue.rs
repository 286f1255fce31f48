//! A split virtqueue as a device uses it (§2.7): each chain is taken once and returned once, and
//! whatever the driver wrote into the rings leads to a [`QueueFault`] at worst.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};
use vmm_sys_util::eventfd::EventFd;

use super::descriptors::Descriptors;
use super::queue_error::{QueueConfigError, QueueFault};
use super::read_only::{is_readable, writable_part};
use super::region::{bytes_in_region, slice_in_region};
use super::{Chain, Fault, Interrupt, MAX_SEGMENTS, Progress, Segment};
use crate::{GuestRam, WriteLog};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT` (§2.7.6).
const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// After how long a device whose backend may block ends its turn, whatever it has done of its
/// budget: budgets count bytes, and requests of few bytes may each be slow. A pause waits for the
/// turn's end.
pub(crate) const MAX_TURN: Duration = Duration::from_millis(20);

/// How many emptied segment lists a queue keeps for its next chains.
const SPARE_LISTS: usize = 64;

/// The driver's values in the transport's queue registers, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of descriptors.
    pub size: u32,
    /// Whether the driver enabled the queue.
    pub ready: bool,
    /// Guest physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest physical address of the available ring.
    pub avail_ring: u64,
    /// Guest physical address of the used ring.
    pub used_ring: u64,
}

/// The positions of the device in a queue's rings, which a stopped queue keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// The position in the available ring that is read next.
    pub next_avail: u16,
    /// The position in the used ring that is written next.
    pub next_used: u16,
}

/// The resources that a queue works with, besides its rings.
#[derive(Clone, Debug)]
pub struct QueueResources {
    /// Guest memory.
    pub mem: GuestRam,
    /// Interrupts the driver.
    pub irq: Arc<dyn Interrupt>,
    /// Written when the driver notifies the queue.
    pub kick: Arc<EventFd>,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect_desc: bool,
    /// The positions to continue from; the default for a queue that was never used.
    pub state: QueueState,
    /// Is told of what is written to guest memory.
    pub writes: WriteLog,
}

/// A virtqueue that a device owns while it serves it, with the memory it lies in, the eventfd of
/// the driver's notifications and the interrupt of the driver.
#[derive(Debug)]
pub struct Queue {
    index: u16,
    ring: virtio_queue::Queue,
    /// The memory that devices may write, and that rings must lie in.
    ram: GuestRam,
    /// The same, plus the memory that devices may only read.
    mem: Arc<GuestRam>,
    irq: Arc<dyn Interrupt>,
    kick: Arc<EventFd>,
    /// Whether chains may have indirect tables.
    indirect_desc: bool,
    /// One bit per descriptor: taken and not yet completed.
    in_use: Vec<u64>,
    /// Emptied segment lists, so that a chain needs no allocation.
    spare: Vec<Vec<Segment>>,
    /// Chains completed since [`Self::notify`].
    completed: u16,
    writes: WriteLog,
}

impl Queue {
    /// Checks `config` and creates the queue.
    ///
    /// # Errors
    /// See [`QueueConfigError`]; guest memory was not touched then.
    pub fn new(
        index: u16,
        max_size: u16,
        config: &QueueConfig,
        resources: QueueResources,
    ) -> Result<Self, QueueConfigError> {
        let QueueResources {
            mem,
            irq,
            kick,
            event_idx,
            indirect_desc,
            state,
            writes,
        } = resources;
        let size_error = || QueueConfigError::Size {
            size: config.size,
            max: max_size,
        };
        let size = u16::try_from(config.size).map_err(|_| size_error())?;
        if size == 0 || size > max_size || !size.is_power_of_two() {
            return Err(size_error());
        }
        let n = usize::from(size);
        let ram = writable_part(&mem);
        // §2.7: 16·n, 6 + 2·n and 6 + 8·n bytes; n is at most 32768.
        let areas = [
            (
                "descriptor table",
                config.desc_table,
                16,
                n.saturating_mul(16),
            ),
            (
                "available ring",
                config.avail_ring,
                2,
                n.saturating_mul(2).saturating_add(6),
            ),
            (
                "used ring",
                config.used_ring,
                4,
                n.saturating_mul(8).saturating_add(6),
            ),
        ];
        for (part, addr, align, len) in areas {
            if !addr.is_multiple_of(align) {
                return Err(QueueConfigError::Alignment { part, addr, align });
            }
            if !ram.check_range(GuestAddress(addr), len) {
                return Err(QueueConfigError::Memory { part, addr, len });
            }
        }
        let mut ring = virtio_queue::Queue::new(max_size).map_err(|_| size_error())?;
        ring.try_set_size(size).map_err(|_| size_error())?;
        let [desc_table, avail_ring, used_ring] = areas.map(|(_, addr, ..)| GuestAddress(addr));
        // The alignments were checked above: these cannot fail.
        ring.try_set_desc_table_address(desc_table)
            .map_err(|_| size_error())?;
        ring.try_set_avail_ring_address(avail_ring)
            .map_err(|_| size_error())?;
        ring.try_set_used_ring_address(used_ring)
            .map_err(|_| size_error())?;
        ring.set_event_idx(event_idx);
        ring.set_ready(true);
        ring.set_next_avail(state.next_avail);
        ring.set_next_used(state.next_used);
        Ok(Self {
            index,
            ring,
            ram,
            mem: Arc::new(mem),
            irq,
            kick,
            indirect_desc,
            in_use: vec![0; n.div_ceil(64)],
            spare: Vec::new(),
            completed: 0,
            writes,
        })
    }

    /// The queue's index in its device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// The driver's configuration.
    #[must_use]
    pub fn config(&self) -> QueueConfig {
        QueueConfig {
            size: u32::from(self.ring.size()),
            ready: true,
            desc_table: self.ring.desc_table(),
            avail_ring: self.ring.avail_ring(),
            used_ring: self.ring.used_ring(),
        }
    }

    /// The positions in the rings.
    #[must_use]
    pub fn state(&self) -> QueueState {
        QueueState {
            next_avail: self.ring.next_avail(),
            next_used: self.ring.next_used(),
        }
    }

    /// Sets the positions after another server of the queue has left it here, with nothing in
    /// flight.
    pub(crate) fn set_state(&mut self, state: QueueState) {
        self.ring.set_next_avail(state.next_avail);
        self.ring.set_next_used(state.next_used);
    }

    /// The eventfd that is written when the driver notifies this queue: for backends that wait
    /// for it themselves, such as vhost.
    #[must_use]
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// The driver's interrupt.
    #[must_use]
    pub fn interrupt(&self) -> &Arc<dyn Interrupt> {
        &self.irq
    }

    /// The memory that chains of this queue point into. Their device-readable parts may lie in
    /// memory that is read-only.
    #[must_use]
    pub fn memory(&self) -> &GuestRam {
        &self.mem
    }

    /// As [`Self::memory`], to be kept while the queue changes.
    #[must_use]
    pub(crate) fn shared_memory(&self) -> Arc<GuestRam> {
        self.mem.clone()
    }

    /// The part of [`Self::memory`] that devices may write.
    #[must_use]
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// How many chains the driver has made available that were not taken yet.
    ///
    /// # Errors
    /// If the ring cannot be read.
    pub fn available(&self) -> Result<u16, QueueFault> {
        let index = self
            .ring
            .avail_idx(&self.ram, Ordering::Acquire)
            .map_err(QueueFault::Ring)?;
        Ok(index.0.wrapping_sub(self.ring.next_avail()))
    }

    /// Takes the next available chain, or `None` when the driver has made none available.
    ///
    /// # Errors
    /// Any violation in the ring or the chain; then the queue must not be used any more.
    #[allow(clippy::should_implement_trait)] // Fallible, as an iterator's is not.
    pub fn next(&mut self) -> Result<Option<Chain>, QueueFault> {
        let size = self.ring.size();
        let available = self.available()?;
        if available > size {
            let error = virtio_queue::Error::InvalidAvailRingIndex;
            return Err(QueueFault::AvailIndex(error));
        }
        if available == 0 {
            return Ok(None);
        }
        let head = self.read_head()?;
        let (word, bit) = slot(head);
        let used = self
            .in_use
            .get_mut(word)
            .filter(|_| head < size)
            .ok_or(QueueFault::HeadOutOfRange { head, size })?;
        if *used & bit != 0 {
            return Err(QueueFault::HeadInUse { head });
        }

        let mut chain = Chain {
            head,
            segments: self.spare.pop().unwrap_or_default(),
            readable: 0,
            readable_len: 0,
            writable_len: 0,
            descriptors: 0,
        };
        // The iterator ends both after the last descriptor and at a broken link; only the last
        // descriptor has no NEXT flag.
        let mut ended = false;
        let table = GuestAddress(self.ring.desc_table());
        let mut descriptors = Descriptors::new(&self.ram, table, size, head);
        if !self.indirect_desc {
            descriptors = descriptors.without_tables();
        }
        for descriptor in descriptors {
            ended = !descriptor.has_next();
            let (addr, len) = (descriptor.addr(), descriptor.len());
            if chain.descriptors == MAX_SEGMENTS {
                return Err(QueueFault::ChainTooLong { head });
            }
            chain.descriptors = chain.descriptors.saturating_add(1);
            if len == 0 {
                continue;
            }
            let in_region = bytes_in_region(&self.ram, addr) >= Some(len.into());
            let is_ram = in_region || self.ram.check_range(addr, len as usize);
            if !is_ram && (descriptor.is_write_only() || !is_readable(&self.mem, addr, len)) {
                return Err(QueueFault::SegmentMemory { head, addr: addr.0 });
            }
            if !descriptor.is_write_only() && chain.writable_len > 0 {
                return Err(QueueFault::SegmentOrder { head });
            }
            chain.push(&self.mem, addr, len, descriptor.is_write_only());
            if chain.segments.len() > MAX_SEGMENTS {
                return Err(QueueFault::ChainTooLong { head });
            }
        }
        if !ended {
            return Err(QueueFault::ChainBroken { head });
        }
        *used |= bit;
        Ok(Some(chain))
    }

    /// Takes the next entry of the available ring. `virtio_queue::Queue::iter` is not used, since
    /// it takes a ring at address 0 for one that was never set.
    fn read_head(&mut self) -> Result<u16, QueueFault> {
        let next = self.ring.next_avail();
        let slot = next.checked_rem(self.ring.size()).unwrap_or(0);
        // §2.7.6: flags and index, then 2 bytes for each entry; all of it lies in guest memory.
        let offset = u64::from(slot).saturating_mul(2).saturating_add(4);
        let at = GuestAddress(self.ring.avail_ring().saturating_add(offset));
        let head: u16 = self
            .ram
            .load(at, Ordering::Acquire)
            .map_err(QueueFault::AvailRing)?;
        self.ring.set_next_avail(next.wrapping_add(1));
        Ok(u16::from_le(head))
    }

    /// Takes the next chain; if there is none, asks the driver to notify.
    ///
    /// # Errors
    /// As [`Self::next`] and [`Self::enable_kicks`].
    pub fn next_or_enable_kicks(&mut self) -> Result<Option<Chain>, QueueFault> {
        loop {
            if let Some(chain) = self.next()? {
                return Ok(Some(chain));
            }
            if !self.enable_kicks()? {
                return Ok(None);
            }
        }
    }

    /// Returns a chain to the driver, after the device wrote the first `len` bytes of the
    /// device-writable part. The driver is not interrupted yet: see [`Self::notify`].
    ///
    /// # Errors
    /// If the used ring cannot be written.
    pub fn complete(&mut self, chain: Chain, len: u32) -> Result<(), QueueFault> {
        self.complete_all(std::iter::once((chain, len)))
    }

    /// As [`Self::complete`] for several chains that become visible to the driver together: those
    /// of one frame (§5.1.6.4), for example.
    ///
    /// # Errors
    /// If the used ring cannot be written.
    pub fn complete_all(
        &mut self,
        chains: impl IntoIterator<Item = (Chain, u32)>,
    ) -> Result<(), QueueFault> {
        let size = self.ring.size().max(1);
        let mut index = self.ring.next_used();
        for (chain, len) in chains {
            let head = self.release(chain);
            let slot = u64::from(index.checked_rem(size).unwrap_or(0));
            // The whole ring was found to lie in guest memory: 4 bytes, then 8 for each element.
            let offset = slot.saturating_mul(8).saturating_add(4);
            let at = GuestAddress(self.ring.used_ring().saturating_add(offset));
            let element = [u32::from(head).to_le(), len.to_le()];
            match slice_in_region(&self.ram, at, size_of_val(&element)) {
                Some(slice) => slice.copy_from(&element),
                None => self
                    .ram
                    .write_obj(element, at)
                    .map_err(QueueFault::UsedRing)?,
            }
            index = index.wrapping_add(1);
            self.completed = self.completed.saturating_add(1);
        }
        self.ring.set_next_used(index);
        let at = GuestAddress(self.ring.used_ring().saturating_add(2));
        let stored = self.ram.store(index.to_le(), at, Ordering::Release);
        self.mark_used_ring();
        stored.map_err(QueueFault::UsedRing)
    }

    /// Tells the log that the used ring was written.
    fn mark_used_ring(&self) {
        if self.writes.is_on() {
            let len = u64::from(self.ring.size()).saturating_mul(8);
            self.writes
                .mark(self.ring.used_ring(), len.saturating_add(6));
        }
    }

    /// Puts back the chain that [`Self::next`] returned last, as if it had not been taken.
    pub fn undo_pop(&mut self, chain: Chain) {
        self.release(chain);
        self.ring.go_to_previous_position();
    }

    /// Marks the chain as no longer in use, and returns its head.
    fn release(&mut self, chain: Chain) -> u16 {
        if self.writes.is_on() {
            // Only the device knows how much of it was written.
            for part in chain.writable_parts() {
                self.writes.mark(part.addr.0, part.len.into());
            }
        }
        let Chain {
            head, mut segments, ..
        } = chain;
        let (word, bit) = slot(head);
        if let Some(used) = self.in_use.get_mut(word) {
            *used &= !bit;
        }
        if self.spare.len() < SPARE_LISTS {
            segments.clear();
            self.spare.push(segments);
        }
        head
    }

    /// Takes chains, with notifications off, until there are none or `budget` is used up, and
    /// interrupts the driver. `each` completes a chain now or later and returns how many bytes it
    /// handled; the cost of the descriptors is added to that. The last call may exceed the budget;
    /// a call that returns `usize::MAX` is the last one.
    ///
    /// # Errors
    /// Any violation in the ring or a chain, and the errors of `each`.
    pub fn serve(
        &mut self,
        budget: usize,
        mut each: impl FnMut(&mut Self, Chain) -> Result<usize, Fault>,
    ) -> Result<Progress, Fault> {
        let mut spent = 0usize;
        loop {
            self.disable_kicks()?;
            while spent < budget {
                let Some(chain) = self.next()? else {
                    break;
                };
                spent = spent.saturating_add(chain.cost());
                spent = spent.saturating_add(each(self, chain)?);
            }
            self.notify()?;
            if spent >= budget {
                return Ok(Progress::More);
            }
            if !self.enable_kicks()? {
                return Ok(Progress::Idle);
            }
        }
    }

    /// Interrupts the driver when chains were completed since the last call and the driver
    /// wants an interrupt for them (§2.7.7).
    ///
    /// # Errors
    /// If the ring cannot be read.
    pub fn notify(&mut self) -> Result<(), QueueFault> {
        let completed = std::mem::take(&mut self.completed);
        if completed == 0 {
            return Ok(());
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        let wanted = if self.ring.event_idx_enabled() {
            // After the ring's heads; the field was found to lie in guest memory.
            let offset = u64::from(self.ring.size()).saturating_mul(2);
            let at = self.ring.avail_ring().saturating_add(offset);
            let event: u16 = self
                .mem
                .load(GuestAddress(at.saturating_add(4)), Ordering::Relaxed)
                .map_err(QueueFault::Flags)?;
            // Whether the index passed `used_event` since the last look (§2.7.7.2).
            let passed = self
                .ring
                .next_used()
                .wrapping_sub(u16::from_le(event))
                .wrapping_sub(1);
            passed < completed
        } else {
            let flags: u16 = self
                .mem
                .load(GuestAddress(self.ring.avail_ring()), Ordering::Relaxed)
                .map_err(QueueFault::Flags)?;
            u16::from_le(flags) & AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            self.irq.signal_queue(self.index);
        }
        Ok(())
    }

    /// Asks the driver not to notify while the device polls the ring anyway.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub fn disable_kicks(&mut self) -> Result<(), QueueFault> {
        let disabled = self.ring.disable_notification(&self.ram);
        self.mark_used_ring();
        disabled.map_err(QueueFault::Ring)
    }

    /// Asks the driver to notify of the next chain that it makes available, although some were not
    /// taken yet. Returns how many are available then.
    ///
    /// # Errors
    /// If the ring cannot be accessed.
    pub fn enable_kicks_for_more(&mut self) -> Result<u16, QueueFault> {
        self.enable_kicks()?;
        if self.ring.event_idx_enabled() {
            // `avail_event` (§2.7.10) names the chain that is taken next, which is available
            // already: the driver would not notify of a later one. It lies after the used ring's
            // elements.
            let index = self.ring.next_avail().wrapping_add(self.available()?);
            let offset = u64::from(self.ring.size())
                .saturating_mul(8)
                .saturating_add(4);
            let at = GuestAddress(self.ring.used_ring().saturating_add(offset));
            self.ram
                .store(index.to_le(), at, Ordering::SeqCst)
                .map_err(QueueFault::UsedRing)?;
            std::sync::atomic::fence(Ordering::SeqCst);
            self.mark_used_ring();
        }
        self.available()
    }

    /// Asks the driver to notify again. Returns `true` if more chains became available meanwhile,
    /// for which no notification will arrive.
    ///
    /// # Errors
    /// If the ring cannot be accessed.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueFault> {
        let enabled = self.ring.enable_notification(&self.ram);
        self.mark_used_ring();
        enabled.map_err(QueueFault::Ring)
    }
}

/// Word and bit of a descriptor in the in-use set.
fn slot(head: u16) -> (usize, u64) {
    (usize::from(head >> 6), 1 << (head & 63))
}

#[cfg(test)]
#[path = "queue_model_tests.rs"]
mod model_tests;
#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
