//! A split virtqueue as a device uses it (§2.7): chains come out once, go back once, and
//! whatever the driver wrote into the rings ends in a [`QueueFault`] at worst.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::{Chain, Interrupt, MAX_SEGMENTS, Segment};
use crate::GuestRam;

/// `VIRTQ_AVAIL_F_NO_INTERRUPT` (§2.7.6).
const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// How many spent segment lists a queue keeps for its next chains.
const SPARE_LISTS: usize = 64;

/// What the driver wrote into the transport's queue registers, unchecked.
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

/// Why a queue cannot be used as the driver configured it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueConfigError {
    /// §2.7: a power of two, no larger than the device's maximum.
    #[error("queue size {size} is not a power of two of at most {max}")]
    Size {
        /// The driver's size.
        size: u32,
        /// The device's limit.
        max: u16,
    },
    /// §2.7: 16, 2 and 4 bytes.
    #[error("the {part} at {addr:#x} is not aligned to {align} bytes")]
    Alignment {
        /// Which of the three areas.
        part: &'static str,
        /// Its guest physical address.
        addr: u64,
        /// The required alignment.
        align: u64,
    },
    /// The area must lie in guest memory.
    #[error("the {part} at {addr:#x}, {len} bytes long, lies outside guest memory")]
    Memory {
        /// Which of the three areas.
        part: &'static str,
        /// Its guest physical address.
        addr: u64,
        /// Its length in bytes.
        len: usize,
    },
}

