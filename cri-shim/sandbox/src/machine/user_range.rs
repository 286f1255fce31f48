//! Which users of the host a guest's users are.

use podvisor_vmm::IdMap;
use serde::{Deserialize, Serialize};

/// A range of the guest's users and groups that are the host's from 0 on, up to the range's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRange {
    /// The guest's number of the host's root; not 0.
    pub first: u32,
    /// The number of ids.
    pub count: u32,
}

impl UserRange {
    /// Whether a guest can have this range.
    #[must_use]
    pub fn is_valid(self) -> bool {
        self.map().is_some()
    }

    /// Returns the map; `None` if no guest can have it.
    pub(super) fn map(self) -> Option<IdMap> {
        IdMap::new(self.first, self.count)
    }
}
