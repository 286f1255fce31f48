//! Free blocks: the end of the file, and those that whiteouts and replaced files freed.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree::Extent;

/// Allocates runs of blocks. The choice depends only on the order of calls.
#[derive(Debug)]
pub(super) struct Space {
    /// First block that was never used.
    end: u32,
    by_start: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
}

impl Space {
    pub(super) fn new(first: u32) -> Self {
        Self {
            end: first,
            by_start: BTreeMap::new(),
            by_length: BTreeSet::new(),
        }
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Takes the smallest hole that fits, otherwise the end of the file. `None` if block numbers
    /// run out (16 TiB). The flag says whether the blocks held other data before.
    pub(super) fn take(&mut self, blocks: u32) -> Option<(Extent, bool)> {
        let hole = self.by_length.range((blocks, 0)..).next().copied();
        if let Some((length, start)) = hole {
            self.remove(start, length);
            if length > blocks {
                self.insert(start + blocks, length - blocks);
            }
            return Some((Extent { start, blocks }, true));
        }
        Some((self.take_at_end(blocks)?, false))
    }

    /// Takes blocks at the end of the file, even if there are holes.
    pub(super) fn take_at_end(&mut self, blocks: u32) -> Option<Extent> {
        let start = self.end;
        self.end = start.checked_add(blocks)?;
        Some(Extent { start, blocks })
    }

    pub(super) fn give_back(&mut self, extent: Extent) {
        let (mut start, mut length) = (extent.start, extent.blocks);
        if let Some((&before, &blocks)) = self.by_start.range(..start).next_back()
            && before + blocks == start
        {
            self.remove(before, blocks);
            start = before;
            length += blocks;
        }
        if let Some(&blocks) = self.by_start.get(&(start + length)) {
            self.remove(start + length, blocks);
            length += blocks;
        }
        self.insert(start, length);
    }

    /// Returns the free ranges before the end, in order.
    pub(super) fn holes(&self) -> impl Iterator<Item = Extent> + '_ {
        self.by_start
            .iter()
            .map(|(&start, &blocks)| Extent { start, blocks })
    }

    fn insert(&mut self, start: u32, length: u32) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn holes_join_and_are_used_before_the_end() {
        let mut space = Space::new(1);
        let taken: Vec<_> = (0..4).map(|_| space.take(2).unwrap().0).collect();
        space.give_back(taken[0]);
        space.give_back(taken[2]);
        space.give_back(taken[1]);
        assert_eq!(
            space.holes().collect::<Vec<_>>(),
            [Extent {
                start: 1,
                blocks: 6
            }]
        );
        assert_eq!(
            space.take(5),
            Some((
                Extent {
                    start: 1,
                    blocks: 5
                },
                true
            ))
        );
        assert_eq!(
            space.take(2),
            Some((
                Extent {
                    start: 9,
                    blocks: 2
                },
                false
            ))
        );
        assert_eq!(
            space.take(1),
            Some((
                Extent {
                    start: 6,
                    blocks: 1
                },
                true
            ))
        );
        assert_eq!(space.take(u32::MAX), None);
    }

    proptest! {
        #[test]
        fn nothing_is_handed_out_twice_or_lost(steps in prop::collection::vec((1u32..9, any::<bool>()), 1..200)) {
            let mut space = Space::new(1);
            let mut held: Vec<Extent> = Vec::new();
            for (blocks, release) in steps {
                if release && !held.is_empty() {
                    let extent = held.swap_remove(blocks as usize % held.len());
                    space.give_back(extent);
                } else {
                    held.push(space.take(blocks).unwrap().0);
                }
                let mut all: Vec<_> = held.iter().copied().chain(space.holes()).collect();
                all.sort_by_key(|extent| extent.start);
                let mut next = 1;
                for extent in all {
                    prop_assert_eq!(extent.start, next);
                    next += extent.blocks;
                }
                prop_assert_eq!(next, space.end());
            }
        }
    }
}
