//! Finds the pages of a mapping of which this process has its own copies.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{MemoryError, PAGE_SIZE};

/// Bits of an entry (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;

/// The size of an entry in bytes.
const ENTRY_SIZE: u64 = 8;

/// The open `/proc/self/pagemap`, by which a snapshot or a migration finds the memory that is in
/// use.
///
/// It is opened by its path when it is needed. A program that enters a jail first opens it before,
/// and passes it to [`VmBuilder::page_map`](crate::VmBuilder::page_map) for each VM. It tells of
/// the process that opened it, and of no child.
#[derive(Debug, Clone)]
pub struct PageMap(Arc<File>);

impl PageMap {
    /// Opens `/proc/self/pagemap`.
    ///
    /// # Errors
    /// [`MemoryError::PageMap`].
    pub fn open() -> Result<Self, MemoryError> {
        let file = File::open("/proc/self/pagemap").map_err(MemoryError::PageMap)?;
        Ok(Self(Arc::new(file)))
    }

    /// Returns the pages of the mapping at `start`, `len` bytes long, that are neither a file's nor
    /// untouched, as offsets into the mapping. (Pages that were only read are included if the
    /// kernel mapped its zero page.)
    pub(super) fn own(&self, start: usize, len: u64) -> io::Result<Vec<Range<u64>>> {
        let first = start as u64 / PAGE_SIZE;
        let count = len.div_ceil(PAGE_SIZE);
        let mut own: Vec<Range<u64>> = Vec::new();
        let mut buffer = vec![0u8; 64 << 10];
        let mut page = 0;
        while page < count {
            let want = (count - page)
                .saturating_mul(ENTRY_SIZE)
                .min(buffer.len() as u64);
            let bytes = &mut buffer[..want as usize];
            self.0.read_exact_at(bytes, (first + page) * ENTRY_SIZE)?;
            for entry in bytes.chunks_exact(ENTRY_SIZE as usize) {
                let entry = entry.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
                if is_own(entry) {
                    let at = page * PAGE_SIZE;
                    match own.last_mut() {
                        Some(last) if last.end == at => last.end = at + PAGE_SIZE,
                        _ => own.push(at..at + PAGE_SIZE),
                    }
                }
                page += 1;
            }
        }
        Ok(own)
    }
}

fn is_own(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE_OR_SHARED == 0
}

#[cfg(test)]
mod tests {
    use super::super::{GuestMemory, MemoryShape, MemorySize};
    use super::*;
    use std::sync::Arc;
    use vm_memory::{Bytes, GuestAddress, GuestMemory as _};

    fn own(memory: &GuestMemory) -> Vec<Range<u64>> {
        let region = memory.ram().iter().next().unwrap();
        let map = PageMap::open().unwrap();
        map.own(region.as_ptr().addr(), memory.shape().total().as_bytes())
            .unwrap()
    }

    #[test]
    fn pages_of_a_private_file_are_own_once_they_are_written_by_whomever() {
        use std::io::{Seek, Write};
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 16 << 20]).unwrap();
        let memory =
            GuestMemory::private(MemoryShape::fixed(MemorySize::mib(16)), Arc::new(file)).unwrap();
        let mut page = [0; 4096];
        memory.ram().read_slice(&mut page, GuestAddress(0)).unwrap();
        assert_eq!(own(&memory), []);
        memory.ram().write_obj(1u8, GuestAddress(0x5000)).unwrap();
        // The kernel, for example on behalf of a disk.
        let mut other = tempfile::tempfile().unwrap();
        other.write_all(&[9; 0x2000]).unwrap();
        other.rewind().unwrap();
        let at = GuestAddress(0x9800);
        let ram = memory.ram();
        ram.read_exact_volatile_from(at, &mut other, 0x1000)
            .unwrap();
        assert_eq!(own(&memory), [0x5000..0x6000, 0x9000..0xb000]);
    }

    #[test]
    fn an_open_page_map_is_read_in_place_of_one_that_is_opened_by_its_path() {
        let mut memory = GuestMemory::anonymous(MemoryShape::fixed(MemorySize::mib(16))).unwrap();
        memory.set_page_map(Some(PageMap::open().unwrap()));
        memory.ram().write_obj(1u8, GuestAddress(0x5000)).unwrap();
        assert!(memory.touched().unwrap().bytes() > 0);
        let empty = tempfile::tempfile().unwrap();
        memory.set_page_map(Some(PageMap(Arc::new(empty))));
        let error = memory.touched().unwrap_err();
        assert!(matches!(error, MemoryError::PageMap(_)), "{error}");
    }

    #[test]
    fn pages_of_anonymous_memory_are_own_once_they_are_touched() {
        let memory = GuestMemory::anonymous(MemoryShape::fixed(MemorySize::mib(16))).unwrap();
        assert_eq!(own(&memory), []);
        memory
            .ram()
            .write_obj(1u8, GuestAddress(0x40_5000))
            .unwrap();
        let own = own(&memory);
        // One page, or a huge one.
        let [range] = own.as_slice() else {
            panic!("{own:?}")
        };
        assert!(range.contains(&0x40_5000) && range.end - range.start <= 2 << 20);
    }

    #[test]
    fn swapped_pages_are_own_and_pages_of_files_are_not() {
        assert!(is_own(PRESENT) && is_own(SWAPPED));
        assert!(!is_own(0) && !is_own(PRESENT | FILE_OR_SHARED));
    }
}
