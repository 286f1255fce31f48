//! A file as a disk whose requests the kernel carries out asynchronously: one `io_uring` per disk,
//! to which all requests of a turn are submitted with one system call.
#![allow(unsafe_code)] // io_uring requests refer to guest memory that no Rust reference may cover

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use vm_memory::VolatileSlice;

use super::disk::{Completion, Disk, Operation, Submitted, Topology};
use super::file::{FileDisk, write_zeroes};
use crate::GuestRam;

/// The maximum number of requests per submission to the kernel.
const BATCH: u32 = 256;

/// The maximum number of requests in flight: all descriptors of all queues.
const DEPTH: u32 = 2048;

/// How often a submission is retried if the kernel is short of memory.
const MAX_SUBMIT_RETRIES: u32 = 10_000;

/// How often a part of a request is retried that was interrupted, or could not be started.
const RETRIES: u32 = 100;

/// The only registered file.
const FILE: types::Fixed = types::Fixed(0);

/// Set once a refused `io_uring` was logged.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Opens a file as a disk with a ring of its own, or without one if the host does not permit it.
///
/// # Errors
/// If its length cannot be determined.
pub(super) fn open_if_permitted(file: File) -> io::Result<Box<dyn Disk>> {
    match UringDisk::new(file.try_clone()?) {
        Ok(disk) => Ok(Box::new(disk)),
        Err(error) => {
            if !REFUSED.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    %error,
                    "the host does not permit io_uring: disks are read and written by threads"
                );
            }
            Ok(Box::new(FileDisk::new(file)?))
        }
    }
}

/// As `struct iovec`, but `Send`, since it has no pointer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Segment {
    at: usize,
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes { unmap: bool },
}

/// A request in flight.
#[derive(Debug)]
struct Slot {
    kind: RequestKind,
    offset: u64,
    /// Bytes left to transfer.
    left: u64,
    /// Memory left to transfer, from `next` on.
    pieces: Vec<Segment>,
    next: usize,
    /// How often it was retried without progress.
    retries: u32,
}

/// Creates a ring that, once enabled, takes only requests on this file, of the kinds that a disk
/// needs. So it cannot be used for system calls that a thread may not make.
fn restricted_ring(file: &File) -> io::Result<IoUring> {
    let mut ring = IoUring::builder();
    let ring = ring.setup_r_disabled().setup_cqsize(DEPTH).build(BATCH)?;
    let submitter = ring.submitter();
    submitter.register_files(&[file.as_raw_fd()])?;
    let codes = [
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
    ];
    let registered = squeue::Flags::FIXED_FILE.bits();
    let mut rules: Vec<_> = codes.map(Restriction::sqe_op).into();
    rules.push(Restriction::sqe_flags_required(registered));
    submitter.register_restrictions(&mut rules)?;
    Ok(ring)
}

/// A file as a disk, served by `io_uring`. Its length is read when it is opened, and by
/// [`Disk::refresh`]. If the kernel stops accepting requests, those that it has are waited for, and
/// the calling thread carries out new ones.
pub struct UringDisk {
    disk: FileDisk,
    ring: IoUring,
    /// The kernel refused to start what was queued. That stays in the ring permanently, so nothing
    /// of this ring may be submitted to the kernel again.
    broken: bool,
    slots: Vec<Slot>,
    in_flight: usize,
    /// Requests in flight that the kernel has not started, in the order in which it will.
    queued: VecDeque<u16>,
    /// Requests that it will never start, with the error.
    refused: VecDeque<(u16, i32)>,
    /// Keeps the memory of requests in flight mapped.
    memory: Vec<GuestRam>,
}

