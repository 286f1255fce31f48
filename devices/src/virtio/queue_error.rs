//! Why a queue cannot be used: its configuration, and what a driver wrote into its rings.

use vm_memory::GuestMemoryError;

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

/// A driver's mistake in a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueFault {
    /// The available index ran ahead by more than the queue's size.
    #[error("the available index jumped by more than the queue's size")]
    AvailIndex(#[source] virtio_queue::Error),
    /// A head that is not a descriptor of the table.
    #[error("descriptor {head} was made available in a queue of {size}")]
    HeadOutOfRange {
        /// The index in the available ring.
        head: u16,
        /// The queue's size.
        size: u16,
    },
    /// A head that the device is still processing.
    #[error("descriptor {head} was made available while it is in use")]
    HeadInUse {
        /// The index in the available ring.
        head: u16,
    },
    /// A chain with a cycle, a bad link, a bad indirect table, or more than 2³² bytes.
    #[error("the descriptor chain at {head} is broken or has a loop")]
    ChainBroken {
        /// The chain's head.
        head: u16,
    },
    /// More than [`super::MAX_SEGMENTS`] segments.
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
    /// A segment outside guest memory.
    #[error("the descriptor chain at {head} has a segment at {addr:#x}, outside guest memory")]
    SegmentMemory {
        /// The chain's head.
        head: u16,
        /// The segment's guest physical address.
        addr: u64,
    },
    /// As [`Self::Ring`], for a head in the available ring.
    #[error("the available ring could not be read")]
    AvailRing(#[source] GuestMemoryError),
    /// A ring access failed although the ring was found to lie in guest memory.
    #[error("a ring could not be accessed")]
    Ring(#[source] virtio_queue::Error),
    /// As [`Self::Ring`], for the flags and the event index of the available ring.
    #[error("the ring's flags could not be read")]
    Flags(#[source] GuestMemoryError),
    /// As [`Self::Ring`], for the used ring.
    #[error("the used ring could not be written")]
    UsedRing(#[source] GuestMemoryError),
}
