//! A directory of the host that a guest sees.

use std::os::fd::OwnedFd;

use podvisor_vmm::{FsDevice, IdMap};
use serde::{Deserialize, Serialize};

use super::{MachineError, SHARE_TAG};

/// A directory of the host that is shared with a guest. The guest may only change what is mounted
/// in it.
#[derive(Debug)]
pub struct SharedDir {
    /// The directory.
    pub dir: OwnedFd,
    /// Maps users of the guest to those of the host; `None`: the numbers are the same.
    pub users: Option<UserRange>,
}

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

    fn map(self) -> Option<IdMap> {
        IdMap::new(self.first, self.count)
    }
}

impl SharedDir {
    pub(super) fn device(self) -> Result<FsDevice, MachineError> {
        let share = FsDevice::new(SHARE_TAG, self.dir)?.writable_below_mounts()?;
        let Some(users) = self.users else {
            return Ok(share);
        };
        let ids = users.map().ok_or(MachineError::Users(users))?;
        Ok(share.map_ids(ids)?)
    }
}
