//! The descriptors of a chain (§2.7.5), as the driver linked them.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, VolatileMemory, VolatileSlice};

use super::region::slice_in_region;
use crate::GuestRam;

/// The size of a descriptor.
const SIZE: u32 = 16;

/// Walks a chain from its head: through the queue's table, and then through an indirect one if a
/// descriptor refers to it (§2.7.5.3). It ends after the last descriptor, and without it at a link
/// or an indirect table that is invalid, and where the chain would have 2³² bytes.
///
/// Each descriptor is read once.
#[derive(Debug)]
pub(super) struct Descriptors<'m> {
    mem: &'m GuestRam,
    table: Table<'m>,
    /// The index of the descriptor that is read next.
    next: u16,
    /// How many descriptors may follow: no more than the table has, or there is a loop.
    left: u16,
    /// Whether no descriptor may refer to a table any more.
    indirect: bool,
    bytes: u32,
}

impl<'m> Descriptors<'m> {
    /// Starts at `head` of the table at `table` with `size` descriptors, in `mem`.
    pub(super) fn new(mem: &'m GuestRam, table: GuestAddress, size: u16, head: u16) -> Self {
        Self {
            mem,
            table: Table::new(mem, table, size),
            next: head,
            left: size,
            indirect: false,
            bytes: 0,
        }
    }

    /// Forbids indirect tables, which driver and device have not agreed on.
    pub(super) fn without_tables(mut self) -> Self {
        self.indirect = true;
        self
    }

    /// Goes on in the table that `descriptor` refers to; `None` if that is not allowed.
    fn enter(&mut self, descriptor: &Descriptor) -> Option<()> {
        let (size, rest) = (descriptor.len() / SIZE, descriptor.len() % SIZE);
        // §2.7.5.3.1: tables do not refer to tables.
        if self.indirect || rest != 0 {
            return None;
        }
        let size = u16::try_from(size).ok()?;
        self.table = Table::new(self.mem, descriptor.addr(), size);
        self.next = 0;
        self.left = size;
        self.indirect = true;
        Some(())
    }
}

impl Iterator for Descriptors<'_> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        loop {
            self.left = self.left.checked_sub(1)?;
            let descriptor = self.table.read(self.mem, self.next)?;
            if descriptor.refers_to_indirect_table() {
                self.enter(&descriptor)?;
                continue;
            }
            self.bytes = self.bytes.checked_add(descriptor.len())?;
            match descriptor.has_next() {
                true => self.next = descriptor.next(),
                false => self.left = 0,
            }
            return Some(descriptor);
        }
    }
}

/// A table of descriptors in guest memory.
#[derive(Debug)]
struct Table<'m> {
    addr: GuestAddress,
    size: u16,
    /// The table, unless it is in several regions of guest memory: then each descriptor is looked
    /// for.
    whole: Option<VolatileSlice<'m>>,
}

impl<'m> Table<'m> {
    fn new(mem: &'m GuestRam, addr: GuestAddress, size: u16) -> Self {
        let len = usize::from(size).saturating_mul(SIZE as usize);
        Self {
            addr,
            size,
            whole: slice_in_region(mem, addr, len),
        }
    }

    /// Returns the descriptor at `index`, if the table has it.
    fn read(&self, mem: &GuestRam, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let offset = u64::from(index).saturating_mul(SIZE.into());
        match &self.whole {
            Some(table) => {
                let at = usize::try_from(offset).ok()?;
                Some(table.get_ref::<Descriptor>(at).ok()?.load())
            }
            None => mem
                .read_obj(GuestAddress(self.addr.0.checked_add(offset)?))
                .ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory_in_pieces;
    use proptest::prelude::*;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::{QueueOwnedT, QueueT};

    /// Where one region of memory ends and the next one begins.
    const BORDER: u64 = 0x8000;
    const TABLE: u64 = 0x1000;
    const SIZE_OF_QUEUE: u16 = 8;

    type Plain = (u64, u32, u16, u16);

    fn plain(descriptor: &Descriptor) -> Plain {
        let (addr, len) = (descriptor.addr().0, descriptor.len());
        (addr, len, descriptor.flags(), descriptor.next())
    }

    fn write(mem: &GuestRam, at: u64, table: &[Plain]) {
        for (place, &(addr, len, flags, next)) in (at..).step_by(16).zip(table) {
            let raw = RawDescriptor::from(Descriptor::new(addr, len, flags, next));
            mem.write_obj(raw, GuestAddress(place)).unwrap();
        }
    }

    /// What `virtio_queue` finds.
    fn expected(mem: &GuestRam, table: u64, head: u16) -> Vec<Plain> {
        let mut ring = virtio_queue::Queue::new(SIZE_OF_QUEUE).unwrap();
        ring.try_set_size(SIZE_OF_QUEUE).unwrap();
        ring.try_set_desc_table_address(GuestAddress(table))
            .unwrap();
        ring.try_set_avail_ring_address(GuestAddress(0x3000))
            .unwrap();
        ring.set_ready(true);
        mem.write_obj([0u16, 1, head], GuestAddress(0x3000))
            .unwrap();
        let chain = ring.iter(mem).unwrap().next().unwrap();
        chain.map(|descriptor| plain(&descriptor)).collect()
    }

    fn found(mem: &GuestRam, table: u64, head: u16) -> Vec<Plain> {
        let found = Descriptors::new(mem, GuestAddress(table), SIZE_OF_QUEUE, head);
        found.map(|descriptor| plain(&descriptor)).collect()
    }

    #[test]
    fn tables_across_regions_of_memory_are_walked() {
        let mem = memory_in_pieces(&[BORDER as usize, 0x1000]);
        let (direct, indirect) = (BORDER - 16, BORDER - 24);
        write(&mem, direct, &[(1, 2, 1, 1), (3, 4, 1, 2), (5, 6, 0, 0)]);
        let all = [(1, 2, 1, 1), (3, 4, 1, 2), (5, 6, 0, 0)];
        assert_eq!(found(&mem, direct, 0), all);
        write(&mem, indirect, &all);
        write(&mem, TABLE, &[(indirect, 48, 4, 0)]);
        assert_eq!(found(&mem, TABLE, 0), all);
        // Outside memory: the last one is not there.
        let end = BORDER + 0x1000 - 40;
        write(&mem, end, &all[..2]);
        assert_eq!(found(&mem, end, 0), all[..2]);
    }

    fn descriptor() -> impl Strategy<Value = Plain> {
        let addr = prop_oneof![
            Just(TABLE),
            Just(0x2000),
            Just(BORDER - 24),
            Just(BORDER + 0xff0),
            Just(u64::MAX - 8)
        ];
        let len = prop_oneof![
            (0u32..10).prop_map(|n| n * 16),
            Just(33),
            Just(16 << 16),
            Just(u32::MAX - 20)
        ];
        (addr, len, 0u16..8, 0u16..9)
    }

    proptest! {
        #[test]
        fn chains_are_what_the_library_finds(
            direct in proptest::collection::vec(descriptor(), 8),
            indirect in proptest::collection::vec(descriptor(), 8),
            across in proptest::collection::vec(descriptor(), 8),
            head in 0u16..9,
        ) {
            let mem = memory_in_pieces(&[BORDER as usize, 0x1000]);
            write(&mem, TABLE, &direct);
            write(&mem, 0x2000, &indirect);
            write(&mem, BORDER - 24, &across);
            prop_assert_eq!(found(&mem, TABLE, head), expected(&mem, TABLE, head));
        }
    }
}
