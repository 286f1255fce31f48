//! Which guest memory is written from now on, by whomever: for a migration, which copies memory
//! while its guest runs.
//!
//! KVM logs what vCPUs write, page by page, even where the host has huge pages: it takes a page's
//! mark away and protects it in one step, so that no write is missed between two looks. What devices
//! write is in the [`WriteLog`] that all their queues share.
#![allow(unsafe_code)] // the flags of KVM's memslots are changed

use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use kvm_ioctls::VmFd;
use podvisor_devices::{GuestRam, WriteLog};
use std::ops::Range;
use std::sync::Arc;
use vm_memory::{GuestMemory as _, GuestMemoryRegion, GuestRegionMmap};

use super::slots::memslot;
use super::{GuestMemory, PAGE_SIZE};
use crate::kvm::KvmError;

/// A set of pages of the guest's physical address space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSet(Vec<u64>);

impl PageSet {
    /// Adds the pages that `range`, of physical addresses, touches.
    pub(crate) fn insert(&mut self, range: &Range<u64>) {
        for page in range.start / PAGE_SIZE..range.end.div_ceil(PAGE_SIZE) {
            *self.word((page / 64) as usize) |= 1 << (page % 64);
        }
    }

    /// Adds the pages of a bitmap whose first bit is the page at the physical address `start`.
    pub(crate) fn insert_bitmap(&mut self, start: u64, bitmap: &[u64]) {
        let first = start / PAGE_SIZE;
        let (word, shift) = ((first / 64) as usize, first % 64);
        for (at, bits) in bitmap.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            *self.word(word + at) |= bits << shift;
            if shift > 0 && bits >> (64 - shift) != 0 {
                *self.word(word + at + 1) |= bits >> (64 - shift);
            }
        }
    }

    /// Adds all pages of another set.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.insert_bitmap(0, &other.0);
    }

    /// Returns the bytes of all pages.
    pub(crate) fn bytes(&self) -> u64 {
        let pages: u64 = self.0.iter().map(|word| u64::from(word.count_ones())).sum();
        pages * PAGE_SIZE
    }

    /// Returns ranges of physical addresses, in order, each of at most `most` bytes, which are a
    /// multiple of a page.
    pub(crate) fn ranges(&self, most: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = self.find(next, true)?;
            let end = self.find(start, false).unwrap_or(self.0.len() as u64 * 64);
            next = end.min(start + (most / PAGE_SIZE).max(1));
            Some(start * PAGE_SIZE..next * PAGE_SIZE)
        })
    }

    /// Returns the first page from `from` on that is in the set, or is not.
    fn find(&self, from: u64, is_in: bool) -> Option<u64> {
        let flip = if is_in { 0 } else { u64::MAX };
        let mut at = (from / 64) as usize;
        let mut bits = (self.0.get(at)? ^ flip) & (u64::MAX << (from % 64));
        while bits == 0 {
            at += 1;
            bits = self.0.get(at)? ^ flip;
        }
        Some(at as u64 * 64 + u64::from(bits.trailing_zeros()))
    }

    fn word(&mut self, at: usize) -> &mut u64 {
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        &mut self.0[at]
    }
}

/// A log of all writes to a machine's memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryLog {
    vm: Arc<VmFd>,
    all: GuestRam,
    devices: WriteLog,
}

impl MemoryLog {
    /// Begins to log. The machine is paused.
    pub(crate) fn start(vm: &Arc<VmFd>, memory: &GuestMemory) -> Result<Self, KvmError> {
        let log = Self {
            vm: vm.clone(),
            all: memory.all().clone(),
            devices: memory.writes().clone(),
        };
        // What fails halfway is ended by the drop.
        log.set_flags(KVM_MEM_LOG_DIRTY_PAGES)?;
        log.devices.start(memory.shape().end());
        Ok(log)
    }

    /// Returns the pages that were written since the last call, or since the log was started.
    pub(crate) fn take(&self) -> Result<PageSet, KvmError> {
        let mut written = PageSet::default();
        written.insert_bitmap(0, &self.devices.take());
        for (slot, region) in self.writable() {
            let len = usize::try_from(region.len()).unwrap_or(usize::MAX);
            let bitmap =
                (self.vm.get_dirty_log(slot, len)).map_err(KvmError::ioctl("KVM_GET_DIRTY_LOG"))?;
            written.insert_bitmap(region.start_addr().0, &bitmap);
        }
        Ok(written)
    }

    fn set_flags(&self, flags: u32) -> Result<(), KvmError> {
        for (slot, region) in self.writable() {
            let slot = memslot(slot, region, flags);
            // SAFETY: the same addresses as those of the slot that exists: only its flags change.
            unsafe { self.vm.set_user_memory_region(slot) }
                .map_err(KvmError::ioctl("KVM_SET_USER_MEMORY_REGION"))?;
        }
        Ok(())
    }

    /// The slots that a guest may write, as they were added.
    fn writable(&self) -> impl Iterator<Item = (u32, &GuestRegionMmap)> {
        let slots = (0..).zip(self.all.iter());
        slots.filter(|(_, region)| region.prot() & libc::PROT_WRITE != 0)
    }
}

impl Drop for MemoryLog {
    fn drop(&mut self) {
        self.devices.stop();
        if let Err(error) = self.set_flags(0) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "KVM still logs written memory, which costs the guest time"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn pages(set: &PageSet) -> Vec<u64> {
        let ranges = set.ranges(PAGE_SIZE);
        ranges.map(|range| range.start / PAGE_SIZE).collect()
    }

    #[test]
    fn ranges_join_neighbours_up_to_a_limit() {
        let mut set = PageSet::default();
        for page in [1, 2, 3, 63, 64, 200] {
            set.insert(&(page * PAGE_SIZE..page * PAGE_SIZE + 1));
        }
        let ranges = |most| {
            let ranges = set.ranges(most);
            ranges
                .map(|range| (range.start / PAGE_SIZE, range.end / PAGE_SIZE))
                .collect::<Vec<_>>()
        };
        assert_eq!(ranges(1 << 20), [(1, 4), (63, 65), (200, 201)]);
        let two = [(1, 3), (3, 4), (63, 65), (200, 201)];
        assert_eq!(ranges(2 * PAGE_SIZE), two);
        assert_eq!(set.bytes(), 6 * PAGE_SIZE);
        assert_eq!(PageSet::default().ranges(PAGE_SIZE).count(), 0);
    }

    #[test]
    fn a_set_may_end_with_its_last_word() {
        let mut set = PageSet::default();
        set.insert(&(0..64 * PAGE_SIZE));
        let mut all = set.ranges(u64::MAX);
        assert_eq!((all.next(), all.next()), (Some(0..64 * PAGE_SIZE), None));
    }

    proptest! {
        #[test]
        fn a_set_has_what_was_put_into_it(
            ranges in prop::collection::vec((0u64..2000, 1u64..200), 0..8),
            first in 0u64..300,
            bitmap in prop::collection::vec(any::<u64>(), 0..6),
        ) {
            let mut set = PageSet::default();
            let mut model = BTreeSet::new();
            for (start, len) in ranges {
                set.insert(&(start * PAGE_SIZE..(start + len) * PAGE_SIZE));
                model.extend(start..start + len);
            }
            set.insert_bitmap(first * PAGE_SIZE, &bitmap);
            for (at, word) in bitmap.iter().enumerate() {
                let at = at as u64 * 64 + first;
                model.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| at + bit));
            }
            let mut merged = PageSet::default();
            merged.merge(&set);
            prop_assert_eq!(pages(&merged), model.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(set.bytes(), model.len() as u64 * PAGE_SIZE);
        }
    }
}
