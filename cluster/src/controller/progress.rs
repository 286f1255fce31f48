//! How far migrations are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::nodes::MigrationReport;

/// What the nodes of migrations that go on said last, by the migrations' unique ids.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<Mutex<BTreeMap<String, MigrationReport>>>);

impl Progress {
    /// Keeps what a node said; `None`: it is over.
    pub(super) fn set(&self, migration: &str, report: Option<MigrationReport>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match report {
            Some(report) => known.insert(migration.to_owned(), report),
            None => known.remove(migration),
        };
    }

    /// Returns what a node said last.
    pub(super) fn get(&self, migration: &str) -> Option<MigrationReport> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(migration).cloned()
    }
}
