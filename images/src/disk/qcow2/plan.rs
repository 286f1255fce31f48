//! Plan of clusters that are still to come and whose place on the disk is known.

use std::collections::BTreeMap;

/// Data that is compressed in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Packed {
    /// Its first byte in the file.
    pub(super) start: u64,
    /// After its last sector; the data itself may be shorter.
    pub(super) end: u64,
    /// The cluster of the disk.
    pub(super) guest: u64,
}

/// Expected clusters, in their order in the file.
#[derive(Debug)]
pub(super) struct Plan {
    capacity: usize,
    /// Runs by their first host cluster: first guest cluster and length.
    whole: BTreeMap<u64, (u64, u64)>,
    packed: BTreeMap<(u64, u64), u64>,
}

impl Plan {
    /// Creates a plan of at most `capacity` entries.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            whole: BTreeMap::new(),
            packed: BTreeMap::new(),
        }
    }

    /// Returns whether another `entries` entries fit.
    pub(super) fn has_room(&self, entries: usize) -> bool {
        self.whole.len() + self.packed.len() + entries <= self.capacity
    }

    /// Expects a host cluster for a guest cluster.
    pub(super) fn expect(&mut self, host: u64, guest: u64) {
        if let Some((first, (start, length))) = self.whole.range_mut(..host).next_back()
            && (*first + *length, *start + *length) == (host, guest)
        {
            *length += 1;
        } else {
            self.whole.insert(host, (guest, 1));
        }
    }

    pub(super) fn expect_packed(&mut self, packed: Packed) {
        self.packed.insert((packed.start, packed.guest), packed.end);
    }

    /// Returns the guest cluster that host cluster `host`, which was just read, is for.
    pub(super) fn take(&mut self, host: u64) -> Option<u64> {
        let first = self.whole.first_entry().filter(|run| *run.key() == host)?;
        let (guest, length) = first.remove();
        if length > 1 {
            self.whole.insert(host + 1, (guest + 1, length - 1));
        }
        Some(guest)
    }

    /// Returns where the first packed data starts.
    pub(super) fn first_packed(&self) -> Option<u64> {
        self.packed.first_key_value().map(|((start, _), _)| *start)
    }

    /// Takes packed data that ends at or before `position`, or with `all` everything that starts
    /// before it.
    pub(super) fn take_packed(&mut self, position: u64, all: bool) -> Vec<Packed> {
        let begun = (0, 0)..(position, 0);
        let found = self.packed.range(begun);
        let found: Vec<_> = found
            .filter(|(_, end)| all || **end <= position)
            .map(|((start, guest), end)| Packed {
                start: *start,
                end: *end,
                guest: *guest,
            })
            .collect();
        for packed in &found {
            self.packed.remove(&(packed.start, packed.guest));
        }
        found
    }

    /// Returns where the first data is that has not been read.
    pub(super) fn first(&self, cluster_bits: u32) -> Option<u64> {
        let whole = self.whole.first_key_value();
        let whole = whole.map(|(host, _)| host << cluster_bits);
        whole.into_iter().chain(self.first_packed()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_kept_as_one_and_given_back_one_by_one() {
        let mut plan = Plan::new(100);
        (10..20).for_each(|host| plan.expect(host, host + 100));
        plan.expect(20, 5);
        assert_eq!(plan.whole.len(), 2);
        assert_eq!(plan.take(9), None);
        (10..20).for_each(|host| assert_eq!(plan.take(host), Some(host + 100)));
        assert_eq!(plan.first(16), Some(20 << 16));
        assert_eq!(plan.take(20), Some(5));
        assert_eq!(plan.first(16), None);
    }

    #[test]
    fn packed_data_comes_back_when_all_of_it_is_there() {
        let mut plan = Plan::new(100);
        for (start, end, guest) in [(100, 512, 1), (400, 1024, 2), (2000, 2048, 3)] {
            plan.expect_packed(Packed { start, end, guest });
        }
        let guests = |found: Vec<Packed>| found.iter().map(|p| p.guest).collect::<Vec<_>>();
        assert_eq!(guests(plan.take_packed(512, false)), [1]);
        assert_eq!(guests(plan.take_packed(512, true)), [2]);
        assert_eq!(plan.first_packed(), Some(2000));
    }
}
