//! The daemon's state of a container.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::cpu_rate::CpuRate;
use super::pod::Pod;
use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::retry_writer::PendingRecord;
use crate::cri::state::{CachedRecord, ContainerPhase, ContainerRecord, Database, StateError};

/// A container.
#[derive(Debug)]
pub(in crate::cri) struct Container {
    pub(in crate::cri) id: String,
    /// Unique in its pod; it never changes.
    pub(in crate::cri) name: String,
    pub(in crate::cri) pod: Arc<Pod>,
    /// Locked while it is started or removed.
    pub(in crate::cri) turn: Arc<tokio::sync::Mutex<()>>,
    /// True once it has ended.
    pub(in crate::cri) ended: watch::Sender<bool>,
    /// It was sent its stop signal: some programs exit immediately on a second one.
    pub(in crate::cri) was_signaled: AtomicBool,
    /// CPU time per second.
    pub(in crate::cri) cpu_rate: Mutex<CpuRate>,
    record: CachedRecord<ContainerRecord>,
}

impl Container {
    pub(in crate::cri) fn new(record: ContainerRecord, pod: Arc<Pod>) -> Arc<Self> {
        Arc::new(Self {
            id: record.id.clone(),
            name: container_name(&record),
            pod,
            turn: Arc::default(),
            ended: watch::Sender::new(matches!(record.phase, ContainerPhase::Exited(_))),
            was_signaled: AtomicBool::new(false),
            cpu_rate: Mutex::default(),
            record: CachedRecord::new(record),
        })
    }

    pub(in crate::cri) fn record(&self) -> ContainerRecord {
        self.record.get()
    }

    /// Returns a part of the record, without copying the rest.
    pub(in crate::cri) fn with_record<T>(&self, part: impl FnOnce(&ContainerRecord) -> T) -> T {
        self.record.of(part)
    }

    pub(in crate::cri) fn phase(&self) -> ContainerPhase {
        self.record.of(|record| record.phase.clone())
    }

    /// Changes the record, on the disk first.
    pub(in crate::cri) fn update(
        &self,
        database: &Database,
        change: impl FnOnce(&mut ContainerRecord),
    ) -> Result<()> {
        let updated = self.record.update(database, change);
        self.tell_end();
        Ok(updated?)
    }

    /// Changes the record, whether or not the disk takes it.
    pub(super) fn note(
        &self,
        database: &Database,
        change: impl FnOnce(&mut ContainerRecord),
    ) -> Result<(), StateError> {
        let noted = self.record.note(database, change);
        self.tell_end();
        noted
    }

    /// Removes the record from the disk.
    pub(super) fn remove_record(&self, database: &Database) -> Result<(), StateError> {
        self.record.remove(database)
    }

    /// Writes the record as it is.
    pub(in crate::cri) fn write(&self, database: &Database) -> Result<(), StateError> {
        self.record.write(database)
    }

    /// Has a new container, which is not in the database yet, created later than `other`.
    pub(in crate::cri) fn create_after(&self, other: i64) {
        let least = other.saturating_add(1);
        let change =
            |record: &mut ContainerRecord| record.created_at = record.created_at.max(least);
        self.record.change_new(change);
    }

    fn tell_end(&self) {
        if matches!(self.phase(), ContainerPhase::Exited(_)) {
            self.ended.send_replace(true);
        }
    }

    /// Returns an error if it is not running.
    pub(in crate::cri) fn running(&self) -> Result<()> {
        let state = match self.phase() {
            ContainerPhase::Running { .. } => return Ok(()),
            ContainerPhase::Creating => "being created",
            ContainerPhase::Created => "not started",
            ContainerPhase::Exited(_) => "exited",
            ContainerPhase::Removing => "being removed",
        };
        Err(CriError::WrongState {
            kind: ObjectKind::Container,
            id: self.id.clone(),
            state,
            wanted: "it must be running",
        })
    }
}

impl PendingRecord for Container {
    fn id(&self) -> &str {
        &self.id
    }

    fn write(&self, database: &Database) -> Result<(), StateError> {
        self.record.write(database)
    }
}

fn container_name(record: &ContainerRecord) -> String {
    let metadata = record.config.metadata.clone().unwrap_or_default();
    format!("{}_{}", metadata.name, metadata.attempt)
}