impl std::fmt::Debug for UringDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringDisk")
            .field("disk", &self.disk)
            .field("broken", &self.broken)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl UringDisk {
    fn ring_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's own, which lives as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Takes an open file. Its `O_NONBLOCK` flag is removed, or the kernel would not complete all
    /// requests itself.
    ///
    /// # Errors
    /// If its length cannot be determined, or the host does not permit `io_uring`.
    pub fn new(file: File) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&file)?;
        if flags.contains(OFlags::NONBLOCK) {
            rustix::fs::fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK))?;
        }
        let disk = FileDisk::new(file)?;
        let ring = restricted_ring(&disk.file)?;
        ring.submitter().register_enable_rings()?;
        Ok(Self::over(disk, ring))
    }

    fn over(disk: FileDisk, ring: IoUring) -> Self {
        Self {
            disk,
            ring,
            broken: false,
            slots: Vec::new(),
            in_flight: 0,
            queued: VecDeque::new(),
            refused: VecDeque::new(),
            memory: Vec::new(),
        }
    }

    /// Queues the rest of a request for submission at the next [`Disk::commit`].
    fn push(&mut self, token: u16) -> io::Result<()> {
        if !self.has_room() {
            // The ring is full after this many requests in one turn.
            self.commit()?;
        }
        let Some(slot) = self.slots.get(usize::from(token)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if self.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let entry = slot.entry().user_data(token.into());
        // SAFETY: the entry refers to `slot.pieces`, which stay unchanged while the request is in
        // flight, and guest memory, which `self.memory` keeps mapped until then (`drop` waits).
        // Nothing more is submitted to a ring that is broken.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
        self.queued.push_back(token);
        Ok(())
    }

    fn has_room(&mut self) -> bool {
        !self.ring.submission().is_full()
    }

    /// Stops using the ring, since the kernel does not start what is queued.
    fn give_up(&mut self, error: &io::Error) {
        tracing::error!(%error, "io_uring failed; falling back to synchronous I/O");
        self.broken = true;
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let left = self.ring.submission().len();
        let begun = self.queued.len().saturating_sub(left);
        let never = self.queued.drain(..).skip(begun);
        self.refused.extend(never.map(|token| (token, errno)));
    }

    /// Submits what is queued to the kernel.
    fn enter(&mut self) -> io::Result<()> {
        let mut patience = MAX_SUBMIT_RETRIES;
        while !self.ring.submission().is_empty() {
            match self.ring.submit().map_err(|error| error.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR)) => {}
                // The kernel is short of memory. The completion queue has enough entries.
                Err(Some(libc::EAGAIN | libc::EBUSY)) if patience > 0 => {
                    patience = patience.saturating_sub(1);
                    std::thread::yield_now();
                }
                Err(code) => return Err(io::Error::from_raw_os_error(code.unwrap_or(libc::EIO))),
            }
        }
        Ok(())
    }

    /// Handles the kernel's result of a request; `None` if the request continues.
    fn complete(&mut self, token: u16, answer: i32) -> Option<io::Result<()>> {
        let slot = self.slots.get_mut(usize::from(token))?;
        let done = match u64::try_from(answer) {
            Ok(done) => done,
            Err(_) => {
                let error = io::Error::from_raw_os_error(answer.saturating_neg());
                match (error.raw_os_error(), slot.kind) {
                    (Some(libc::EINTR | libc::EAGAIN), _) if slot.retries < RETRIES => {
                        slot.retries = slot.retries.saturating_add(1);
                        0
                    }
                    (Some(libc::EOPNOTSUPP), RequestKind::WriteZeroes { unmap }) => {
                        return Some(write_zeroes(&self.disk.file, slot.offset, slot.left, unmap));
                    }
                    _ => return Some(Err(error)),
                }
            }
        };
        if matches!(slot.kind, RequestKind::Read | RequestKind::Write) {
            // A request with nothing left is never given to the kernel.
            if answer == 0 {
                return Some(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            slot.advance(done);
            if slot.left == 0 {
                return Some(Ok(()));
            }
        } else if answer >= 0 {
            return Some(Ok(()));
        }
        // A part is done, or nothing was started.
        if let Err(error) = self.push(token) {
            return Some(Err(error));
        }
        // If it fails, the request is returned as refused.
        let _ = self.commit();
        None
    }

    /// Keeps `mem` mapped. Doing so again for the same memory costs nothing.
    fn keep(&mut self, mem: &GuestRam) {
        use vm_memory::{GuestMemory, GuestMemoryRegion};
        let same = |kept: &GuestRam| {
            let places = |mem: &GuestRam| mem.num_regions();
            places(kept) == places(mem)
                && kept
                    .iter()
                    .zip(mem.iter())
                    .all(|(a, b)| std::ptr::eq(a, b) && a.start_addr() == b.start_addr())
        };
        if self.memory.last().is_some_and(same) {
            return;
        }
        if self.in_flight == 0 {
            self.memory.clear();
        }
        self.memory.push(mem.clone());
    }
}

impl Slot {
    fn empty() -> Self {
        Self {
            kind: RequestKind::Flush,
            offset: 0,
            left: 0,
            pieces: Vec::new(),
            next: 0,
            retries: 0,
        }
    }

    fn entry(&self) -> squeue::Entry {
        let pieces = self.pieces.get(self.next..).unwrap_or(&[]);
        let list = pieces.as_ptr().cast::<libc::iovec>();
        // At most MAX_SEGMENTS.
        let count = u32::try_from(pieces.len()).unwrap_or(0);
        match self.kind {
            RequestKind::Read => opcode::Readv::new(FILE, list, count)
                .offset(self.offset)
                .build(),
            RequestKind::Write => opcode::Writev::new(FILE, list, count)
                .offset(self.offset)
                .build(),
            RequestKind::Flush => opcode::Fsync::new(FILE)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            RequestKind::Discard | RequestKind::WriteZeroes { .. } => {
                let how = match self.kind {
                    RequestKind::WriteZeroes { unmap: false } => libc::FALLOC_FL_ZERO_RANGE,
                    _ => libc::FALLOC_FL_PUNCH_HOLE,
                };
                opcode::Fallocate::new(FILE, self.left)
                    .offset(self.offset)
                    .mode(how | libc::FALLOC_FL_KEEP_SIZE)
                    .build()
            }
        }
    }

    fn set(&mut self, kind: RequestKind, offset: u64, slices: &[VolatileSlice<'_>]) {
        self.kind = kind;
        self.offset = offset;
        self.next = 0;
        self.retries = 0;
        self.pieces.clear();
        self.pieces.extend(slices.iter().map(|slice| Segment {
            at: slice.ptr_guard_mut().as_ptr().expose_provenance(),
            len: slice.len(),
        }));
        self.left = slices
            .iter()
            .fold(0, |sum, slice| sum.saturating_add(slice.len() as u64));
    }

    /// Advances by `done` bytes.
    fn advance(&mut self, done: u64) {
        self.offset = self.offset.saturating_add(done);
        self.left = self.left.saturating_sub(done);
        if done > 0 {
            self.retries = 0;
        }
        let mut done = usize::try_from(done).unwrap_or(usize::MAX);
        while let Some(piece) = self.pieces.get_mut(self.next) {
            if done < piece.len {
                piece.at = piece.at.saturating_add(done);
                piece.len = piece.len.saturating_sub(done);
                break;
            }
            done = done.saturating_sub(piece.len);
            self.next = self.next.saturating_add(1);
        }
    }
}

impl Disk for UringDisk {
    fn len(&self) -> u64 {
        self.disk.len()
    }

    fn topology(&self) -> Topology {
        self.disk.topology()
    }

    fn refresh(&mut self) -> io::Result<()> {
        self.disk.refresh()
    }

    /// Creates a disk with its own ring. If the host has no ring left, the device's thread does the
    /// work.
    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        open_if_permitted(self.disk.file.try_clone()?).map(Some)
    }

    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        // The ring has no operation to discard on a block device, or to zero parts of its blocks.
        let is_own = match operation {
            Operation::Discard { .. } => self.disk.is_device(),
            Operation::WriteZeroes { offset, len, .. } => !self.disk.is_whole(offset, len),
            _ => false,
        };
        if self.broken || is_own {
            return self.disk.submit(mem, token, operation);
        }
        self.keep(mem);
        let index = usize::from(token);
        if self.slots.len() <= index {
            // Grows with the heads that a driver uses.
            let len = index.saturating_add(1).next_power_of_two();
            self.slots.resize_with(len, Slot::empty);
        }
        let Some(slot) = self.slots.get_mut(index) else {
            return Submitted::Done(Err(io::ErrorKind::InvalidInput.into()));
        };
        match operation {
            Operation::Read { offset, slices } => slot.set(RequestKind::Read, offset, slices),
            Operation::Write { offset, slices } => slot.set(RequestKind::Write, offset, slices),
            Operation::Flush => slot.set(RequestKind::Flush, 0, &[]),
            Operation::Discard { offset, len } => {
                slot.set(RequestKind::Discard, offset, &[]);
                slot.left = len;
            }
            Operation::WriteZeroes { offset, len, unmap } => {
                slot.set(RequestKind::WriteZeroes { unmap }, offset, &[]);
                slot.left = len;
            }
        }
        if let (RequestKind::Read | RequestKind::Write, 0) = (slot.kind, slot.left) {
            return Submitted::Done(Ok(()));
        }
        match self.push(token) {
            Ok(()) => {
                self.in_flight = self.in_flight.saturating_add(1);
                Submitted::Queued
            }
            Err(error) => Submitted::Done(Err(error)),
        }
    }

    /// If it fails, what was queued is returned by [`Disk::completed`] with that error.
    fn commit(&mut self) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        let result = self.enter();
        match &result {
            Ok(()) => self.queued.clear(),
            Err(error) => self.give_up(error),
        }
        result
    }

    fn completed(&mut self) -> Option<Completion> {
        loop {
            // In its own statement: dropping the queue tells the kernel its new head.
            let answer = self.ring.completion().next();
            let (token, result) = match answer {
                // Tokens are those that were passed to `push`.
                Some(answer) => {
                    let token = u16::try_from(answer.user_data()).ok()?;
                    (token, self.complete(token, answer.result()))
                }
                None => {
                    let (token, errno) = self.refused.pop_front()?;
                    (token, Some(Err(io::Error::from_raw_os_error(errno))))
                }
            };
            if let Some(result) = result {
                self.in_flight = self.in_flight.saturating_sub(1);
                return Some(Completion { token, result });
            }
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        let is_done =
            |disk: &mut Self| !disk.refused.is_empty() || !disk.ring.completion().is_empty();
        if self.in_flight == 0 || is_done(self) {
            return Ok(());
        }
        // Without a call that submits anything, so that it also works with a broken ring.
        let mut fds = [PollFd::from_borrowed_fd(self.ring_fd(), PollFlags::IN)];
        loop {
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                other => return Ok(other.map(drop)?),
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring_fd())
    }
}

impl Drop for UringDisk {
    /// The kernel may write to guest memory until the last request is complete.
    fn drop(&mut self) {
        // Everything that was queued is now started, or refused.
        let _ = self.commit();
        while self.in_flight > 0 {
            if self.wait().is_err() {
                // Then it stays mapped forever.
                std::mem::forget(std::mem::take(&mut self.memory));
                return;
            }
            while self.completed().is_some() {}
        }
    }
}

#[cfg(test)]
#[path = "uring_tests.rs"]
mod tests;
