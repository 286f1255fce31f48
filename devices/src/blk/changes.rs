//! Which blocks of a disk are written while it is copied: for a disk that moves with its VM.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::{Completion, Disk, Operation, Submitted, Topology};
use crate::GuestRam;

/// A log of the blocks that are written, which is off at first. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ChangeLog(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_on: AtomicBool,
    blocks: Mutex<Vec<u64>>,
}

impl ChangeLog {
    /// Bytes of a block.
    pub const BLOCK: u64 = 64 << 10;

    /// Begins to log. The disk has nothing in flight.
    pub fn start(&self) {
        self.lock().clear();
        self.0.is_on.store(true, Ordering::Release);
    }

    /// Ends it.
    pub fn stop(&self) {
        self.0.is_on.store(false, Ordering::Release);
        *self.lock() = Vec::new();
    }

    /// Returns ranges of bytes, in order and of whole blocks, that were written since the last
    /// call, or since the log was started.
    #[must_use]
    pub fn take(&self) -> Vec<Range<u64>> {
        let blocks = std::mem::take(&mut *self.lock());
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (word, bits) in (0u64..).zip(blocks) {
            for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                let block = word.saturating_mul(64).saturating_add(bit);
                let start = block.saturating_mul(Self::BLOCK);
                let end = start.saturating_add(Self::BLOCK);
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        ranges
    }

    /// Marks bytes after they were written, so that whoever takes the mark reads them.
    fn mark(&self, range: &Range<u64>) {
        if !self.0.is_on.load(Ordering::Acquire) || range.is_empty() {
            return;
        }
        let first = range.start / Self::BLOCK;
        let end = range.end.div_ceil(Self::BLOCK);
        let mut blocks = self.lock();
        let words = usize::try_from(end.div_ceil(64)).unwrap_or(usize::MAX);
        // As long as the disk's last block needs: a bit for each 64 KiB.
        if blocks.len() < words {
            blocks.resize(words, 0);
        }
        for block in first..end {
            let word = usize::try_from(block / 64).unwrap_or(usize::MAX);
            if let Some(bits) = blocks.get_mut(word) {
                *bits |= 1 << (block % 64);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk whose changes are logged.
#[derive(Debug)]
pub(super) struct LoggedDisk {
    disk: Box<dyn Disk>,
    log: ChangeLog,
    /// What queued requests change, by their tokens.
    queued: Vec<(u16, Range<u64>)>,
}

impl LoggedDisk {
    pub(super) fn new(disk: Box<dyn Disk>, log: ChangeLog) -> Self {
        Self {
            disk,
            log,
            queued: Vec::new(),
        }
    }
}

/// The bytes that an operation changes.
fn changed(operation: &Operation<'_, '_>) -> Option<Range<u64>> {
    let range = |offset: u64, len: u64| offset..offset.saturating_add(len);
    match operation {
        Operation::Read { .. } | Operation::Flush => None,
        Operation::Write { offset, slices } => {
            let lengths = slices.iter().map(|slice| slice.len() as u64);
            Some(range(*offset, lengths.fold(0, u64::saturating_add)))
        }
        Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
            Some(range(*offset, *len))
        }
    }
}

impl Disk for LoggedDisk {
    fn len(&self) -> u64 {
        self.disk.len()
    }

    fn topology(&self) -> Topology {
        self.disk.topology()
    }

    fn refresh(&mut self) -> io::Result<()> {
        self.disk.refresh()
    }

    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        let log = self.log.clone();
        let logged = |disk| -> Box<dyn Disk> { Box::new(Self::new(disk, log)) };
        Ok(self.disk.try_clone()?.map(logged))
    }

    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        let changed = changed(&operation);
        let submitted = self.disk.submit(mem, token, operation);
        if let Some(changed) = changed {
            match submitted {
                // Also after a failure: a part of it may have been written.
                Submitted::Done(_) => self.log.mark(&changed),
                Submitted::Queued => self.queued.push((token, changed)),
            }
        }
        submitted
    }

    fn commit(&mut self) -> io::Result<()> {
        self.disk.commit()
    }

    fn completed(&mut self) -> Option<Completion> {
        let completion = self.disk.completed()?;
        let is_this = |(token, _): &(u16, Range<u64>)| *token == completion.token;
        if let Some(place) = self.queued.iter().position(is_this) {
            let (_, changed) = self.queued.swap_remove(place);
            self.log.mark(&changed);
        }
        Some(completion)
    }

    fn wait(&mut self) -> io::Result<()> {
        self.disk.wait()
    }

    fn settle(&mut self) -> io::Result<()> {
        self.disk.settle()
    }

    fn next_change(&mut self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.disk.next_change(from)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.disk.fd()
    }
}

/// Reads bytes of a disk that completes requests at once.
///
/// # Errors
/// The disk's; [`io::ErrorKind::Unsupported`] if it works asynchronously.
pub fn read_disk(disk: &mut dyn Disk, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let slices = [bytes.into()];
    let slices = &slices;
    done(disk.submit(&GuestRam::new(), 0, Operation::Read { offset, slices }))
}

/// Writes bytes to a disk that completes requests at once.
///
/// # Errors
/// As [`read_disk`].
pub fn write_disk(disk: &mut dyn Disk, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let slices = [bytes.into()];
    let slices = &slices;
    done(disk.submit(&GuestRam::new(), 0, Operation::Write { offset, slices }))
}

/// Makes a range of a disk read as zeroes.
///
/// # Errors
/// As [`read_disk`].
pub fn zero_disk(disk: &mut dyn Disk, offset: u64, len: u64) -> io::Result<()> {
    let unmap = true;
    let operation = Operation::WriteZeroes { offset, len, unmap };
    done(disk.submit(&GuestRam::new(), 0, operation))
}

/// Makes what was written to a disk durable, with all that another process needs to open it.
///
/// # Errors
/// As [`read_disk`].
pub fn flush_disk(disk: &mut dyn Disk) -> io::Result<()> {
    done(disk.submit(&GuestRam::new(), 0, Operation::Flush))?;
    disk.settle()
}

fn done(submitted: Submitted) -> io::Result<()> {
    match submitted {
        Submitted::Done(result) => result,
        Submitted::Queued => Err(io::ErrorKind::Unsupported.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::{FileDisk, Qcow2Disk, create_qcow2};
    use std::path::Path;

    const BLOCK: u64 = ChangeLog::BLOCK;

    fn file(len: u64) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn what_is_written_while_the_log_is_on_is_in_it_once() {
        let log = ChangeLog::default();
        let disk = Box::new(FileDisk::new(file(1 << 20)).unwrap());
        let mut disk = LoggedDisk::new(disk, log.clone());
        write_disk(&mut disk, 0, &mut [1; 512]).unwrap();
        assert_eq!(log.take(), []);
        log.start();
        // One write over the end of a block, and one into the next but one.
        write_disk(&mut disk, BLOCK - 512, &mut [1; 1024]).unwrap();
        zero_disk(&mut disk, 3 * BLOCK, 512).unwrap();
        read_disk(&mut disk, 8 * BLOCK, &mut [0; 512]).unwrap();
        assert_eq!(log.take(), [0..2 * BLOCK, 3 * BLOCK..4 * BLOCK]);
        assert_eq!(log.take(), []);
        // A clone of the disk is the same one.
        let mut clone = disk.try_clone().unwrap().unwrap();
        write_disk(&mut *clone, 5 * BLOCK, &mut [1; 512]).unwrap();
        let written = 5 * BLOCK..6 * BLOCK;
        assert_eq!(log.take(), [written]);
        log.stop();
        write_disk(&mut disk, 0, &mut [1; 512]).unwrap();
        assert_eq!(log.take(), []);
    }

    fn changes(disk: &mut dyn Disk) -> Vec<Range<u64>> {
        let (mut all, mut at) = (Vec::new(), 0);
        while let Some(range) = disk.next_change(at).unwrap() {
            at = range.end;
            all.push(range);
        }
        all
    }

    #[test]
    fn of_an_overlay_only_what_differs_from_its_image_is_a_change() {
        let overlay = file(0);
        let base = file(16 * BLOCK);
        create_qcow2(&base, Path::new("base"), &overlay).unwrap();
        let mut disk = Qcow2Disk::open(base, overlay).unwrap();
        assert_eq!(changes(&mut disk), []);
        write_disk(&mut disk, 2 * BLOCK + 512, &mut [1; 512]).unwrap();
        zero_disk(&mut disk, 9 * BLOCK, BLOCK).unwrap();
        let ranges = changes(&mut disk);
        assert_eq!(ranges, [2 * BLOCK..3 * BLOCK, 9 * BLOCK..10 * BLOCK]);
    }

    #[test]
    fn the_holes_of_a_file_are_no_changes() {
        let mut disk = FileDisk::new(file(1 << 20)).unwrap();
        assert_eq!(changes(&mut disk), []);
        write_disk(&mut disk, 4 * BLOCK, &mut [1; 4096]).unwrap();
        let ranges = changes(&mut disk);
        assert!(ranges.iter().any(|range| range.contains(&(4 * BLOCK))));
        assert!(ranges.iter().all(|range| range.end <= 1 << 20));
    }
}
