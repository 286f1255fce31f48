//! A record in memory, with its copy in the database.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::database::{Database, StateError};
use super::records::Record;
use crate::blocking::in_place;

/// A record. Readers do not wait for the disk.
#[derive(Debug)]
pub(crate) struct CachedRecord<R> {
    current: Mutex<R>,
    /// Locked by a writer while it writes to the disk.
    disk: Mutex<OnDisk>,
}

/// What the database should contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDisk {
    Record,
    /// Nothing, whatever happens to the record in memory.
    Nothing,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Record + PartialEq> CachedRecord<R> {
    /// Creates the record in memory only.
    pub(crate) fn new(record: R) -> Self {
        Self {
            current: Mutex::new(record),
            disk: Mutex::new(OnDisk::Record),
        }
    }

    pub(crate) fn get(&self) -> R {
        lock(&self.current).clone()
    }

    /// Returns a part of it.
    pub(crate) fn of<T>(&self, part: impl FnOnce(&R) -> T) -> T {
        part(&lock(&self.current))
    }

    /// Changes a new record, which is not in the database yet.
    pub(crate) fn change_new(&self, change: impl FnOnce(&mut R)) {
        change(&mut lock(&self.current));
    }

    /// Writes the record in memory to the database.
    pub(crate) fn write(&self, database: &Database) -> Result<(), StateError> {
        in_place(|| {
            let disk = lock(&self.disk);
            put(*disk, database, &self.get())
        })
    }

    /// Applies a requested change, to the disk first: if that fails, nothing has changed.
    pub(crate) fn update(
        &self,
        database: &Database,
        change: impl FnOnce(&mut R),
    ) -> Result<(), StateError> {
        in_place(|| {
            let disk = lock(&self.disk);
            if let Some(changed) = self.changed(change) {
                put(*disk, database, &changed)?;
                *lock(&self.current) = changed;
            }
            Ok(())
        })
    }

    /// Records something that has happened, in memory first: it is a fact whether or not the disk
    /// can be written. After an error, [`Self::write`] has to be called again.
    pub(crate) fn note(
        &self,
        database: &Database,
        change: impl FnOnce(&mut R),
    ) -> Result<(), StateError> {
        in_place(|| {
            let disk = lock(&self.disk);
            let Some(changed) = self.changed(change) else {
                return Ok(());
            };
            *lock(&self.current) = changed.clone();
            put(*disk, database, &changed)
        })
    }

    /// Returns the changed record; `None` if it is equal to the current one.
    fn changed(&self, change: impl FnOnce(&mut R)) -> Option<R> {
        let before = self.get();
        let mut changed = before.clone();
        change(&mut changed);
        (changed != before).then_some(changed)
    }

    /// Removes it from the database permanently.
    pub(crate) fn remove(&self, database: &Database) -> Result<(), StateError> {
        in_place(|| {
            let mut disk = lock(&self.disk);
            database.remove::<R>(self.get().id())?;
            *disk = OnDisk::Nothing;
            Ok(())
        })
    }
}

fn put<R: Record>(disk: OnDisk, database: &Database, record: &R) -> Result<(), StateError> {
    match disk {
        OnDisk::Record => database.put(record),
        OnDisk::Nothing => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::state::{PodPhase, PodRecord, pod_record};
    use crate::small_disk::SmallDisk;

    fn stop(record: &mut PodRecord) {
        record.phase = PodPhase::stopped(None);
    }

    #[test]
    fn what_has_happened_is_told_though_the_disk_is_full_and_written_later() {
        let disk = SmallDisk::new();
        let database = Database::open(&disk.path().join("x.redb")).unwrap();
        // A record that needs more room than the file has.
        let mut large = pod_record("a");
        large.config.hostname = "x".repeat(5 << 19);
        let kept = CachedRecord::new(large.clone());
        disk.fill();
        kept.write(&database).unwrap_err();
        kept.update(&database, stop).unwrap_err();
        assert_eq!(kept.of(|record| record.phase.clone()), PodPhase::Ready);
        kept.note(&database, stop).unwrap_err();
        stop(&mut large);
        assert_eq!(kept.get(), large);
        kept.write(&database).unwrap_err();
        disk.clear();
        kept.write(&database).unwrap();
        assert_eq!(database.all::<PodRecord>().unwrap().records, [large]);
    }

    #[test]
    fn what_is_written_late_does_not_bring_a_removed_record_back() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("x.redb")).unwrap();
        let kept = CachedRecord::new(pod_record("a"));
        kept.write(&database).unwrap();
        kept.remove(&database).unwrap();
        kept.write(&database).unwrap();
        kept.update(&database, stop).unwrap();
        kept.note(&database, |record| record.extra = 1).unwrap();
        assert_eq!(kept.of(|record| record.extra), 1);
        assert_eq!(database.all::<PodRecord>().unwrap().records, []);
    }
}
