//! The directory that a process continues to serve from within its jail.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mount::{MountFlags, mount_remount};
use tracing::info;

use super::error::{JailError, step};
use super::own_user::{can_change_identity, own_uid};
use super::users::MappedUsers;
use crate::bind::{DetachedTree, Extent, MountPoint, Propagation};

/// Its name in the jail's root directory.
const NAME: &str = "share";

/// Its path in the jail.
pub(crate) const SHARE_IN_JAIL: &str = "/share";

/// A directory that is served from within a jail.
///
/// A descriptor of the host's mounts stays there, whatever the root of a process is: walking up
/// (`..`) from it ends at the host's root. So the jail has its own mounts of the directory, and
/// walking up ends at the jail's root.
#[derive(Debug)]
pub struct Share {
    form: Form,
    users: Option<MappedUsers>,
}

#[derive(Debug)]
enum Form {
    Mounts(DetachedTree),
    /// Without the permission to copy mounts, the directory is used as it is, and only Landlock
    /// limits it.
    Directory(OwnedFd),
}

impl Share {
    /// Copies a directory's mounts. Must be called before [`close`](super::close).
    ///
    /// Volumes are mounted in the jail ([`SharedDirectory`](crate::SharedDirectory)). Mounts that
    /// the host makes later in the directory itself are seen there, too, if it [passes its mounts
    /// on](super::pass_on_mounts).
    ///
    /// # Errors
    /// The kernel's, except for a missing permission.
    pub fn new(dir: OwnedFd) -> io::Result<Self> {
        let form = match DetachedTree::of(&dir, Extent::Whole, Propagation::FromSource) {
            Ok(mounts) => Form::Mounts(mounts),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Form::Directory(dir),
            Err(error) => return Err(error),
        };
        Ok(Self { form, users: None })
    }

    /// Uses a directory of the host as it is, for a process without a jail: later mounts do not
    /// propagate to detached mounts.
    #[must_use]
    pub fn as_it_is(dir: OwnedFd) -> Self {
        let form = Form::Directory(dir);
        Self { form, users: None }
    }

    /// Lets the process serve the directory as root of a user namespace of its own, which it enters
    /// with its jail, if the host can do so: volumes are then mounted with that namespace's users
    /// ([`SharedDirectory::attach`](crate::SharedDirectory::attach)). In the directory itself it is
    /// nobody, and may search it if others may.
    #[must_use]
    pub fn with_mapped_users(mut self) -> Self {
        if !self.has_mounts() || !can_change_identity() {
            return self;
        }
        let root = own_uid().map_err(io::Error::other);
        match root.and_then(MappedUsers::new) {
            Ok(users) => self.users = Some(users),
            Err(error) => info!(%error, "volumes are served as the host's root"),
        }
        self
    }

    /// Returns the users of its volumes, if these are mapped.
    pub(super) fn users(&self) -> Option<&MappedUsers> {
        self.users.as_ref()
    }

    /// Whether the jail has its own mounts of it.
    pub(super) fn has_mounts(&self) -> bool {
        matches!(self.form, Form::Mounts(_))
    }

    /// Mounts it in the jail's root directory, which has these flags and is read-only from then on.
    pub(super) fn attach(&self, root: BorrowedFd<'_>, flags: MountFlags) -> Result<(), JailError> {
        let Form::Mounts(mounts) = &self.form else {
            return Ok(());
        };
        let attached = MountPoint::make(root, NAME, true).and_then(|point| mounts.attach(&point));
        attached.map_err(step("mount the shared directory in the jail"))?;
        let read_only = mount_remount(".", flags | MountFlags::RDONLY, c"");
        read_only.map_err(step("make the jail's root directory read-only"))
    }
}

/// The directory, before and after the jail is entered.
impl AsFd for Share {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.form {
            Form::Mounts(mounts) => mounts.as_fd(),
            Form::Directory(dir) => dir.as_fd(),
        }
    }
}
