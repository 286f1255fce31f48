//! Ids of users and groups that differ between guest and host.

/// The id that the client sees for unmapped ids, whatever it maps itself.
pub(super) const NOBODY: u32 = u32::MAX - 1;

/// A mapping of the guest's ids to ids of the host.
///
/// A range of the guest's ids is mapped to as many ids of the host from 0 on. In addition, the
/// guest's 0 is mapped to the host's 0: what the guest's own root creates belongs to root. No other
/// id of the guest may own anything, and what other ids of the host own appears as owned by
/// `nobody` in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdMap {
    first: u32,
    count: u32,
}

impl IdMap {
    /// Maps the guest's ids from `first` on to the host's from 0 on, `count` of them. `None` if the
    /// range is empty, includes 0 (which is the guest's own), or goes beyond 4294967293.
    #[must_use]
    pub fn new(first: u32, count: u32) -> Option<Self> {
        let end = first.checked_add(count)?;
        (first > 0 && count > 0 && end <= NOBODY).then_some(Self { first, count })
    }

    /// Returns the guest's id for one of the host.
    pub(super) fn to_guest(self, id: u32) -> u32 {
        match id < self.count {
            true => self.first.saturating_add(id),
            false => NOBODY,
        }
    }

    /// The host's id for one of the guest's; none where it may own nothing.
    pub(super) fn to_host(self, id: u32) -> Option<u32> {
        if id == 0 {
            return Some(0);
        }
        id.checked_sub(self.first).filter(|id| *id < self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_the_guests_is_the_hosts_from_0_on() {
        let ids = IdMap::new(65_536, 65_536).unwrap();
        for (guest, host) in [(65_536, 0), (66_536, 1000), (131_071, 65_535)] {
            assert_eq!(ids.to_host(guest), Some(host));
            assert_eq!(ids.to_guest(host), guest);
        }
        assert_eq!(ids.to_host(0), Some(0));
        for nobody in [1, 1000, 65_535, 131_072, NOBODY, u32::MAX] {
            assert_eq!(ids.to_host(nobody), None, "{nobody}");
        }
        // An id of the host is never taken for one in the range.
        for other in [65_536, 70_000, 131_072, u32::MAX] {
            assert_eq!(ids.to_guest(other), NOBODY, "{other}");
        }
    }

    #[test]
    fn a_range_has_neither_root_nor_nobody_in_it() {
        assert_eq!(IdMap::new(0, 65_536), None);
        assert_eq!(IdMap::new(65_536, 0), None);
        assert_eq!(IdMap::new(1000, u32::MAX - 1000), None);
        assert_eq!(IdMap::new(u32::MAX, 2), None);
        assert!(IdMap::new(1, NOBODY - 1).is_some());
    }
}
