//! Which nodes may connect, by the digest of their certificates: each for one migration, once.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use podvisor_node_api::messages::VmName;

/// How long a node is expected.
const LIMIT: Duration = Duration::from_secs(600);

/// So many are expected at most: a node takes fewer VMs at the same time.
const MOST: usize = 64;

#[derive(Debug)]
struct Entry {
    vm: VmName,
    migration: String,
    certificate: String,
    until: Instant,
}

/// The nodes that may connect.
#[derive(Debug, Default)]
pub(super) struct Expected(Mutex<Vec<Entry>>);

impl Expected {
    /// Expects the node with this certificate; the last word about a migration counts.
    pub(super) fn add(&self, vm: VmName, migration: String, certificate: String) -> bool {
        let mut entries = self.entries();
        entries.retain(|entry| entry.vm != vm || entry.migration != migration);
        if entries.len() >= MOST {
            return false;
        }
        entries.push(Entry {
            vm,
            migration,
            certificate,
            until: Instant::now() + LIMIT,
        });
        true
    }

    /// Whether a node is expected for this migration.
    pub(super) fn has(&self, vm: &VmName, migration: &str) -> bool {
        let entries = self.entries();
        entries
            .iter()
            .any(|entry| entry.vm == *vm && entry.migration == migration)
    }

    /// Whether a node with this certificate is expected for anything.
    pub(super) fn has_certificate(&self, certificate: &str) -> bool {
        let entries = self.entries();
        entries.iter().any(|entry| entry.certificate == certificate)
    }

    /// Ends the expectation of a migration; returns whether there was one, of this certificate if
    /// there is one.
    pub(super) fn take(&self, vm: &VmName, migration: &str, certificate: Option<&str>) -> bool {
        let mut entries = self.entries();
        let found = entries.iter().position(|entry| {
            entry.vm == *vm
                && entry.migration == migration
                && certificate.is_none_or(|certificate| entry.certificate == certificate)
        });
        found.map(|index| entries.swap_remove(index)).is_some()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        entries.retain(|entry| entry.until > now);
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_connects_once_for_one_migration() {
        let expected = Expected::default();
        let vm = VmName::new("n", "a", "u");
        assert!(expected.add(vm.clone(), "m".into(), "cert".into()));
        assert!(expected.has_certificate("cert") && expected.has(&vm, "m"));
        let other = VmName::new("n", "b", "u");
        assert!(!expected.take(&other, "m", Some("cert")));
        assert!(!expected.take(&vm, "x", Some("cert")));
        assert!(!expected.take(&vm, "m", Some("another")));
        assert!(expected.take(&vm, "m", Some("cert")));
        assert!(!expected.take(&vm, "m", Some("cert")), "once");
        assert!(!expected.has_certificate("cert"));
    }

    #[test]
    fn the_last_word_about_a_migration_counts_and_their_number_is_bounded() {
        let expected = Expected::default();
        let vm = VmName::new("n", "a", "u");
        for certificate in ["old", "new"] {
            assert!(expected.add(vm.clone(), "m".into(), certificate.into()));
        }
        assert!(!expected.has_certificate("old") && expected.has_certificate("new"));
        for number in 1..MOST {
            assert!(expected.add(vm.clone(), number.to_string(), "c".into()));
        }
        assert!(!expected.add(vm, "more".into(), "c".into()));
    }
}
