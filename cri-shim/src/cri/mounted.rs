//! Which volumes of a pod are mounted, and for which of its containers.
//!
//! What several containers mount is mounted once for all of them. Their programs then find the same
//! objects there: a socket that one of them listens on, a FIFO's other end, each other's locks and
//! changes of mapped files. The guest would take two mounts of a directory for two.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::volumes::EMPTY_DIR;

/// The volumes of a pod.
#[derive(Debug)]
pub(super) struct Mounted {
    /// What paths of the pod's own emptyDirs hold.
    empty_dirs: String,
    users: Mutex<Users>,
}

/// The names of a pod's volumes in its shared directory, each with the ids of the containers that
/// have it.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<String, BTreeSet<String>>);

impl Mounted {
    /// Of the pod that the kubelet has under this `uid`.
    pub(super) fn of(uid: &str) -> Self {
        Self {
            empty_dirs: format!("/pods/{uid}{EMPTY_DIR}"),
            users: Mutex::default(),
        }
    }

    /// Whether a path is that of an emptyDir of the pod, or below it: nobody else's.
    pub(super) fn is_the_pods(&self, path: &str) -> bool {
        path.contains(&self.empty_dirs) && !path.split('/').any(|part| part == "..")
    }

    /// Nobody else changes what is mounted meanwhile.
    pub(super) fn lock(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Users {
    /// The container has the volume of that name.
    pub(super) fn add(&mut self, name: &str, container: &str) {
        let users = self.0.entry(name.to_owned()).or_default();
        users.insert(container.to_owned());
    }

    /// Volumes that somebody has.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let used = self.0.iter().filter(|(_, users)| !users.is_empty());
        used.map(|(name, _)| name.as_str())
    }

    /// The container has none of them any more. Gives the names of those that nobody has.
    pub(super) fn release(&mut self, container: &str) -> Vec<String> {
        for users in self.0.values_mut() {
            users.remove(container);
        }
        self.unused()
    }

    /// No container has any of them any more. Gives all their names.
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

    /// The volume is not mounted any more.
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
        // What could not be unmounted is told again.
        assert_eq!(users.release("c"), ["w"]);
        users.forget("w");
        assert_eq!(users.release("b"), ["v"]);
        assert_eq!(users.names().count(), 0);
    }
}
