//! Entry into a user namespace, the last namespace that a process enters.
//!
//! Until then it has the rights of the guest's root: libcontainer uses them to create mounts,
//! devices and control groups, and knows of no other user. From then on it has rights only in the
//! namespace, over mounts among others, and becomes its user there.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, lchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use oci_spec::runtime::{Process, User};
use rustix::fs::fchown;
use rustix::process::{Gid, Uid};
use rustix::termios::isatty;
use rustix::thread::{
    LinkNameSpaceType, move_into_link_name_space, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use serde::{Deserialize, Serialize};

use crate::owner::Owner;

/// Where the container has its devices.
const DEV: &str = "/dev";

/// Where its terminals are, a separate file system.
const TERMINALS: &str = "/dev/pts";

/// A user namespace to enter.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UserEntry {
    /// The path under which the guest's root opens it.
    pub namespace: PathBuf,
    /// Whether the container's mounts, and its view of control groups, become the namespace's.
    pub owns_mounts: bool,
    /// The new owner of what libcontainer has created in /dev, if that is the container's own.
    pub dev: Option<Owner>,
    /// The new owner of the process's terminal, as an id of the guest.
    pub uid: u32,
}

/// A user namespace to enter, and the user to become in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UserStep {
    entry: UserEntry,
    user: User,
}

impl UserStep {
    /// Takes the user out of `process`, which runs as the guest's root until it enters.
    pub(super) fn take(process: &mut Process, entry: UserEntry) -> Self {
        let user = process.user().clone();
        let root = process.user_mut();
        root.set_uid(0).set_gid(0).set_additional_gids(None);
        Self { entry, user }
    }

    /// Opens the namespace while its path is visible.
    pub(super) fn load(self) -> anyhow::Result<LoadedStep> {
        let namespace =
            File::open(&self.entry.namespace).context("cannot open the user namespace")?;
        Ok(LoadedStep {
            namespace: Arc::new(namespace),
            owns_mounts: self.entry.owns_mounts,
            dev: self.entry.dev,
            guest_uid: self.entry.uid,
            user: self.user,
        })
    }
}

/// A [`UserStep`] that needs no more files.
#[derive(Debug, Clone)]
pub(super) struct LoadedStep {
    namespace: Arc<File>,
    owns_mounts: bool,
    dev: Option<Owner>,
    guest_uid: u32,
    user: User,
}

impl LoadedStep {
    /// Enters the namespace permanently. Afterwards the process has all capabilities in it,
    /// whatever its user.
    pub(super) fn enter(&self) -> anyhow::Result<()> {
        if let Some(owner) = self.dev {
            give_dev(owner).context("cannot give /dev to the container")?;
        }
        // In the namespace, no process has rights over what the guest's root owns.
        let stdin = io::stdin();
        if isatty(&stdin) {
            fchown(&stdin, Some(Uid::from_raw(self.guest_uid)), None)
                .context("cannot give the terminal to the process")?;
        }
        let users = Some(LinkNameSpaceType::User);
        move_into_link_name_space(self.namespace.as_fd(), users)
            .context("cannot enter the user namespace")?;
        if self.owns_mounts {
            crate::sys::own_mounts_and_cgroups()
                .context("cannot make the container's mounts its own")?;
        }
        let groups = self.user.additional_gids().iter().flatten();
        let groups: Vec<Gid> = groups.map(|gid| Gid::from_raw(*gid)).collect();
        let (uid, gid) = (
            Uid::from_raw(self.user.uid()),
            Gid::from_raw(self.user.gid()),
        );
        set_thread_groups(&groups).context("cannot set supplementary groups")?;
        set_thread_res_gid(gid, gid, gid).context("cannot set the group")?;
        set_thread_res_uid(uid, uid, uid).context("cannot set the user")
    }
}

/// Makes `owner` the owner of everything that the guest's root owns in the container's /dev.
fn give_dev(owner: Owner) -> io::Result<()> {
    give_entries(Path::new(DEV), owner)?;
    match rustix::fs::statfs(TERMINALS) {
        Ok(about) if about.f_type == libc::DEVPTS_SUPER_MAGIC => {
            give_entries(Path::new(TERMINALS), owner)
        }
        // No terminals, or those of a volume.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Makes `owner` the owner of `dir` and everything that the guest's root owns in and below it,
/// except for other mounts.
fn give_entries(dir: &Path, owner: Owner) -> io::Result<()> {
    let meta = fs::symlink_metadata(dir)?;
    let mut found = vec![dir.to_owned()];
    while let Some(path) = found.pop() {
        let its = fs::symlink_metadata(&path)?;
        if its.dev() != meta.dev() {
            continue;
        }
        let uid = (its.uid() == 0).then_some(owner.uid);
        let gid = (its.gid() == 0).then_some(owner.gid);
        lchown(&path, uid, gid)?;
        if its.is_dir() {
            for entry in fs::read_dir(&path)? {
                found.push(entry?.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guests_root_has_in_dev_becomes_the_containers_roots() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        for name in ["dir/node", "terminal", "outside"] {
            fs::write(at(name), "").unwrap();
        }
        lchown(at("terminal"), Some(66_536), Some(5)).unwrap();
        std::os::unix::fs::symlink(at("outside"), at("dir/link")).unwrap();
        let owner = Owner {
            uid: 65_536,
            gid: 131_072,
        };
        give_entries(&at("dir"), owner).unwrap();
        let ids = |name: &str| {
            let meta = fs::symlink_metadata(at(name)).unwrap();
            (meta.uid(), meta.gid())
        };
        for given in ["dir", "dir/node", "dir/link"] {
            assert_eq!(ids(given), (65_536, 131_072), "{given}");
        }
        assert_eq!(ids("outside"), (0, 0));
        give_entries(dir.path(), owner).unwrap();
        assert_eq!(ids("terminal"), (66_536, 5));
    }

    #[test]
    fn libcontainer_is_told_of_the_guests_root_alone() {
        let mut process = Process::default();
        let user = process.user_mut();
        user.set_uid(1000).set_gid(2000);
        user.set_additional_gids(Some(vec![3000]))
            .set_umask(Some(7));
        let entry = UserEntry {
            namespace: "/proc/1/fd/9".into(),
            owns_mounts: false,
            dev: None,
            uid: 66_536,
        };
        let step = UserStep::take(&mut process, entry);
        let user = process.user();
        assert_eq!((user.uid(), user.gid()), (0, 0));
        assert_eq!(user.additional_gids(), &None);
        assert_eq!(user.umask(), Some(7));
        assert_eq!((step.user.uid(), step.user.gid()), (1000, 2000));
        assert_eq!(step.user.additional_gids(), &Some(vec![3000]));
    }
}
