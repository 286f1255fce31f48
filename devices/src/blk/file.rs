//! A disk that is a regular file or a block device, read and written with `preadv` and
//! `pwritev` on the calling thread.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt as _};

use rustix::fs::{FallocateFlags, fallocate, ioctl_blkpbszget, ioctl_blksszget, seek};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use vm_memory::VolatileSlice;

use super::disk::{Disk, Operation, Submitted, Topology};
use crate::GuestRam;
use crate::virtio::iovec;

/// Bytes of zeroes that are written per call.
const ZEROES: usize = 16 << 10;

/// Bytes of a page.
pub(super) const PAGE: u32 = 4096;

/// A file as a disk. Its length is read when it is opened, and by [`Disk::refresh`].
#[derive(Debug)]
pub struct FileDisk {
    pub(super) file: File,
    len: u64,
    /// Bytes of a logical block of a block device, which discards and zeroes only whole blocks.
    block: Option<u64>,
    topology: Topology,
}

impl FileDisk {
    /// Takes an open file.
    ///
    /// # Errors
    /// If its length or the size of its blocks cannot be determined.
    pub fn new(file: File) -> io::Result<Self> {
        let len = len(&file)?;
        let metadata = file.metadata()?;
        let (block, physical_block) = match metadata.file_type().is_block_device() {
            true => (
                Some(ioctl_blksszget(&file)?.into()),
                ioctl_blkpbszget(&file)?,
            ),
            // The page cache reads and writes pages.
            false => (None, PAGE),
        };
        let topology = Topology {
            physical_block,
            optimal: 0,
        };
        Ok(Self {
            file,
            len,
            block,
            topology,
        })
    }
}

impl FileDisk {
    pub(super) fn is_device(&self) -> bool {
        self.block.is_some()
    }

    /// Whether the host can zero this range itself, if it zeroes any: a range of whole blocks.
    pub(super) fn is_whole(&self, offset: u64, len: u64) -> bool {
        self.block
            .is_none_or(|block| offset.is_multiple_of(block) && len.is_multiple_of(block))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(block) = self.block else {
            return give_back(&self.file, offset, len);
        };
        match whole_blocks(offset, len, block) {
            Some((offset, len)) => discard_of_device(&self.file, offset, len),
            // A discard is only a hint: it need not be carried out.
            None => Ok(()),
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self.is_whole(offset, len) {
            true => write_zeroes(&self.file, offset, len, unmap),
            false => write_zeroes_by_hand(&self.file, offset, len),
        }
    }
}

/// Returns the whole blocks within a range; `None` if there are none.
fn whole_blocks(offset: u64, len: u64, block: u64) -> Option<(u64, u64)> {
    let start = offset.checked_next_multiple_of(block)?;
    let end = offset.checked_add(len)?;
    let end = end.checked_sub(end.checked_rem(block)?)?;
    let len = end.checked_sub(start).filter(|len| *len > 0)?;
    Some((start, len))
}

/// Discards a range of a block device. For Linux, punching a hole in one is a different operation:
/// the device must zero the range, which some devices that discard cannot do.
#[allow(unsafe_code)]
fn discard_of_device(file: &File, offset: u64, len: u64) -> io::Result<()> {
    /// `BLKDISCARD` of linux/fs.h, whose number does not encode its argument.
    const DISCARD: Opcode = opcode::none(0x12, 119);
    // SAFETY: it reads two numbers of 64 bits, the start of the range and its length.
    let request = unsafe { Setter::<DISCARD, [u64; 2]>::new([offset, len]) };
    // SAFETY: the request above; it touches no other memory.
    Ok(unsafe { ioctl(file, request) }?)
}

/// Bytes of a file, or of a block device, for which `stat(2)` reports a size of 0.
pub(super) fn len(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

impl Disk for FileDisk {
    fn len(&self) -> u64 {
        self.len
    }

    fn topology(&self) -> Topology {
        self.topology
    }

    fn refresh(&mut self) -> io::Result<()> {
        self.len = len(&self.file)?;
        Ok(())
    }

    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        let file = self.file.try_clone()?;
        Ok(Some(Box::new(Self { file, ..*self })))
    }

    fn next_change(&mut self, from: u64) -> io::Result<Option<Range<u64>>> {
        // A block device has no holes, as far as anybody knows.
        if self.is_device() || from >= self.len {
            return Ok((from < self.len).then_some(from..self.len));
        }
        let start = match seek(&self.file, rustix::fs::SeekFrom::Data(from)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&self.file, rustix::fs::SeekFrom::Hole(start))?;
        let range = start.min(self.len)..end.min(self.len);
        Ok((!range.is_empty()).then_some(range))
    }

    fn submit(&mut self, _: &GuestRam, _token: u16, operation: Operation<'_, '_>) -> Submitted {
        let file = self.file.as_fd();
        Submitted::Done(match operation {
            Operation::Read { offset, slices } => transfer(slices, offset, |slices, skip, at| {
                iovec::read_at(file, slices, skip, at)
            }),
            Operation::Write { offset, slices } => transfer(slices, offset, |slices, skip, at| {
                iovec::write_at(file, slices, skip, at)
            }),
            Operation::Flush => self.file.sync_data(),
            Operation::Discard { offset, len } => self.discard(offset, len),
            Operation::WriteZeroes { offset, len, unmap } => self.write_zeroes(offset, len, unmap),
        })
    }
}

/// Gives the space of a range back to the file system.
pub(super) fn give_back(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, mode, offset, len)?)
}