/// What a driver did wrong in a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueFault {
    /// The available index ran ahead by more than the queue's size.
    #[error("the available index jumped by more than the queue's size")]
    AvailIndex(#[source] virtio_queue::Error),
    /// A head that is no descriptor of the table.
    #[error("descriptor {head} was made available in a queue of {size}")]
    HeadOutOfRange {
        /// The index in the available ring.
        head: u16,
        /// The queue's size.
        size: u16,
    },
    /// A head that the device still works on.
    #[error("descriptor {head} was made available while it is in use")]
    HeadInUse {
        /// The index in the available ring.
        head: u16,
    },
    /// A chain with a cycle, a bad link, a bad indirect table, or more than 2³² bytes.
    #[error("the descriptor chain at {head} does not end")]
    ChainBroken {
        /// The chain's head.
        head: u16,
    },
    /// More than [`MAX_SEGMENTS`] segments.
    #[error("the descriptor chain at {head} has too many segments")]
    ChainTooLong {
        /// The chain's head.
        head: u16,
    },
    /// §2.7.4.2: device-readable segments come first.
    #[error("the descriptor chain at {head} has a readable segment after a writable one")]
    SegmentOrder {
        /// The chain's head.
        head: u16,
    },
    /// A segment that is not guest memory.
    #[error("the descriptor chain at {head} has a segment at {addr:#x}, outside guest memory")]
    SegmentMemory {
        /// The chain's head.
        head: u16,
        /// The segment's guest physical address.
        addr: u64,
    },
    /// A ring access failed although the ring was found to lie in guest memory.
    #[error("a ring could not be accessed")]
    Ring(#[source] virtio_queue::Error),
    /// As [`Self::Ring`], for the ring's flags.
    #[error("the ring's flags could not be read")]
    Flags(#[source] GuestMemoryError),
}

/// A virtqueue that a running device owns, with the memory it lies in and the interrupt of its
/// driver.
#[derive(Debug)]
pub struct Queue {
    index: u16,
    ring: virtio_queue::Queue,
    mem: GuestRam,
    irq: Arc<dyn Interrupt>,
    /// One bit per descriptor: taken and not yet completed.
    in_use: Vec<u64>,
    /// Emptied segment lists, so that a chain costs no allocation.
    spare: Vec<Vec<Segment>>,
    /// Something was completed since [`Self::notify`].
    completed: bool,
}

impl Queue {
    /// Checks `config` and makes the queue.
    ///
    /// # Errors
    /// See [`QueueConfigError`]; nothing of guest memory was touched then.
    pub fn new(
        index: u16,
        max_size: u16,
        config: &QueueConfig,
        event_idx: bool,
        mem: GuestRam,
        irq: Arc<dyn Interrupt>,
    ) -> Result<Self, QueueConfigError> {
        let size_error = || QueueConfigError::Size {
            size: config.size,
            max: max_size,
        };
        let size = u16::try_from(config.size).map_err(|_| size_error())?;
        if size == 0 || size > max_size || !size.is_power_of_two() {
            return Err(size_error());
        }
        let n = usize::from(size);
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
            if addr == 0 || !mem.check_range(GuestAddress(addr), len) {
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
        Ok(Self {
            index,
            ring,
            mem,
            irq,
            in_use: vec![0; n.div_ceil(64)],
            spare: Vec::new(),
            completed: false,
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

    /// The memory that chains of this queue point into.
    #[must_use]
    pub fn memory(&self) -> &GuestRam {
        &self.mem
    }

    /// Takes the next available chain, or `None` when the driver has made none available.
    ///
    /// # Errors
    /// Whatever is wrong with ring or chain; the queue must not be used any more then.
    #[allow(clippy::should_implement_trait)] // fallible, as the name in the design says
    pub fn next(&mut self) -> Result<Option<Chain>, QueueFault> {
        let size = self.ring.size();
        let mut available = self.ring.iter(&self.mem).map_err(|error| match error {
            virtio_queue::Error::InvalidAvailRingIndex => QueueFault::AvailIndex(error),
            other => QueueFault::Ring(other),
        })?;
        let Some(mut descriptors) = available.next() else {
            return Ok(None);
        };
        let head = descriptors.head_index();
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
        };
        // The iterator ends alike after the last descriptor and at a broken link; only the
        // last descriptor has no NEXT flag.
        let mut ended = false;
        for descriptor in descriptors.by_ref() {
            ended = !descriptor.has_next();
            let (addr, len) = (descriptor.addr(), descriptor.len());
            if len == 0 {
                continue;
            }
            if chain.segments.len() == MAX_SEGMENTS {
                return Err(QueueFault::ChainTooLong { head });
            }
            if !self.mem.check_range(addr, len as usize) {
                return Err(QueueFault::SegmentMemory { head, addr: addr.0 });
            }
            if descriptor.is_write_only() {
                chain.writable_len = chain.writable_len.saturating_add(len as usize);
            } else if chain.writable_len > 0 {
                return Err(QueueFault::SegmentOrder { head });
            } else {
                chain.readable = chain.readable.saturating_add(1);
                chain.readable_len = chain.readable_len.saturating_add(len as usize);
            }
            chain.segments.push(Segment { addr, len });
        }
        if !ended {
            return Err(QueueFault::ChainBroken { head });
        }
        *used |= bit;
        Ok(Some(chain))
    }

    /// Gives a chain back to the driver, of which the device wrote the first `len` bytes of
    /// the device-writable part. The driver is not interrupted yet: see [`Self::notify`].
    ///
    /// # Errors
    /// When the used ring cannot be written.
    pub fn complete(&mut self, chain: Chain, len: u32) -> Result<(), QueueFault> {
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
        self.completed = true;
        self.ring
            .add_used(&self.mem, head, len)
            .map_err(QueueFault::Ring)
    }

    /// Puts back the chain that [`Self::next`] gave last, as if it had not been taken.
    pub fn undo(&mut self, chain: Chain) {
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
        self.ring.go_to_previous_position();
    }

    /// Interrupts the driver when chains were completed since the last call and the driver
    /// wants to hear of them (§2.7.7).
    ///
    /// # Errors
    /// When the ring cannot be read.
    pub fn notify(&mut self) -> Result<(), QueueFault> {
        if !std::mem::take(&mut self.completed) {
            return Ok(());
        }
        let wanted = if self.ring.event_idx_enabled() {
            self.ring
                .needs_notification(&self.mem)
                .map_err(QueueFault::Ring)?
        } else {
            std::sync::atomic::fence(Ordering::SeqCst);
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
    /// When the ring cannot be written.
    pub fn disable_kicks(&mut self) -> Result<(), QueueFault> {
        self.ring
            .disable_notification(&self.mem)
            .map_err(QueueFault::Ring)
    }

    /// Asks the driver to notify again. `true` when more chains became available meanwhile,
    /// for which no notification will come.
    ///
    /// # Errors
    /// When the ring cannot be accessed.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueFault> {
        self.ring
            .enable_notification(&self.mem)
            .map_err(QueueFault::Ring)
    }
}

/// Word and bit of a descriptor in the in-use set.
fn slot(head: u16) -> (usize, u64) {
    (usize::from(head >> 6), 1 << (head & 63))
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
