//! The pages that a VM writes soon after it was restored from a snapshot.

use std::ops::{Range, RangeInclusive};

use super::format::{Reader, Writer};
use crate::memory::PAGE_SIZE;

pub(super) const VERSION: u32 = 1;
/// The versions that can be read.
pub(super) const READABLE: RangeInclusive<u32> = 1..=VERSION;

/// The maximum size of a set: each VM starts with this much memory of its own.
const MAX_SIZE: u64 = 64 << 20;

/// The pages of its memory that a VM has written since it was restored from a snapshot: other VMs
/// that are restored from it, and are about to do the same, will write them too.
///
/// [`Vm::working_set`](crate::Vm::working_set) finds it in a VM that rehearses what others will do,
/// and [`Snapshot::set_working_set`](super::Snapshot::set_working_set) stores it with the snapshot.
/// VMs that are restored after that have these pages copied in a few calls, where each page would
/// cost the guest a nested page fault, or three if it is read first. They use no memory that they
/// would not have used anyway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    /// Offsets into the memory file, in order.
    pages: Vec<Range<u64>>,
}

impl WorkingSet {
    /// Takes sorted ranges of whole pages; if there are too many, only the first ones.
    pub(crate) fn new(mut pages: Vec<Range<u64>>) -> Self {
        let mut left = MAX_SIZE;
        for range in &mut pages {
            range.end = range.end.min(range.start.saturating_add(left));
            left -= range.end - range.start;
        }
        pages.retain(|range| !range.is_empty());
        Self { pages }
    }

    /// Returns the part of it that lies in the first `memory` bytes.
    pub(super) fn within(mut self, memory: u64) -> Self {
        for range in &mut self.pages {
            range.end = range.end.min(memory);
        }
        self.pages.retain(|range| !range.is_empty());
        self
    }

    /// Returns its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|range| range.end - range.start).sum()
    }

    pub(crate) fn pages(&self) -> &[Range<u64>] {
        &self.pages
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u32(u32::try_from(self.pages.len()).unwrap_or(u32::MAX));
        for range in &self.pages {
            out.u64(range.start);
            out.u64(range.end);
        }
        out.finish()
    }

    /// `memory` is the amount that the guest boots with.
    pub(super) fn decode(input: &mut Reader<'_>, memory: u64) -> Result<Self, &'static str> {
        let (mut last, mut total) = (0, 0);
        let pages = input.list(|range| {
            let range = range.u64()?..range.u64()?;
            let whole = range.start % PAGE_SIZE == 0 && range.end % PAGE_SIZE == 0;
            if !whole || range.start < last || range.end <= range.start || range.end > memory {
                return Err("pages out of order, or beyond the guest's memory");
            }
            last = range.end;
            total += range.end - range.start;
            if total > MAX_SIZE {
                return Err("more pages than a VM has to begin with");
            }
            Ok(range)
        })?;
        Ok(Self { pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn decoded(set: &WorkingSet, memory: u64) -> Result<WorkingSet, &'static str> {
        WorkingSet::decode(&mut Reader::new(&set.encode()), memory)
    }

    fn of(ranges: &[(u64, u64)]) -> WorkingSet {
        let pages = ranges.iter().map(|(start, end)| *start..*end).collect();
        WorkingSet { pages }
    }

    #[test]
    fn what_is_no_part_of_memory_is_refused() {
        assert!(decoded(&of(&[(0, 4096), (8192, MIB)]), MIB).is_ok());
        let bad: [&[(u64, u64)]; 6] = [
            &[(0, 4095)],
            &[(1, 4096)],
            &[(4096, 4096)],
            &[(4096, 8192), (0, 4096)],
            &[(0, MIB + 4096)],
            &[(0, 8192), (4096, 12288)],
        ];
        for ranges in bad {
            assert!(decoded(&of(ranges), MIB).is_err(), "{ranges:?}");
        }
        assert!(decoded(&of(&[(0, MAX_SIZE)]), MAX_SIZE * 2).is_ok());
        assert!(
            decoded(
                &of(&[(0, MAX_SIZE), (MAX_SIZE + 4096, MAX_SIZE + 8192)]),
                MAX_SIZE * 2
            )
            .is_err()
        );
    }

    #[test]
    fn of_a_set_that_is_too_large_the_first_pages_stay() {
        let set = WorkingSet::new(vec![
            0..MAX_SIZE - 4096,
            MAX_SIZE..MAX_SIZE + 8192,
            2 * MAX_SIZE..3 * MAX_SIZE,
        ]);
        assert_eq!(set.pages(), [0..MAX_SIZE - 4096, MAX_SIZE..MAX_SIZE + 4096]);
        assert_eq!(set.bytes(), MAX_SIZE);
    }

    proptest! {
        #[test]
        fn it_comes_back(lengths in proptest::collection::vec((1u64..9, 1u64..9), 0..50)) {
            let mut at = 0;
            let mut range = |(gap, len): (u64, u64)| {
                let start = at + gap * PAGE_SIZE;
                at = start + len * PAGE_SIZE;
                start..at
            };
            let set = WorkingSet::new(lengths.into_iter().map(&mut range).collect());
            prop_assert_eq!(decoded(&set, at).unwrap(), set);
        }
    }
}
