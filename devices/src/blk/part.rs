//! The rest of a disk as a disk of its own.

use std::io;
use std::os::fd::BorrowedFd;

use super::disk::{Completion, Disk, Operation, SECTOR_SIZE, Submitted, Topology};
use crate::GuestRam;

/// A disk without its first sectors, which the driver neither sees nor reaches: whoever owns the
/// disk keeps something of its own in them.
#[derive(Debug)]
pub struct DiskPart {
    disk: Box<dyn Disk>,
    /// Where it begins, in bytes.
    start: u64,
}

impl DiskPart {
    /// Takes a disk, of which the first `sectors` of 512 bytes are left out. One that has no more
    /// than those is empty.
    #[must_use]
    pub fn after(sectors: u32, disk: Box<dyn Disk>) -> Self {
        let start = u64::from(sectors).saturating_mul(SECTOR_SIZE);
        Self { disk, start }
    }

    /// The operation on the whole disk. An offset that no disk has becomes one that is refused.
    fn shift<'a, 'm>(&self, operation: Operation<'a, 'm>) -> Operation<'a, 'm> {
        let at = |offset: u64| offset.saturating_add(self.start);
        match operation {
            Operation::Read { offset, slices } => Operation::Read {
                offset: at(offset),
                slices,
            },
            Operation::Write { offset, slices } => Operation::Write {
                offset: at(offset),
                slices,
            },
            Operation::Flush => Operation::Flush,
            Operation::Discard { offset, len } => Operation::Discard {
                offset: at(offset),
                len,
            },
            Operation::WriteZeroes { offset, len, unmap } => Operation::WriteZeroes {
                offset: at(offset),
                len,
                unmap,
            },
        }
    }
}

impl Disk for DiskPart {
    fn len(&self) -> u64 {
        self.disk.len().saturating_sub(self.start)
    }

    /// That of the whole disk, unless its blocks would begin within those of this one: a driver
    /// cannot be told of an offset, and would write parts of two blocks instead of one.
    fn topology(&self) -> Topology {
        let whole = self.disk.topology();
        match self.start.is_multiple_of(whole.physical_block.into()) {
            true => whole,
            false => Topology::default(),
        }
    }

    fn refresh(&mut self) -> io::Result<()> {
        self.disk.refresh()
    }

    fn try_clone(&self) -> io::Result<Option<Box<dyn Disk>>> {
        let clone = self.disk.try_clone()?;
        let start = self.start;
        Ok(clone.map(|disk| Box::new(Self { disk, start }) as Box<dyn Disk>))
    }

    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        let operation = self.shift(operation);
        self.disk.submit(mem, token, operation)
    }

    fn commit(&mut self) -> io::Result<()> {
        self.disk.commit()
    }

    fn completed(&mut self) -> Option<Completion> {
        self.disk.completed()
    }

    fn wait(&mut self) -> io::Result<()> {
        self.disk.wait()
    }

    fn settle(&mut self) -> io::Result<()> {
        self.disk.settle()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.disk.fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use vm_memory::{Bytes, GuestAddress, GuestMemory};

    use super::*;
    use crate::blk::FileDisk;
    use crate::testing::memory;

    /// A file of eight sectors, each filled with its number, and all but its first as a disk.
    fn part() -> (std::fs::File, DiskPart) {
        let file = tempfile::tempfile().unwrap();
        for sector in 0..8u8 {
            let at = u64::from(sector) * SECTOR_SIZE;
            file.write_all_at(&[sector; 512], at).unwrap();
        }
        let disk = FileDisk::new(file.try_clone().unwrap()).unwrap();
        (file, DiskPart::after(1, Box::new(disk)))
    }

    fn sectors(file: &std::fs::File) -> Vec<u8> {
        let mut all = [0; 8 * 512];
        file.read_exact_at(&mut all, 0).unwrap();
        all.chunks(512).map(|sector| sector[511]).collect()
    }

    #[test]
    fn what_is_before_a_part_stays_as_it_is() {
        let (file, mut part) = part();
        assert_eq!(part.len(), 7 * SECTOR_SIZE);
        let mem = memory(4096);
        let slices = [mem.get_slice(GuestAddress(0), 512).unwrap()];
        let slices = &slices[..];
        let mut done = |operation| match part.submit(&mem, 0, operation) {
            Submitted::Done(result) => result.unwrap(),
            Submitted::Queued => panic!("a file works at once"),
        };
        done(Operation::Read { offset: 0, slices });
        assert_eq!(mem.read_obj::<u8>(GuestAddress(511)).unwrap(), 1);
        mem.write_slice(&[0xee; 512], GuestAddress(0)).unwrap();
        done(Operation::Write { offset: 0, slices });
        let offset = 6 * SECTOR_SIZE;
        done(Operation::Write { offset, slices });
        let len = SECTOR_SIZE;
        done(Operation::WriteZeroes {
            offset: 2 * len,
            len,
            unmap: false,
        });
        done(Operation::Discard {
            offset: 3 * len,
            len,
        });
        done(Operation::Flush);
        assert_eq!(sectors(&file), [0, 0xee, 2, 0, 0, 5, 6, 0xee]);
    }

    #[test]
    fn a_part_of_a_disk_that_is_shorter_is_empty_until_it_grows() {
        let (file, mut part) = part();
        file.set_len(100).unwrap();
        part.refresh().unwrap();
        assert!(part.is_empty());
        file.set_len(4096).unwrap();
        let mut clone = part.try_clone().unwrap().unwrap();
        clone.refresh().unwrap();
        assert_eq!(clone.len(), 4096 - SECTOR_SIZE);
    }

    #[test]
    fn blocks_that_do_not_begin_with_the_part_are_not_shown() {
        let (file, part) = part();
        assert_eq!(part.topology(), Topology::default());
        let whole = FileDisk::new(file).unwrap();
        let topology = whole.topology();
        assert_eq!(DiskPart::after(8, Box::new(whole)).topology(), topology);
    }
}
