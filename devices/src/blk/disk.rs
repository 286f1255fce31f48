//! The interface of a block device to its backend.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use vm_memory::VolatileSlice;

use crate::GuestRam;

/// Bytes per sector of the request header and of `capacity` (§5.2.4), whatever the block size.
pub const SECTOR_SIZE: u64 = 512;

/// The number of whole sectors of a disk.
pub(super) fn sectors(disk: &dyn Disk) -> u64 {
    disk.len().checked_div(SECTOR_SIZE).unwrap_or(0)
}

/// One request to a [`Disk`]. Offsets are in bytes, multiples of 512; the range from the offset,
/// with the length of the slices, lies within the disk.
#[derive(Debug)]
pub enum Operation<'a, 'm> {
    /// Fill the slices.
    Read {
        /// The offset on the disk.
        offset: u64,
        /// Guest memory, at most [`crate::virtio::MAX_SEGMENTS`] pieces.
        slices: &'a [VolatileSlice<'m>],
    },
    /// Store the slices.
    Write {
        /// The offset on the disk.
        offset: u64,
        /// Guest memory, at most [`crate::virtio::MAX_SEGMENTS`] pieces.
        slices: &'a [VolatileSlice<'m>],
    },
    /// Make completed writes durable.
    Flush,
    /// Give the range back to the host; its content is undefined afterwards.
    Discard {
        /// The offset on the disk.
        offset: u64,
        /// Bytes, at least one.
        len: u64,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// The offset on the disk.
        offset: u64,
        /// Bytes, at least one.
        len: u64,
        /// Whether the range may be given back to the host.
        unmap: bool,
    },
}

/// The disk of an empty slot: one sector of zeroes.
#[derive(Debug)]
pub(super) struct EmptySlot;

impl Disk for EmptySlot {
    fn len(&self) -> u64 {
        SECTOR_SIZE
    }

    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        Ok(Some(Box::new(Self)))
    }

    fn submit(&mut self, _: &GuestRam, _token: u16, operation: Operation<'_, '_>) -> Submitted {
        Submitted::Done(match operation {
            Operation::Read { slices, .. } => {
                for slice in slices {
                    slice.copy_from(&[0u8; SECTOR_SIZE as usize]);
                }
                Ok(())
            }
            Operation::Flush => Ok(()),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        })
    }
}

/// The immediate result of submitting a request.
#[derive(Debug)]
#[must_use]
pub enum Submitted {
    /// It is done.
    Done(io::Result<()>),
    /// Its result will be returned by [`Disk::completed`].
    Queued,
}

/// A request that a backend finished later.
#[derive(Debug)]
pub struct Completion {
    /// The token it was submitted with.
    pub token: u16,
    /// The result.
    pub result: io::Result<()>,
}

/// The blocks in which the host reads and writes a disk, in bytes: a driver that knows them makes
/// requests of whole blocks. They are advice: any whole sectors may be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Of anything smaller, the host first reads a whole block to write it, and gives nothing back
    /// for a discard. A power of two.
    pub physical_block: u32,
    /// The unit of allocation, and so of large requests; 0 if it does not matter.
    pub optimal: u32,
}

impl Default for Topology {
    /// Sectors.
    fn default() -> Self {
        Self {
            physical_block: SECTOR_SIZE as u32,
            optimal: 0,
        }
    }
}

/// A disk of raw sectors. Backends that complete requests immediately implement only `len` and
/// `submit`.
pub trait Disk: Debug + Send {
    /// Returns the disk's size in bytes; bytes beyond a multiple of 512 are not presented.
    fn len(&self) -> u64;

    /// Whether the disk has no sector.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the blocks in which the host reads and writes it.
    fn topology(&self) -> Topology {
        Topology::default()
    }

    /// Reads the size again, for [`Self::len`].
    ///
    /// # Errors
    /// If it cannot be determined.
    fn refresh(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Clones the disk for another thread: each sees what the other has written, and a flush of
    /// either makes durable what both have completed. `None` if the disk cannot be cloned: then one
    /// engine serves all queues of a device.
    ///
    /// # Errors
    /// If descriptors run out.
    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        Ok(None)
    }

    /// Starts a request. An operation that the host does not support fails with
    /// [`io::ErrorKind::Unsupported`] or `EOPNOTSUPP`. A backend that returns [`Submitted::Queued`]
    /// keeps a clone of `mem` until the completion, so that the slices' memory stays mapped.
    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted;

    /// Starts what was queued since the last call: a backend may collect requests until then.
    ///
    /// # Errors
    /// If not all can be started. Those that cannot be are returned by [`Self::completed`] with an
    /// error; those that were started complete as usual.
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the next completion, without waiting.
    fn completed(&mut self) -> Option<Completion> {
        None
    }

    /// Waits until at least one request in flight has finished.
    ///
    /// # Errors
    /// If waiting is impossible. Requests in flight are lost then, and the disk is not used any
    /// more: it may still write to guest memory.
    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Writes metadata that the backend keeps in memory and that another process would need to open
    /// the disk's files. Called when the device's queues stop, with nothing in flight.
    ///
    /// # Errors
    /// If it cannot be written.
    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the next range from `from` on that may differ from a new disk of the same kind: of
    /// an overlay, from its image; of a file, from zeroes. `None` if there is none.
    ///
    /// # Errors
    /// If that cannot be determined.
    fn next_change(&mut self, from: u64) -> io::Result<Option<Range<u64>>> {
        Ok((from < self.len()).then(|| from..self.len()))
    }

    /// Readable when [`Self::completed`] may return a completion.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
