//! What a block device needs of its backend.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

use vm_memory::VolatileSlice;

use crate::GuestRam;

/// One request to a [`Disk`]. Offsets are in bytes, multiples of 512, and lie, with the length
/// of the slices, within the disk.
#[derive(Debug)]
pub enum Operation<'a, 'm> {
    /// Fill the slices.
    Read {
        /// Where on the disk.
        offset: u64,
        /// Guest memory, at most [`crate::virtio::MAX_SEGMENTS`] pieces.
        slices: &'a [VolatileSlice<'m>],
    },
    /// Store the slices.
    Write {
        /// Where on the disk.
        offset: u64,
        /// Guest memory, at most [`crate::virtio::MAX_SEGMENTS`] pieces.
        slices: &'a [VolatileSlice<'m>],
    },
    /// Make completed writes durable.
    Flush,
    /// Give the range back to the host; what it reads as afterwards is the host's affair.
    Discard {
        /// Where on the disk.
        offset: u64,
        /// Bytes, at least one.
        len: u64,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Where on the disk.
        offset: u64,
        /// Bytes, at least one.
        len: u64,
        /// Whether the range may be given back to the host.
        unmap: bool,
    },
}

/// A disk that is not there yet: one sector of zeroes.
#[derive(Debug)]
pub(super) struct EmptySlot;

impl Disk for EmptySlot {
    fn len(&self) -> u64 {
        super::SECTOR_SIZE
    }

    fn another(&self) -> io::Result<Option<Box<dyn Disk>>> {
        Ok(Some(Box::new(Self)))
    }

    fn submit(&mut self, _: &GuestRam, _token: u16, operation: Operation<'_, '_>) -> Submitted {
        Submitted::Done(match operation {
            Operation::Read { slices, .. } => {
                for slice in slices {
                    slice.copy_from(&[0u8; super::SECTOR_SIZE as usize]);
                }
                Ok(())
            }
            Operation::Flush => Ok(()),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        })
    }
}

/// What became of a request at once.
#[derive(Debug)]
#[must_use]
pub enum Submitted {
    /// It is done.
    Done(io::Result<()>),
    /// It will come out of [`Disk::completed`].
    Queued,
}

/// A request that a backend finished later.
#[derive(Debug)]
pub struct Completion {
    /// The token it was submitted with.
    pub token: u16,
    /// How it went.
    pub result: io::Result<()>,
}

/// A disk of raw sectors. Backends that work at once implement only the first two methods.
pub trait Disk: Debug + Send {
    /// The disk's size in bytes; what exceeds a multiple of 512 is not presented.
    fn len(&self) -> u64;

    /// Whether the disk has no sector.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks at the size again, for [`Self::len`].
    ///
    /// # Errors
    /// When it cannot be found.
    fn refresh(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The same disk once more, for another thread: what either has written, the other reads, and
    /// a flush of either makes durable what both have completed. `None` where there is
    /// nothing of the kind; a device with several queues serves them by one engine then.
    ///
    /// # Errors
    /// When descriptors run out.
    fn another(&self) -> io::Result<Option<Box<dyn Disk>>> {
        Ok(None)
    }

    /// Begins a request. An operation that the host does not have fails with
    /// [`io::ErrorKind::Unsupported`] or `EOPNOTSUPP`. A backend that answers [`Submitted::Queued`]
    /// keeps a clone of `mem` until the completion, so that the slices' memory stays mapped.
    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted;

    /// Starts what was queued since the last call: a backend may collect requests until then.
    ///
    /// # Errors
    /// When not all can be started. Requests that were not come out of [`Self::completed`] with an
    /// error then; those that were are finished as always.
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The next finished request, without waiting.
    fn completed(&mut self) -> Option<Completion> {
        None
    }

    /// Waits until at least one request in flight has finished.
    ///
    /// # Errors
    /// When waiting is impossible. Requests in flight are lost then, and the disk is not used any
    /// more: it may still write to guest memory.
    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Writes what the backend keeps in memory and another process needs that opens the disk's
    /// files. Called when the device's queues stop, with nothing in flight.
    ///
    /// # Errors
    /// When it cannot be written.
    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Readable when [`Self::completed`] may have something.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
