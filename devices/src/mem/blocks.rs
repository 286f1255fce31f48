//! The record of which blocks are plugged in.

use std::ops::Range;

/// A bit per block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    bits: Vec<u8>,
    count: usize,
    plugged: usize,
}

impl Blocks {
    /// Creates it for `count` blocks, none of them plugged in.
    pub(super) fn new(count: usize) -> Self {
        Self {
            bits: vec![0; count.div_ceil(8)],
            count,
            plugged: 0,
        }
    }

    /// Restores it from the result of [`Self::bits`]; `None` if that has another number of blocks.
    pub(super) fn from_bits(bits: &[u8], count: usize) -> Option<Self> {
        let mut blocks = Self::new(count);
        if bits.len() != blocks.bits.len() {
            return None;
        }
        blocks.bits.copy_from_slice(bits);
        let beyond = blocks.bits.len().saturating_mul(8);
        if blocks.any(count..beyond) {
            return None;
        }
        blocks.plugged = bits.iter().map(|byte| byte.count_ones() as usize).sum();
        Some(blocks)
    }

    pub(super) fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Number of blocks that are plugged in.
    pub(super) fn plugged(&self) -> usize {
        self.plugged
    }

    /// The end of the plugged blocks: no block from there on is plugged in.
    pub(super) fn end(&self) -> usize {
        let last = self.all().rev().find(|block| self.is_plugged(*block));
        last.map_or(0, |block| block.saturating_add(1))
    }

    /// All blocks.
    pub(super) fn all(&self) -> Range<usize> {
        0..self.count
    }

    /// Whether any of the blocks in `range` is plugged in.
    pub(super) fn any(&self, mut range: Range<usize>) -> bool {
        range.any(|block| self.is_plugged(block))
    }

    /// Whether each block in `range` is plugged in.
    pub(super) fn each(&self, mut range: Range<usize>) -> bool {
        range.all(|block| self.is_plugged(block))
    }

    pub(super) fn set(&mut self, range: Range<usize>, plugged: bool) {
        for block in range {
            if self.is_plugged(block) == plugged {
                continue;
            }
            if let Some(byte) = self.bits.get_mut(block / 8) {
                *byte ^= 1 << (block % 8);
                self.plugged = match plugged {
                    true => self.plugged.saturating_add(1),
                    false => self.plugged.saturating_sub(1),
                };
            }
        }
    }

    fn is_plugged(&self, block: usize) -> bool {
        let byte = self.bits.get(block / 8);
        byte.is_some_and(|byte| byte & (1 << (block % 8)) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bits_are_those_of_this_number_of_blocks() {
        let mut blocks = Blocks::new(10);
        blocks.set(1..3, true);
        blocks.set(9..10, true);
        assert_eq!((blocks.bits(), blocks.plugged()), (&[6, 2][..], 3));
        assert_eq!(Blocks::from_bits(blocks.bits(), 10), Some(blocks));
        assert_eq!(Blocks::from_bits(&[6, 4], 10), None, "there is no block 10");
        assert_eq!(Blocks::from_bits(&[6], 10), None);
        assert_eq!(Blocks::from_bits(&[6, 2, 0], 10), None);
    }

    proptest! {
        #[test]
        fn blocks_are_as_they_were_set_last(
            sets in prop::collection::vec((0usize..70, 0usize..70, any::<bool>()), 0..20),
            asked in (0usize..70, 0usize..70),
        ) {
            let mut blocks = Blocks::new(70);
            let mut model = [false; 70];
            for (start, end, plugged) in sets {
                let range = start.min(end)..start.max(end);
                blocks.set(range.clone(), plugged);
                model[range].fill(plugged);
            }
            let range = asked.0.min(asked.1)..asked.0.max(asked.1);
            let part = &model[range.clone()];
            prop_assert_eq!(blocks.any(range.clone()), part.contains(&true));
            prop_assert_eq!(blocks.each(range), !part.contains(&false));
            let end = model.iter().rposition(|plugged| *plugged).map_or(0, |last| last + 1);
            prop_assert_eq!(blocks.end(), end);
            let plugged = model.iter().filter(|plugged| **plugged).count();
            prop_assert_eq!(blocks.plugged(), plugged);
            prop_assert_eq!(Blocks::from_bits(blocks.bits(), 70), Some(blocks));
        }
    }
}
