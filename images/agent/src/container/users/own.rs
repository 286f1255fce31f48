//! The user of a container, and the users of the additional processes in it.

use std::path::Path;

use oci_spec::runtime::User as SpecUser;

use super::user::{Databases, Groups, User, UserError};

/// A container's user: as its creation named it, and the ids that it got.
#[derive(Debug, Clone)]
pub struct OwnUser {
    /// `user[:group]`; empty if the specification named it by number.
    wanted: String,
    groups: Groups,
    ids: SpecUser,
}

/// The user of an additional process.
#[derive(Debug)]
pub struct ExecUser {
    /// `None`: the one that the process names by number.
    pub user: Option<User>,
    /// What its home is looked up in.
    pub databases: Databases,
}

impl OwnUser {
    /// Returns the user that `wanted` and `groups` became.
    #[must_use]
    pub fn new(wanted: String, groups: Groups, ids: SpecUser) -> Self {
        Self {
            wanted,
            groups,
            ids,
        }
    }

    /// Returns its ids.
    #[must_use]
    pub fn ids(&self) -> &SpecUser {
        &self.ids
    }

    /// Returns the user of an additional process in the container with the root filesystem
    /// `rootfs`.
    ///
    /// The container's own user keeps the ids that it got at the creation: a process that may write
    /// to /etc/passwd must not choose the ids of the next exec, or make it fail. Another user is
    /// looked up in the databases as they are now.
    ///
    /// # Errors
    ///
    /// [`UserError`], for another user.
    pub fn of_exec(
        &self,
        rootfs: &Path,
        wanted: &str,
        groups: Groups,
    ) -> Result<ExecUser, UserError> {
        if wanted.is_empty() {
            let (user, databases) = (None, Databases::read_homes(rootfs));
            return Ok(ExecUser { user, databases });
        }
        if wanted != self.wanted || groups != self.groups {
            let databases = Databases::read(rootfs)?;
            let user = Some(databases.resolve(wanted, groups)?);
            return Ok(ExecUser { user, databases });
        }
        let databases = Databases::read_homes(rootfs);
        let uid = self.ids.uid();
        let name = wanted.split_once(':').map_or(wanted, |(name, _)| name);
        let user = Some(User {
            uid,
            gid: self.ids.gid(),
            additional_gids: self.ids.additional_gids().clone().unwrap_or_default(),
            home: databases.home_of_name(name, uid),
        });
        Ok(ExecUser { user, databases })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use oci_spec::runtime::UserBuilder;

    use super::*;

    fn rootfs(passwd: &str, group: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        fs::write(root.path().join("etc/group"), group).unwrap();
        root
    }

    fn own(wanted: &str) -> OwnUser {
        let ids = UserBuilder::default().uid(1000u32).gid(1001u32);
        let ids = ids.additional_gids([50, 1001]).build().unwrap();
        OwnUser::new(wanted.to_owned(), Groups::Merge, ids)
    }

    #[test]
    fn the_containers_own_user_keeps_its_ids_whatever_its_databases_say() {
        let root = rootfs("app:x:0:0::/root:\n", "root:x:0:app\nwheel:x:10:app\n");
        for wanted in ["app", "app:app", "1000"] {
            let exec = own(wanted).of_exec(root.path(), wanted, Groups::Merge);
            let user = exec.unwrap().user.unwrap();
            assert_eq!((user.uid, user.gid), (1000, 1001), "{wanted}");
            assert_eq!(user.additional_gids, [50, 1001], "{wanted}");
            assert_eq!(user.home, None, "{wanted}");
        }
    }

    #[test]
    fn the_containers_own_user_needs_no_usable_databases() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc/passwd")).unwrap();
        let exec = own("app").of_exec(root.path(), "app", Groups::Merge);
        let user = exec.unwrap().user.unwrap();
        assert_eq!((user.uid, user.home), (1000, None));
        let by_number = own("app").of_exec(root.path(), "", Groups::Merge).unwrap();
        assert!(by_number.user.is_none());
        let other = own("app").of_exec(root.path(), "other", Groups::Merge);
        assert!(matches!(other, Err(UserError::Database { .. })));
    }

    #[test]
    fn the_home_of_the_containers_own_user_is_that_of_its_name() {
        let passwd = "first:x:1000:1001::/home/first:\napp:x:1000:1001::/home/app:\n";
        let root = rootfs(passwd, "");
        let home = |wanted: &str| {
            let exec = own(wanted).of_exec(root.path(), wanted, Groups::Merge);
            exec.unwrap().user.unwrap().home
        };
        assert_eq!(home("app:app").as_deref(), Some("/home/app"));
        assert_eq!(home("1000").as_deref(), Some("/home/first"));
        assert_eq!(home("gone").as_deref(), Some("/home/first"));
    }

    #[test]
    fn another_user_is_looked_up_in_the_container_as_it_is_now() {
        let root = rootfs("new:x:7:8::/new:\n", "more:x:9:new\n");
        let exec = own("app").of_exec(root.path(), "new", Groups::UnlessNamed);
        let user = exec.unwrap().user.unwrap();
        assert_eq!((user.uid, user.gid), (7, 8));
        assert_eq!(user.additional_gids, [9]);
        assert_eq!(user.home.as_deref(), Some("/new"));
        // The same user with other groups is another one.
        let app = own("app").of_exec(root.path(), "app", Groups::Strict);
        assert!(matches!(app, Err(UserError::UnknownUser(_))));
    }
}
