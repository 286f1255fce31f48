//! virtio-fs devices, mounted at the paths that the host chooses.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use podvisor_agent_protocol::{api, limits};
use rustix::mount::{MountFlags, mount};

/// Where the agent stores what containers need; shares are below it.
pub const BASE: &str = "/run/podvisor";

/// A share that cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// Not a valid tag.
    #[error("{0:?} is not a virtio-fs tag: use 1 to 36 printable ASCII characters")]
    Tag(String),
    /// Not a valid path for a share.
    #[error("{0:?} is not a place for a share: use {BASE}/NAME, of lowercase letters and '-'")]
    Path(String),
    /// More than the limit.
    #[error("more than {} shares", limits::SHARES)]
    TooMany,
    /// Another share is mounted there.
    #[error("{path} has the share {mounted:?} already")]
    Other {
        /// The path.
        path: PathBuf,
        /// The tag of the mounted share.
        mounted: String,
    },
    /// The kernel refuses the mount.
    #[error("cannot mount the virtio-fs device {tag:?} on {path}")]
    Mount {
        /// The tag.
        tag: String,
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A share of a request, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    tag: String,
    path: PathBuf,
}

impl Share {
    /// Checks the shares of a request.
    ///
    /// # Errors
    ///
    /// [`ShareError`], except `Other` and `Mount`.
    pub fn all(wanted: &[api::Share]) -> Result<Vec<Self>, ShareError> {
        if wanted.len() > limits::SHARES {
            return Err(ShareError::TooMany);
        }
        wanted.iter().map(Self::new).collect()
    }

    fn new(wanted: &api::Share) -> Result<Self, ShareError> {
        let printable = wanted.tag.bytes().all(|byte| byte.is_ascii_graphic());
        if !printable || !(1..=limits::TAG_BYTES).contains(&wanted.tag.len()) {
            return Err(ShareError::Tag(wanted.tag.chars().take(64).collect()));
        }
        let path = PathBuf::from(&wanted.path);
        if is_place(&wanted.path) {
            Ok(Self {
                tag: wanted.tag.clone(),
                path,
            })
        } else {
            Err(ShareError::Path(wanted.path.chars().take(64).collect()))
        }
    }
}

/// Returns whether something may be mounted at this path: not over the agent's own directories next
/// to it, whose names are `images`, `memory`, `state` and those of containers, which contain
/// digits.
fn is_place(path: &str) -> bool {
    let name = path
        .strip_prefix(BASE)
        .and_then(|rest| rest.strip_prefix('/'));
    name.is_some_and(|name| {
        (1..=64).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'-')
            && !matches!(name, "images" | "memory" | "state")
    })
}

/// Returns whether a path is below one where a share may be mounted.
pub(crate) fn is_below_share(path: &Path) -> bool {
    path.ancestors()
        .skip(1)
        .any(|above| above.to_str().is_some_and(is_place))
}

/// The mounted shares.
#[derive(Debug, Default)]
pub struct Shares {
    mounted: Mutex<BTreeMap<PathBuf, String>>,
}

impl Shares {
    /// Mounts a share, unless it is already mounted there.
    ///
    /// # Errors
    ///
    /// [`ShareError::Other`] and [`ShareError::Mount`].
    pub fn mount(&self, share: &Share) -> Result<(), ShareError> {
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        match mounted.get(&share.path) {
            Some(tag) if *tag == share.tag => return Ok(()),
            Some(tag) => {
                return Err(ShareError::Other {
                    path: share.path.clone(),
                    mounted: tag.clone(),
                });
            }
            None if mounted.len() >= limits::SHARES => return Err(ShareError::TooMany),
            None => {}
        }
        // Device nodes in a volume cannot be opened.
        let flags = MountFlags::NODEV;
        fs::create_dir_all(&share.path)
            .and_then(|()| Ok(mount(&share.tag, &share.path, "virtiofs", flags, c"")?))
            .map_err(|source| ShareError::Mount {
                tag: share.tag.clone(),
                path: share.path.clone(),
                source,
            })?;
        mounted.insert(share.path.clone(), share.tag.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(tag: &str, path: &str) -> Result<Vec<Share>, ShareError> {
        Share::all(&[api::Share {
            tag: tag.into(),
            path: path.into(),
            ..Default::default()
        }])
    }

    #[test]
    fn shares_lie_beside_what_the_agent_keeps() {
        share("shared", "/run/podvisor/shared").unwrap();
        for path in [
            "",
            "/",
            "/run",
            "/run/podvisor",
            "/run/podvisor/",
            "/run/podvisor/..",
            "/run/podvisor/a/b",
            "/run/podvisor/images",
            "/run/podvisor/memory",
            "/run/podvisor/state",
            "/run/podvisor/c1",
            "/run/podvisorx",
            "run/podvisor/shared",
        ] {
            assert!(
                matches!(share("shared", path), Err(ShareError::Path(_))),
                "{path:?}"
            );
        }
    }

    #[test]
    fn tags_that_a_device_cannot_have_are_refused() {
        for tag in ["", "with space", &"x".repeat(37)] {
            assert!(matches!(
                share(tag, "/run/podvisor/shared"),
                Err(ShareError::Tag(_))
            ));
        }
        let many = vec![api::Share::default(); limits::SHARES + 1];
        assert!(matches!(Share::all(&many), Err(ShareError::TooMany)));
    }

    #[test]
    fn what_lies_below_a_share_is_told_from_what_does_not() {
        for below in ["/run/podvisor/shared/a", "/run/podvisor/shared/a/b"] {
            assert!(is_below_share(Path::new(below)), "{below}");
        }
        for other in [
            "/run/podvisor/shared",
            "/run/podvisor/images/vda",
            "/run/podvisor/memory/0",
            "/proc",
            "/",
        ] {
            assert!(!is_below_share(Path::new(other)), "{other}");
        }
    }
}
