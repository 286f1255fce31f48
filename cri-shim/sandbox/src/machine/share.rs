//! Directories of the host that a guest sees.

use std::os::fd::{AsFd, OwnedFd};

use podvisor_vmm::{FsDevice, FsProcess};
use rustix::fs::{Mode, OFlags, openat};
use serde::{Deserialize, Serialize};

use super::error::MachineError;
use super::user_range::UserRange;

/// The tag of the directory that a machine shares.
pub const SHARE_TAG: &str = "shared";

/// A directory of the host that is shared with a guest. The guest may only change what is mounted
/// in it.
#[derive(Debug)]
pub struct SharedDir {
    /// The directory.
    pub dir: OwnedFd,
    /// Maps users of the guest to those of the host; `None`: the numbers are the same.
    pub users: Option<UserRange>,
}

/// Most bytes of a tag (virtio 1.3 §5.11.4).
const MAX_TAG: usize = 36;

/// A directory that a guest with an operating system of its own mounts by its tag. It is one of
/// those in the directory that its sandbox shares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineShare {
    /// The tag (`mount -t virtiofs TAG DIR`), at most 36 bytes.
    pub tag: String,
    /// The directory's name in the sandbox's.
    pub name: String,
    /// The guest cannot change it.
    pub is_read_only: bool,
}

impl MachineShare {
    /// Whether a guest can have it: its tag is one, and its name is that of an entry.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let is_tag = (1..=MAX_TAG).contains(&self.tag.len()) && !self.tag.contains('\0');
        let is_entry = !matches!(self.name.as_str(), "" | "." | "..");
        is_tag && is_entry && !self.name.contains(['/', '\0'])
    }

    /// Opens it in the sandbox's directory.
    pub(crate) fn open(self, all: impl AsFd) -> Result<OpenShare, MachineError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(all, &self.name, flags, Mode::empty()) {
            Ok(dir) => Ok(OpenShare { share: self, dir }),
            Err(error) => Err(MachineError::OpenShare {
                tag: self.tag,
                source: error.into(),
            }),
        }
    }
}

/// A share whose directory is open.
#[derive(Debug)]
pub(crate) struct OpenShare {
    share: MachineShare,
    dir: OwnedFd,
}

impl OpenShare {
    pub(crate) fn tag(&self) -> &str {
        &self.share.tag
    }

    pub(super) fn device(&self, process: Option<&FsProcess>) -> Result<FsDevice, MachineError> {
        let dir = self.dir.try_clone().map_err(MachineError::Duplicate)?;
        let tag = &self.share.tag;
        // It was opened with the directory that this one is in.
        let process = process.ok_or_else(|| MachineError::OpenShare {
            tag: tag.clone(),
            source: std::io::ErrorKind::Unsupported.into(),
        })?;
        let device = FsDevice::served_by(process, tag, dir)?;
        Ok(match self.share.is_read_only {
            true => device.read_only()?,
            false => device,
        })
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

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    use super::*;

    fn share(tag: &str, name: &str) -> MachineShare {
        MachineShare {
            tag: tag.to_owned(),
            name: name.to_owned(),
            is_read_only: false,
        }
    }

    #[test]
    fn a_share_is_an_entry_of_its_directory_with_a_tag() {
        assert!(share("work", "v0").is_valid());
        assert!(share(&"t".repeat(36), "v0").is_valid());
        for tag in ["", "a\0b", &"t".repeat(37)] {
            assert!(!share(tag, "v0").is_valid(), "{tag:?}");
        }
        for name in ["", ".", "..", "a/b", "/", "a\0b"] {
            assert!(!share("work", name).is_valid(), "{name:?}");
        }
    }

    #[test]
    fn only_a_directory_that_no_link_leads_to_is_shared() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("v0")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        symlink("/", dir.path().join("link")).unwrap();
        let all = File::open(dir.path()).unwrap();
        let opened = share("work", "v0").open(&all).unwrap();
        assert_eq!(opened.tag(), "work");
        for other in ["file", "link", "missing"] {
            let error = share("work", other).open(&all).unwrap_err().to_string();
            assert!(error.contains("\"work\""), "{error}");
        }
    }
}
