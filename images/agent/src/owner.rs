//! To whom files of a container belong.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The guest's ids of a container's root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Owner {
    /// Becomes the owner of the file at `path`, which is not a link.
    pub(crate) fn take(self, path: &Path) -> io::Result<()> {
        std::os::unix::fs::lchown(path, Some(self.uid), Some(self.gid))
    }
}
