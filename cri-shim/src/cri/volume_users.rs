//! The mounted volumes of a pod, and which of its containers use them.
//!
//! A volume of several containers is mounted once for all of them. Their programs then see the same
//! objects: a socket that one of them listens on, a FIFO's other end, each other's locks and
//! changes of mapped files. The guest would take two mounts of a directory for two different ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Part of the path of every emptyDir, as a kubelet lays them out.
pub(super) const EMPTY_DIR: &str = "/volumes/kubernetes.io~empty-dir/";

/// The volumes of a pod.
#[derive(Debug)]
pub(super) struct Mounted {
    /// Part of the paths of the pod's own emptyDirs.
    empty_dirs: String,
    users: Mutex<Users>,
}

/// The names of a pod's volumes in its shared directory, each with the ids of the containers that
/// use it.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<String, BTreeSet<String>>);

impl Mounted {
    /// Creates the state for the pod that has this `uid` at the kubelet.
    pub(super) fn of(uid: &str) -> Self {
        Self {
            empty_dirs: format!("/pods/{uid}{EMPTY_DIR}"),
            users: Mutex::default(),
        }
    }

    /// Returns whether a path is that of an emptyDir of the pod, or below it, and so used by no
    /// other pod.
    pub(super) fn is_the_pods(&self, path: &str) -> bool {
        path.contains(&self.empty_dirs) && !path.split('/').any(|part| part == "..")
    }

    /// Locks the mounts: no other thread changes them meanwhile.
    pub(super) fn lock(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Users {
    /// Records that the container uses the volume of that name.
    pub(super) fn add(&mut self, name: &str, container: &str) {
        let users = self.0.entry(name.to_owned()).or_default();
        users.insert(container.to_owned());
    }

    /// Returns the names of volumes in use.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let used = self.0.iter().filter(|(_, users)| !users.is_empty());
        used.map(|(name, _)| name.as_str())
    }

    /// Removes a container's uses. Returns the names of volumes that are not in use any more.
    pub(super) fn release(&mut self, container: &str) -> Vec<String> {
        for users in self.0.values_mut() {
            users.remove(container);
        }
        self.unused()
    }

    /// Removes the uses of all containers. Returns the names of all volumes.
    pub(super) fn release_all(&mut self) -> Vec<String> {
        for users in self.0.values_mut() {
            users.clear();
        }
        self.unused()
    }

    fn unused(&self) -> Vec<String> {
        let unused = self.0.iter().filter(|(_, users)| users.is_empty());
        unused.map(|(name, _)| name.clone()).collect()
    }

    /// Forgets a volume that is not mounted any more.
    pub(super) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_unused_when_the_last_container_has_released_it() {
        let mounted = Mounted::of("u");
        let mut users = mounted.lock();
        for (name, container) in [("v", "a"), ("v", "b"), ("v", "a"), ("w", "a")] {
            users.add(name, container);
        }
        assert_eq!(users.release("a"), ["w"]);
        assert_eq!(users.names().collect::<Vec<_>>(), ["v"]);
        // A volume that could not be unmounted is returned again.
        assert_eq!(users.release("c"), ["w"]);
        users.forget("w");
        assert_eq!(users.release("b"), ["v"]);
        assert_eq!(users.names().count(), 0);
    }
}
