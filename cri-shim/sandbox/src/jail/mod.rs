//! The jail of a sandbox's process, which it enters before its guest runs its first instruction: a
//! guest that breaks out of its VM finds open files, and no way to anything else.
//!
//! [`spawn()`] starts a process in a PID namespace of its own, and [`close`] does the rest from
//! within, while the process has one thread: everything that is opened by path is open by then. The
//! layers, each of which holds without the others:
//!
//! | file | layer |
//! | --- | --- |
//! | `namespaces` | mount, IPC, UTS, network, cgroup and user namespaces; an empty root |
//! | `share` | the shared directory, as mounts of the jail's own |
//! | `users` | the users of volumes, mapped to others of the host |
//! | `own_user`, `identity` | a user and group of its own, capabilities, no_new_privs, resource limits |
//! | `paths` | Landlock: no file by path, no TCP, no signals outwards |
//! | `filter`, `program` | seccomp: the calls that are allowed, and the compiled filter |
//!
//! docs/sandbox.md lists what the filter allows, call by call, and the results of attempts to break
//! out. Nothing here knows machines or containers.

mod error;
mod filter;
mod identity;
mod namespaces;
mod own_user;
mod paths;
mod share;
mod spawn;
pub(crate) mod users;

use std::os::fd::AsFd as _;
use std::time::Instant;

use tracing::debug;

pub use crate::bind::pass_on_mounts;
pub use error::{JailError, MissingLayer};
pub use filter::{CallFilter, KvmCalls};
pub use namespaces::{try_user_namespaces, user_namespaces_remedy};
pub use own_user::{UID_BASE, can_change_identity};
pub use paths::has_landlock;
pub(crate) use share::SHARE_IN_JAIL;
pub use share::Share;
pub(super) use spawn::close_inherited;
pub use spawn::limit_arenas;
pub use spawn::spawn;
pub use users::{MappedUsers, try_mapped_users};

/// Enters the mounts of a jail, and nothing else of it.
#[cfg(test)]
pub(crate) fn enter_mounts_of(share: &Share) -> Result<(), JailError> {
    namespaces::enter(true)?;
    namespaces::empty_root(Some(share))
}

/// Puts this process into its jail permanently. Must be called while it has one thread; threads
/// that are started later are inside.
///
/// `share` is a directory that the process continues to serve by path, limited to files below it:
/// with it the process has the six capabilities that are needed to set the owners of files. It is
/// the host's root, unless the share has [mapped users](Share::with_mapped_users): then it has them
/// in its user namespace alone.
///
/// Returns the layers that the host does not support.
///
/// # Errors
/// [`JailError`]: some layers may be in effect then, and the process is unusable.
pub fn close(share: Option<&Share>, calls: CallFilter) -> Result<Vec<MissingLayer>, JailError> {
    let begin = Instant::now();
    let can_change_identity = can_change_identity();
    let uid = own_user::own_uid()?;
    identity::limit_resources()?;
    namespaces::enter(can_change_identity)?;
    namespaces::empty_root(share)?;
    let mut missing = Vec::new();
    match (can_change_identity, share) {
        (true, None) => missing.extend(identity::switch_to_jail_user(uid)?),
        (true, Some(share)) => match share.users() {
            Some(users) => identity::become_root_of(users)?,
            None => {
                identity::keep_for_share()?;
                missing.push(MissingLayer::MappedUsers);
            }
        },
        (false, _) => identity::drop_capabilities()?,
    }
    identity::no_new_privileges()?;
    missing.extend(paths::close(share.map(|share| share.as_fd()))?);
    if let CallFilter::Enforced { kvm } = calls {
        filter::set(share.is_some(), kvm)?;
    }
    debug!(elapsed = ?begin.elapsed(), ?missing, "the jail is closed");
    Ok(missing)
}
