//! The guest's physical memory as it is reported to the kernel.

use podvisor_devices::GuestRam;
use vm_memory::{Address, GuestMemory, GuestMemoryRegion};

use super::BootError;
use crate::layout;

/// The type of memory, in E820 as in PVH's map. Nothing else is listed: each entry costs Linux time
/// when it maps its memory, and unlisted ranges are not used.
pub(super) const RAM: u32 = 1;

/// A range of guest physical addresses that is memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) size: u64,
}

/// The ranges in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MemoryMap {
    ranges: Vec<Range>,
    low_end: u64,
}

impl MemoryMap {
    /// Returns the map of `mem`, whose regions are in ascending order (guaranteed by
    /// `GuestMemoryMmap`).
    pub(super) fn of(mem: &GuestRam) -> Result<Self, BootError> {
        let mut ram: Vec<(u64, u64)> = Vec::new();
        for region in mem.iter() {
            let start = region.start_addr().raw_value();
            let end = start + region.len();
            match ram.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => ram.push((start, end)),
            }
        }
        let (low_end, above) = match ram.split_first() {
            Some((&(0, end), above)) if end > layout::HIMEM_START => {
                (end.min(layout::MMIO_START), above)
            }
            _ => return Err(BootError::MemoryLayout),
        };
        let range = |start, end| Range {
            start,
            size: end - start,
        };
        let mut ranges = vec![
            // Up to 1 MiB: the MP and ACPI tables, and what is video memory and ROM on a PC.
            range(0, layout::EBDA_START),
            range(layout::HIMEM_START, low_end),
        ];
        ranges.extend(above.iter().map(|&(start, end)| range(start, end)));
        Ok(Self { ranges, low_end })
    }

    pub(super) fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Returns the end of the memory that is contiguous from address 0, at most the hole for
    /// devices.
    pub(super) fn low_end(&self) -> u64 {
        self.low_end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn map(regions: &[(u64, usize)]) -> Result<MemoryMap, BootError> {
        let regions: Vec<_> = regions.iter().map(|&(a, l)| (GuestAddress(a), l)).collect();
        MemoryMap::of(&GuestRam::from_ranges(&regions).unwrap())
    }

    #[test]
    fn small_memory_is_one_range_above_the_first_mib() {
        let map = map(&[(0, 128 << 20)]).unwrap();
        assert_eq!(map.low_end(), 128 << 20);
        let last = map.ranges().last().unwrap();
        assert_eq!((last.start, last.size), (1 << 20, 127 << 20));
    }

    #[test]
    fn memory_behind_the_hole_is_listed_and_adjacent_regions_are_joined() {
        // No memory is touched: the mappings only use address space.
        let map = map(&[
            (0, 1 << 30),
            (1 << 30, 2 << 30),
            (layout::HIGH_RAM_START, 5 << 30),
        ])
        .unwrap();
        assert_eq!(map.low_end(), layout::MMIO_START);
        assert_eq!(map.ranges().len(), 3);
        let high = map.ranges()[2];
        assert_eq!((high.start, high.size), (layout::HIGH_RAM_START, 5 << 30));
    }

    #[test]
    fn ranges_are_ascending_and_do_not_overlap() {
        let map = map(&[(0, 64 << 20), (layout::HIGH_RAM_START, 1 << 20)]).unwrap();
        for pair in map.ranges().windows(2) {
            assert!(pair[0].start + pair[0].size <= pair[1].start);
        }
    }

    #[test]
    fn memory_without_a_first_mib_is_refused() {
        assert!(matches!(map(&[(0, 1 << 20)]), Err(BootError::MemoryLayout)));
        assert!(matches!(
            map(&[(4096, 64 << 20)]),
            Err(BootError::MemoryLayout)
        ));
    }
}
