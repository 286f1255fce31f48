//! The user that a container's process runs as.
//!
//! `user[:group]` is resolved with the image's own /etc/passwd and /etc/group, which are untrusted:
//! they are opened without leaving the root filesystem, must be regular files, and are read up to a
//! limit. Invalid lines are skipped, as in every libc.

use std::io::{self, Read as _};
use std::path::Path;

use pathrs::Root;
use pathrs::flags::OpenFlags;
use podvisor_agent_protocol::api::SupplementalGroups;
use podvisor_agent_protocol::limits::USER_BYTES;
use protobuf::EnumOrUnknown;

/// No distribution's database is nearly as large.
const DATABASE_BYTES: u64 = 1 << 20;
/// The kernel's NGROUPS_MAX.
const MAX_GROUPS: usize = 65536;

/// A user that cannot be resolved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// Not of the form `user[:group]`.
    #[error("{0:?} is no user: use NAME or UID, then optionally :GROUP or :GID")]
    Malformed(String),
    /// A user name that is not in the image.
    #[error("image has no user {0:?} in /etc/passwd: give a numeric uid or one of its users")]
    UnknownUser(String),
    /// A group name that is not in the image.
    #[error("image has no group {0:?} in /etc/group: give a numeric gid or one of its groups")]
    UnknownGroup(String),
    /// The image's database is unusable.
    #[error("cannot read {path} of the image")]
    Database {
        /// /etc/passwd or /etc/group.
        path: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Which groups of /etc/group a user gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    /// All that list it, unless the request names a group.
    UnlessNamed,
    /// All that list it.
    Merge,
    /// None.
    Strict,
}

impl From<EnumOrUnknown<SupplementalGroups>> for Groups {
    fn from(wanted: EnumOrUnknown<SupplementalGroups>) -> Self {
        match wanted.enum_value_or_default() {
            SupplementalGroups::SUPPLEMENTAL_GROUPS_UNSPECIFIED => Self::UnlessNamed,
            SupplementalGroups::SUPPLEMENTAL_GROUPS_MERGE => Self::Merge,
            SupplementalGroups::SUPPLEMENTAL_GROUPS_STRICT => Self::Strict,
        }
    }
}

/// A resolved user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub additional_gids: Vec<u32>,
    /// The home directory in /etc/passwd.
    pub home: Option<String>,
}

/// The image's databases; a missing one is empty.
#[derive(Debug, Default)]
pub struct Databases {
    passwd: String,
    group: String,
}

impl Databases {
    /// Reads them below `rootfs`.
    ///
    /// # Errors
    ///
    /// [`UserError::Database`] for a database that exists and cannot be read, or is too large.
    pub fn read(rootfs: &Path) -> Result<Self, UserError> {
        let read = |path| {
            read_in_root(rootfs, path).map_err(|source| UserError::Database { path, source })
        };
        Ok(Self {
            passwd: read("/etc/passwd")?,
            group: read("/etc/group")?,
        })
    }

