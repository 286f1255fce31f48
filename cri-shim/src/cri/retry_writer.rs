//! Retries failed database writes: one task, one record at a time.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinHandle;
use tracing::debug;

use super::backoff::Backoff;
use super::state::{Database, StateError};

/// An object whose record has to be written to the database.
pub(super) trait PendingRecord: Debug + Send + Sync {
    fn id(&self) -> &str;

    /// Writes the record as it is now.
    fn write(&self, database: &Database) -> Result<(), StateError>;
}

/// Records whose current state is not in the database yet.
#[derive(Debug, Default)]
pub(super) struct RetryWriter(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// Each once; the most recently tried ones are last.
    records: VecDeque<Arc<dyn PendingRecord>>,
    ids: BTreeSet<String>,
    /// The task that writes them, while there are any.
    writer: Option<JoinHandle<()>>,
}

impl Queue {
    /// Returns false if it was queued already.
    fn push(&mut self, record: Arc<dyn PendingRecord>) -> bool {
        let is_new = self.ids.insert(record.id().to_owned());
        if is_new {
            self.records.push_back(record);
        }
        is_new
    }
}

impl RetryWriter {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a record to be written. `begin` spawns a task that runs [`Self::write_all`], if there
    /// is none. Returns false if the record was queued already.
    pub(super) fn add(
        &self,
        record: Arc<dyn PendingRecord>,
        begin: impl FnOnce() -> JoinHandle<()>,
    ) -> bool {
        let mut queue = self.lock();
        let is_new = queue.push(record);
        // A task that has panicked is finished, too.
        if queue.writer.as_ref().is_none_or(JoinHandle::is_finished) {
            queue.writer = Some(begin());
        }
        is_new
    }

    /// Writes all queued records, including those that are added meanwhile. Waits after each
    /// failure: the next write would fail, too, and each one costs reopening the database.
    pub(super) async fn write_all(&self, database: &Database) {
        let mut backoff = Backoff::default();
        loop {
            backoff.wait().await;
            loop {
                let Some(record) = self.next() else {
                    return;
                };
                if let Err(error) = record.write(database) {
                    debug!(id = record.id(), %error, "the database cannot be written yet");
                    // After the others, which may need less space.
                    self.lock().push(record);
                    break;
                }
                backoff = Backoff::default();
            }
        }
    }

    /// Takes the next record from the queue; if it is empty, marks the task as ended, so that the
    /// next `add` spawns another one.
    fn next(&self) -> Option<Arc<dyn PendingRecord>> {
        let mut queue = self.lock();
        let record = queue.records.pop_front();
        if let Some(record) = &record {
            queue.ids.remove(record.id());
        } else {
            queue.writer = None;
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::cri::state::{PodRecord, pod_record};
    use crate::small_disk::SmallDisk;

    const RECORDS: usize = 5;

    #[derive(Debug)]
    struct Noted {
        record: PodRecord,
        attempts: Arc<AtomicUsize>,
    }

    impl PendingRecord for Noted {
        fn id(&self) -> &str {
            &self.record.id
        }

        fn write(&self, database: &Database) -> Result<(), StateError> {
            self.attempts.fetch_add(1, Ordering::Relaxed);
            database.put(&self.record)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_disk_is_tried_by_one_record_at_a_time_and_all_are_written_once_it_has_room() {
        let disk = SmallDisk::new();
        let database = Arc::new(Database::open(&disk.path().join("x.redb")).unwrap());
        let late = Arc::new(RetryWriter::default());
        let attempts = Arc::<AtomicUsize>::default();
        let add = |id: usize| {
            // The file has no space for many of these.
            let mut record = pod_record(&id.to_string());
            record.config.hostname = "x".repeat(375_000);
            let attempts = Arc::clone(&attempts);
            let (begun, database) = (Arc::clone(&late), Arc::clone(&database));
            let begin = || tokio::spawn(async move { begun.write_all(&database).await });
            late.add(Arc::new(Noted { record, attempts }), begin)
        };
        let waiting = || late.lock().records.len();
        let written = || database.all::<PodRecord>().unwrap().records.len();
        disk.fill();
        for id in 0..RECORDS {
            assert!(add(id));
            assert!(!add(id));
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
        // Some may have found space in the file.
        let left = waiting();
        assert!(left > 2, "{left}");
        let tried = attempts.load(Ordering::Relaxed);
        // In the longest of its delays.
        assert!((20..40).contains(&tried), "{tried}");

        disk.clear();
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!((waiting(), written()), (0, RECORDS));
        assert!(late.lock().writer.is_none());
        // Another task does the same.
        assert!(add(RECORDS));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!((waiting(), written()), (0, RECORDS + 1));
    }
}