/// Makes a range read as zeroes, by writing them if the file system has no better way.
pub(super) fn write_zeroes(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    let mode = if unmap {
        FallocateFlags::PUNCH_HOLE
    } else {
        FallocateFlags::ZERO_RANGE
    };
    match fallocate(file, mode | FallocateFlags::KEEP_SIZE, offset, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        other => return Ok(other?),
    }
    write_zeroes_by_hand(file, offset, len)
}

fn write_zeroes_by_hand(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let zeroes = [0; ZEROES];
    let (mut at, mut left) = (offset, len);
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(ZEROES).min(ZEROES);
        file.write_all_at(zeroes.get(..piece).unwrap_or(&zeroes), at)?;
        at = at.saturating_add(piece as u64);
        left = left.saturating_sub(piece as u64);
    }
    Ok(())
}

/// Calls `step` with the remaining slices, and how much of the first one is done, until all of
/// `slices` is transferred.
pub(super) fn transfer<'m>(
    slices: &[VolatileSlice<'m>],
    mut offset: u64,
    mut step: impl FnMut(&[VolatileSlice<'m>], usize, u64) -> io::Result<usize>,
) -> io::Result<()> {
    let mut rest = slices;
    let mut skip = 0usize;
    while !rest.is_empty() {
        let mut done = step(rest, skip, offset)?;
        if done == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        offset = offset.saturating_add(done as u64);
        done = done.saturating_add(skip);
        skip = 0;
        while let Some((first, others)) = rest.split_first() {
            if done < first.len() {
                skip = done;
                break;
            }
            done = done.saturating_sub(first.len());
            rest = others;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory;
    use std::io::Write;
    use vm_memory::{Bytes, GuestAddress, GuestMemory};

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped() {
        let mem = memory(4096);
        let slices = [
            mem.get_slice(GuestAddress(0), 10).unwrap(),
            mem.get_slice(GuestAddress(100), 20).unwrap(),
        ];
        let mut calls = Vec::new();
        transfer(&slices, 1000, |slices, skip, at| {
            let total: usize = slices.iter().map(VolatileSlice::len).sum();
            let total = total - skip;
            calls.push((at, total));
            Ok(total.min(7))
        })
        .unwrap();
        assert_eq!(
            calls,
            [(1000, 30), (1007, 23), (1014, 16), (1021, 9), (1028, 2)]
        );
    }

    #[test]
    fn of_a_range_whole_blocks_are_left() {
        let whole = |offset, len| whole_blocks(offset, len, 4096);
        assert_eq!(whole(4096, 8192), Some((4096, 8192)));
        assert_eq!(whole(512, 8192), Some((4096, 4096)));
        assert_eq!(whole(512, 7680), Some((4096, 4096)));
        assert_eq!(whole(0, 4608), Some((0, 4096)));
        for (offset, len) in [
            (512, 512),
            (4096, 4095),
            (512, 4096 * 2 - 1024),
            (1, u64::MAX),
        ] {
            assert_eq!(whole(offset, len), None, "{offset} {len}");
        }
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 1024]).unwrap();
        let mut disk = FileDisk::new(file.try_clone().unwrap()).unwrap();
        assert_eq!(disk.len(), 1024);
        file.set_len(600).unwrap();
        let mem = memory(4096);
        let slices = [mem.get_slice(GuestAddress(0), 1024).unwrap()];
        let Submitted::Done(result) = disk.submit(
            &mem,
            0,
            Operation::Read {
                offset: 0,
                slices: &slices,
            },
        ) else {
            panic!("a file works at once")
        };
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(mem.read_obj::<u8>(GuestAddress(599)).unwrap(), 7);
    }
}