    /// Reads below `rootfs` what homes are looked up in. A database that cannot be read is empty.
    #[must_use]
    pub fn read_homes(rootfs: &Path) -> Self {
        let passwd = read_in_root(rootfs, "/etc/passwd").unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot look up homes in /etc/passwd");
            String::new()
        });
        Self {
            passwd,
            group: String::new(),
        }
    }

    /// Resolves `user[:group]`.
    ///
    /// A number is used as it is, and looked up only for its group and home. Without a group, a
    /// user has that of /etc/passwd (0 for a number that is not in it); `groups` selects the
    /// supplementary ones.
    ///
    /// # Errors
    ///
    /// [`UserError`], except `Database`.
    pub fn resolve(&self, wanted: &str, groups: Groups) -> Result<User, UserError> {
        let malformed = || UserError::Malformed(wanted.chars().take(64).collect());
        let (name, group) = match wanted.split_once(':') {
            // A group of no name is none, as in other engines.
            Some((name, "")) => (name, None),
            Some((name, group)) => (name, Some(group)),
            None => (wanted, None),
        };
        let fits = wanted.len() <= USER_BYTES && !wanted.contains(char::is_control);
        if !fits || group.is_some_and(|g| g.contains(':')) {
            return Err(malformed());
        }
        // `:group` without a user means root in that group, as in other engines.
        let name = if name.is_empty() { "0" } else { name };
        let number = parse_id(name);
        let entry = self.users().find(|user| match number {
            Some(uid) => user.uid == uid,
            None => user.name == name,
        });
        let uid = match (number, &entry) {
            (Some(uid), _) => uid,
            (None, Some(entry)) => entry.uid,
            (None, None) => return Err(UserError::UnknownUser(name.to_owned())),
        };
        let gid = match (group, &entry) {
            (Some(group), _) => self.group_id(group)?,
            (None, Some(entry)) => entry.gid,
            (None, None) => 0,
        };
        let additional_gids = match (groups, group, &entry) {
            (Groups::Merge, _, Some(entry)) | (Groups::UnlessNamed, None, Some(entry)) => {
                self.groups_of(entry.name)
            }
            _ => Vec::new(),
        };
        let home = entry
            .filter(|e| !e.home.is_empty())
            .map(|e| e.home.to_owned());
        Ok(User {
            uid,
            gid,
            additional_gids,
            home,
        })
    }

    /// Returns the home directory of the user of this name if it has the id `uid`, else of that id.
    #[must_use]
    pub fn home_of_name(&self, name: &str, uid: u32) -> Option<String> {
        self.users()
            .find(|user| user.name == name && user.uid == uid && !user.home.is_empty())
            .map(|user| user.home.to_owned())
            .or_else(|| self.home_of(uid))
    }

    /// Returns the home directory of a user id in /etc/passwd.
    #[must_use]
    pub fn home_of(&self, uid: u32) -> Option<String> {
        self.users()
            .find(|u| u.uid == uid && !u.home.is_empty())
            .map(|u| u.home.to_owned())
    }

    fn group_id(&self, group: &str) -> Result<u32, UserError> {
        if let Some(gid) = parse_id(group) {
            return Ok(gid);
        }
        self.groups()
            .find(|entry| entry.name == group)
            .map(|entry| entry.gid)
            .ok_or_else(|| UserError::UnknownGroup(group.to_owned()))
    }

    fn groups_of(&self, name: &str) -> Vec<u32> {
        let mut gids: Vec<u32> = self
            .groups()
            .filter(|group| group.members.split(',').any(|member| member == name))
            .map(|group| group.gid)
            .take(MAX_GROUPS)
            .collect();
        gids.sort_unstable();
        gids.dedup();
        gids
    }

    fn users(&self) -> impl Iterator<Item = PasswdEntry<'_>> {
        self.passwd.lines().filter_map(|line| {
            // name:password:uid:gid:comment:home:shell
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let uid = parse_id(fields.nth(1)?)?;
            let gid = parse_id(fields.next()?)?;
            let home = fields.nth(1).unwrap_or_default();
            Some(PasswdEntry {
                name,
                uid,
                gid,
                home,
            })
        })
    }

    fn groups(&self) -> impl Iterator<Item = GroupEntry<'_>> {
        self.group.lines().filter_map(|line| {
            // name:password:gid:members
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let gid = parse_id(fields.nth(1)?)?;
            Some(GroupEntry {
                name,
                gid,
                members: fields.next().unwrap_or_default(),
            })
        })
    }
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

struct GroupEntry<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

/// Decimal digits only, at most 2³¹ − 1 as elsewhere: higher ones serve as "no id".
fn parse_id(text: &str) -> Option<u32> {
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse()
        .ok()
        .filter(|&id| id <= i32::MAX.unsigned_abs())
}

fn read_in_root(rootfs: &Path, path: &str) -> io::Result<String> {
    // Non-blocking, so that opening a FIFO does not wait for a writer.
    let flags =
        OpenFlags::O_RDONLY | OpenFlags::O_NONBLOCK | OpenFlags::O_NOCTTY | OpenFlags::O_CLOEXEC;
    let opened = Root::open(rootfs).and_then(|root| root.open_subpath(path, flags));
    let file = match opened {
        Ok(file) => file,
        Err(error) => {
            return match error.kind() {
                pathrs::error::ErrorKind::OsError(Some(libc::ENOENT | libc::ENOTDIR)) => {
                    Ok(String::new())
                }
                _ => Err(io::Error::other(error)),
            };
        }
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is no regular file",
        ));
    }
    let mut bytes = Vec::new();
    file.take(DATABASE_BYTES.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > DATABASE_BYTES) {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "it is larger than 1 MiB",
        ));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn debian() -> Databases {
        Databases {
            passwd: "root:x:0:0:root:/root:/bin/bash\n\
                     # a comment\n\
                     broken:x:notanumber:0::/:\n\
                     www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n\
                     short:x:7:8\n\
                     1000:x:2000:2000::/odd:\n"
                .into(),
            group: "root:x:0:\n\
                    adm:x:4:syslog,www-data\n\
                    www-data:x:33:\n\
                    web:x:99:www-data\n\
                    notweb:x:100:www-data2\n"
                .into(),
        }
    }

    #[test]
    fn a_name_brings_its_groups_and_home() {
        let user = debian().resolve("www-data", Groups::UnlessNamed).unwrap();
        assert_eq!((user.uid, user.gid), (33, 33));
        assert_eq!(user.additional_gids, [4, 99]);
        assert_eq!(user.home.as_deref(), Some("/var/www"));
    }

    #[test]
    fn a_number_is_looked_up_and_taken_anyway() {
        assert_eq!(
            debian()
                .resolve("33", Groups::UnlessNamed)
                .unwrap()
                .additional_gids,
            [4, 99]
        );
        let unknown = debian().resolve("4711", Groups::UnlessNamed).unwrap();
        assert_eq!((unknown.uid, unknown.gid, unknown.home), (4711, 0, None));
        // A user named by digits does not shadow the number.
        assert_eq!(
            debian().resolve("1000", Groups::UnlessNamed).unwrap().uid,
            1000
        );
    }

    #[test]
    fn a_given_group_is_the_only_one() {
        let user = debian()
            .resolve("www-data:adm", Groups::UnlessNamed)
            .unwrap();
        assert_eq!((user.uid, user.gid, user.additional_gids), (33, 4, vec![]));
        assert_eq!(
            debian()
                .resolve("33:1234", Groups::UnlessNamed)
                .unwrap()
                .gid,
            1234
        );
        assert_eq!(
            debian().resolve(":adm", Groups::UnlessNamed).unwrap().gid,
            4
        );
        for (root, same) in [(":", "0"), ("root:", "root")] {
            assert_eq!(
                debian().resolve(root, Groups::UnlessNamed).unwrap(),
                debian().resolve(same, Groups::UnlessNamed).unwrap()
            );
        }
    }

    #[test]
    fn what_the_image_lacks_is_named() {
        assert!(
            matches!(debian().resolve("alice", Groups::UnlessNamed), Err(UserError::UnknownUser(u)) if u == "alice")
        );
        assert!(
            matches!(debian().resolve("0:staff", Groups::UnlessNamed), Err(UserError::UnknownGroup(g)) if g == "staff")
        );
        assert!(matches!(
            debian().resolve("broken", Groups::UnlessNamed),
            Err(UserError::UnknownUser(_))
        ));
    }

    #[test]
    fn malformed_users_are_refused() {
        for bad in ["a:b:c", "root::", "a\nb", &"x".repeat(257)] {
            assert!(
                matches!(
                    debian().resolve(bad, Groups::UnlessNamed),
                    Err(UserError::Malformed(_))
                ),
                "{bad:?}"
            );
        }
        // Out of range: not a number, so a name that does not exist.
        assert!(matches!(
            debian().resolve("4294967295", Groups::UnlessNamed),
            Err(UserError::UnknownUser(_))
        ));
        assert!(matches!(
            debian().resolve("2147483648", Groups::UnlessNamed),
            Err(UserError::UnknownUser(_))
        ));
    }

    #[test]
    fn an_image_without_databases_knows_numbers() {
        let root = tempfile::tempdir().unwrap();
        let databases = Databases::read(root.path()).unwrap();
        assert_eq!(
            databases.resolve("5:6", Groups::UnlessNamed).unwrap().gid,
            6
        );
        assert!(databases.resolve("root", Groups::UnlessNamed).is_err());
    }

    #[test]
    fn links_in_the_image_stay_in_the_image() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::create_dir(root.path().join("usr")).unwrap();
        symlink("/usr/passwd", root.path().join("etc/passwd")).unwrap();
        symlink("../../../../../../etc/group", root.path().join("etc/group")).unwrap();
        fs::write(root.path().join("usr/passwd"), "in:x:5:5::/:\n").unwrap();
        // The second link points at itself, because `..` cannot leave the root.
        assert!(matches!(
            Databases::read(root.path()),
            Err(UserError::Database {
                path: "/etc/group",
                ..
            })
        ));
        fs::remove_file(root.path().join("etc/group")).unwrap();
        assert_eq!(
            Databases::read(root.path())
                .unwrap()
                .resolve("in", Groups::UnlessNamed)
                .unwrap()
                .uid,
            5
        );
    }

    #[test]
    fn a_database_that_is_a_fifo_or_a_directory_or_huge_is_an_error_at_once() {
        let root = tempfile::tempdir().unwrap();
        let passwd = root.path().join("etc/passwd");
        fs::create_dir(root.path().join("etc")).unwrap();
        let failed = || {
            matches!(
                Databases::read(root.path()),
                Err(UserError::Database { .. })
            )
        };

        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &passwd,
            rustix::fs::FileType::Fifo,
            mode,
            0,
        )
        .unwrap();
        assert!(failed());
        fs::remove_file(&passwd).unwrap();

        fs::create_dir(&passwd).unwrap();
        assert!(failed());
        fs::remove_dir(&passwd).unwrap();

        fs::File::create(&passwd)
            .unwrap()
            .set_len(DATABASE_BYTES + 1)
            .unwrap();
        assert!(failed());
    }

    #[test]
    fn the_policy_decides_which_groups_of_the_image_a_user_gets() {
        let groups = |user: &str, policy| debian().resolve(user, policy).unwrap().additional_gids;
        let none: [u32; 0] = [];
        assert_eq!(groups("www-data:1234", Groups::UnlessNamed), none);
        assert_eq!(groups("www-data:1234", Groups::Merge), [4, 99]);
        assert_eq!(groups("33:1234", Groups::Merge), [4, 99]);
        assert_eq!(groups("www-data", Groups::Strict), none);
        assert_eq!(groups("4711", Groups::Merge), none);
    }

    proptest! {
        #[test]
        fn no_database_makes_the_resolver_panic_or_give_an_id_out_of_range(
            passwd in "([a-z0-9:,\n]|\\PC){0,200}",
            group in "([a-z0-9:,\n]|\\PC){0,200}",
            wanted in "[a-z0-9:]{0,8}|\\PC{0,20}",
        ) {
            if let Ok(user) = (Databases { passwd, group }).resolve(&wanted, Groups::UnlessNamed) {
                prop_assert!(user.uid <= i32::MAX.unsigned_abs());
                prop_assert!(user.gid <= i32::MAX.unsigned_abs());
            }
        }
    }
}
