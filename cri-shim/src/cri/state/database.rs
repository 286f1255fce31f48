//! The database file of pods and containers.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use podvisor_images::create_database;
use redb::{Database as Redb, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde_json::error::Category;
use tracing::{info, warn};

use super::Record;
use super::records::{AnyRecord, Versioned};
use crate::blocking::in_place;

/// The database of pods, in the root.
pub(crate) const DATABASE: &str = "cri.redb";

/// Error of the database.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// An operation on the file failed.
    #[error("cannot {action} the database {}", .path.display())]
    Database {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    /// A record that is not whole.
    #[error("record {id:?} of {table} in {} is damaged", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The table.
        table: &'static str,
        /// The record.
        id: String,
        #[source]
        source: serde_json::Error,
    },
    /// A whole record that says something else than this podvisor's records do.
    #[error(
        "record {id:?} of {table} in {} is none that this podvisor can read: another version wrote \
         it, or it is damaged; start that version, or move the file away, which ends all pods",
        .path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The table.
        table: &'static str,
        /// The record.
        id: String,
        #[source]
        source: serde_json::Error,
    },
    /// Written by a newer podvisor.
    #[error(
        "record {id:?} of {table} in {} has version {version}, newer than this podvisor's \
         {known}; install the newer podvisor again",
        .path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The table.
        table: &'static str,
        /// The record.
        id: String,
        /// Its version.
        version: u32,
        /// The newest known version.
        known: u32,
    },
}

impl StateError {
    /// Returns the operating system's error kind for the file, if there is one.
    pub(crate) fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Database { source, .. } => match &**source {
                redb::Error::Io(error) => Some(error.kind()),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Records of a kind.
#[derive(Debug)]
pub(crate) struct Stored<R> {
    pub(crate) records: Vec<R>,
    /// Ids of those that cannot be read, and why.
    pub(crate) damaged: Vec<(String, StateError)>,
}

/// Pods and containers of the node; one daemon at a time has it open.
#[derive(Debug)]
pub(crate) struct Database {
    kept: Mutex<KeptOpen>,
    path: PathBuf,
}

#[derive(Debug)]
struct KeptOpen {
    /// `None` after a failure of the file, until the next access: redb refuses all operations after
    /// an error.
    redb: Option<Redb>,
    /// The file has failed and no operation has succeeded since. This is logged once.
    is_failing: bool,
}

impl KeptOpen {
    /// Records whether the file has just failed. Returns true if that changed.
    fn note(&mut self, fails: bool) -> bool {
        std::mem::replace(&mut self.is_failing, fails) != fails
    }
}

fn table<R: Record>() -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(R::TABLE)
}

impl Database {
    /// Opens the file, or creates it.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        if is_missing(path).map_err(|error| failed("open", path, error.into()))? {
            create_database(path).map_err(|source| failed("make", path, source))?;
        }
        Ok(Self {
            kept: Mutex::new(KeptOpen {
                redb: Some(open(path)?),
                is_failing: false,
            }),
            path: path.to_owned(),
        })
    }

    /// Writes a record; it is on the disk when this returns.
    pub(crate) fn put<R: Record>(&self, record: &R) -> Result<(), StateError> {
        let versioned = Versioned {
            version: R::VERSION,
            rest: record,
        };
        let bytes = serde_json::to_vec(&versioned);
        let bytes = bytes.map_err(|source| self.damaged::<R>(record.id(), source))?;
        self.with("write", |redb| {
            let transaction = redb.begin_write()?;
            transaction
                .open_table(table::<R>())?
                .insert(record.id(), bytes.as_slice())?;
            Ok(transaction.commit()?)
        })
    }

    /// Deletes a record; a missing one is not an error.
    pub(crate) fn remove<R: Record>(&self, id: &str) -> Result<(), StateError> {
        self.with("write", |redb| {
            let transaction = redb.begin_write()?;
            transaction.open_table(table::<R>())?.remove(id)?;
            Ok(transaction.commit()?)
        })
    }

    /// All records of a kind.
    ///
    /// # Errors
    /// The file cannot be read, or has a record that another podvisor wrote and this one cannot
    /// read.
    pub(crate) fn all<R: Record>(&self) -> Result<Stored<R>, StateError> {
        let found = self.with("read", |redb| {
            let mut found: Vec<(String, Vec<u8>)> = Vec::new();
            let transaction = redb.begin_read()?;
            let table = match transaction.open_table(table::<R>()) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(found),
                Err(error) => return Err(error.into()),
            };
            for entry in table.iter()? {
                let (id, bytes) = entry?;
                found.push((id.value().to_owned(), bytes.value().to_vec()));
            }
            Ok(found)
        })?;
        let mut stored = Stored {
            records: Vec::with_capacity(found.len()),
            damaged: Vec::new(),
        };
        for (id, bytes) in found {
            match self.decode::<R>(&id, &bytes) {
                Ok(record) => stored.records.push(record),
                Err(error @ StateError::Damaged { .. }) => stored.damaged.push((id, error)),
                Err(error) => return Err(error),
            }
        }
        Ok(stored)
    }

    fn decode<R: Record>(&self, id: &str, bytes: &[u8]) -> Result<R, StateError> {
        let unreadable = |source| self.unreadable::<R>(id, source);
        let any: AnyRecord = serde_json::from_slice(bytes).map_err(unreadable)?;
        if any.version > R::VERSION {
            return Err(StateError::Newer {
                path: self.path.clone(),
                table: R::TABLE,
                id: id.to_owned(),
                version: any.version,
                known: R::VERSION,
            });
        }
        let record: Versioned<R> = serde_json::from_slice(bytes).map_err(unreadable)?;
        Ok(record.rest)
    }

    /// Runs an operation on the database, which is reopened if its file has failed before.
    fn with<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Redb) -> Result<T, redb::Error>,
    ) -> Result<T, StateError> {
        in_place(|| self.with_now(action, work))
    }

    fn with_now<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Redb) -> Result<T, redb::Error>,
    ) -> Result<T, StateError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let redb = match kept.redb.take() {
            Some(redb) => redb,
            None => open(&self.path)?,
        };
        let done = work(&redb);
        let path = self.path.display();
        match &done {
            Err(error) if ends_use(error) => {
                // Close it before anything is opened: it locks its file.
                drop(redb);
                if kept.note(true) {
                    warn!(%path, %error, "the database has failed and is opened again later");
                }
            }
            _ => {
                kept.redb = Some(redb);
                if done.is_ok() && kept.note(false) {
                    info!(%path, "the database works again");
                }
            }
        }
        done.map_err(|source| failed(action, &self.path, source))
    }

    fn unreadable<R: Record>(&self, id: &str, source: serde_json::Error) -> StateError {
        match source.classify() {
            // What is damaged is rarely whole.
            Category::Data => StateError::Foreign {
                path: self.path.clone(),
                table: R::TABLE,
                id: id.to_owned(),
                source,
            },
            Category::Syntax | Category::Eof | Category::Io => self.damaged::<R>(id, source),
        }
    }

    fn damaged<R: Record>(&self, id: &str, source: serde_json::Error) -> StateError {
        StateError::Damaged {
            path: self.path.clone(),
            table: R::TABLE,
            id: id.to_owned(),
            source,
        }
    }

    /// For tests: writes a record as these bytes.
    #[cfg(test)]
    pub(crate) fn put_bytes<R: Record>(&self, id: &str, bytes: &[u8]) {
        let put = self.with("write", |redb| {
            let transaction = redb.begin_write()?;
            transaction.open_table(table::<R>())?.insert(id, bytes)?;
            Ok(transaction.commit()?)
        });
        put.unwrap();
    }
}

/// Returns whether the database is missing. Older versions first created an empty file.
fn is_missing(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.len() == 0),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

fn open(path: &Path) -> Result<Redb, StateError> {
    make_private(path).map_err(|error| failed("open", path, error.into()))?;
    Redb::open(path).map_err(|error| failed("open", path, error.into()))
}

/// Makes the file unreadable for other users: it contains environments of containers. Older
/// versions created it world-readable.
fn make_private(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.mode() & 0o077 != 0 {
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
    }
    Ok(())
}

fn failed(action: &'static str, path: &Path, source: redb::Error) -> StateError {
    StateError::Database {
        action,
        path: path.to_owned(),
        source: Box::new(source),
    }
}

/// Returns whether redb refuses all further operations after this error.
fn ends_use(error: &redb::Error) -> bool {
    matches!(
        error,
        redb::Error::Io(_)
            | redb::Error::PreviousIo
            | redb::Error::DatabaseClosed
            | redb::Error::LockPoisoned(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::state::{PodPhase, PodRecord, pod_record as record};
    use crate::small_disk::SmallDisk;

    fn all(database: &Database) -> Vec<PodRecord> {
        let stored = database.all().unwrap();
        assert!(stored.damaged.is_empty());
        stored.records
    }

    #[test]
    fn a_database_is_read_by_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        let mode = || path.metadata().unwrap().mode() & 0o777;
        let database = Database::open(&path).unwrap();
        database.put(&record("a")).unwrap();
        assert_eq!(mode(), 0o600);
        drop(database);
        // As older versions created it.
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let database = Database::open(&path).unwrap();
        assert_eq!(mode(), 0o600);
        assert_eq!(all(&database), [record("a")]);
    }

    #[test]
    fn records_survive_and_are_replaced_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        {
            let database = Database::open(&path).unwrap();
            assert!(all(&database).is_empty());
            database.put(&record("a")).unwrap();
            database.put(&record("b")).unwrap();
        }
        let database = Database::open(&path).unwrap();
        assert_eq!(all(&database), [record("a"), record("b")]);
        let stopped = PodRecord {
            phase: PodPhase::stopped(Some("x".to_owned())),
            ..record("a")
        };
        database.put(&stopped).unwrap();
        database.remove::<PodRecord>("b").unwrap();
        database.remove::<PodRecord>("b").unwrap();
        assert_eq!(all(&database), [stopped]);
    }

    #[test]
    fn a_disk_that_was_full_is_written_again_when_it_has_room() {
        let disk = SmallDisk::new();
        let database = Database::open(&disk.path().join("x.redb")).unwrap();
        database.put(&record("a")).unwrap();
        disk.fill();
        let large = PodRecord {
            config: podvisor_cri_messages::PodSandboxConfig {
                hostname: "x".repeat(4 << 20),
                ..Default::default()
            },
            ..record("b")
        };
        for _ in 0..2 {
            let refused = database.put(&large).unwrap_err();
            let full = io::ErrorKind::StorageFull;
            assert_eq!(refused.io_kind(), Some(full), "{refused:?}");
        }
        disk.clear();
        database.put(&record("b")).unwrap();
        assert_eq!(all(&database), [record("a"), record("b")]);
    }

    #[test]
    fn a_database_is_made_on_a_disk_that_was_full() {
        let disk = SmallDisk::new();
        let path = disk.path().join("x.redb");
        disk.fill();
        Database::open(&path).unwrap_err();
        assert!(!path.exists());
        disk.clear();
        // As a power loss and an older version leave them.
        fs::write(path.with_extension("redb.new"), vec![0; 4096]).unwrap();
        fs::write(&path, []).unwrap();
        Database::open(&path).unwrap().put(&record("a")).unwrap();
        assert_eq!(all(&Database::open(&path).unwrap()), [record("a")]);
        assert!(!path.with_extension("redb.new").exists());
    }

    #[test]
    fn a_file_that_fails_is_noted_until_it_works() {
        let disk = SmallDisk::new();
        let mut large = record("a");
        large.config.hostname = "x".repeat(4 << 20);
        let database = Database::open(&disk.path().join("x.redb")).unwrap();
        let fails = || database.kept.lock().unwrap().is_failing;
        for _ in 0..2 {
            disk.fill();
            for _ in 0..3 {
                database.put(&large).unwrap_err();
                assert!(fails());
            }
            disk.clear();
            for _ in 0..3 {
                database.put(&record("a")).unwrap();
                assert!(!fails());
            }
        }
    }

    #[test]
    fn what_a_file_does_is_told_when_it_is_new() {
        let mut kept = KeptOpen {
            redb: None,
            is_failing: false,
        };
        let told = [false, true, true, false, false, true].map(|fails| kept.note(fails));
        assert_eq!(told, [false, true, false, true, false, true]);
    }

    #[test]
    fn one_daemon_at_a_time_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        let _first = Database::open(&path).unwrap();
        assert!(Database::open(&path).is_err());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_told_not_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("x.redb")).unwrap();
        let newer = database.decode::<PodRecord>("a", br#"{"version": 99}"#);
        assert!(matches!(newer, Err(StateError::Newer { version: 99, .. })));
        for bad in ["", "\u{0}\u{0}", r#"{"version": 1, "id": "#] {
            let damaged = database.decode::<PodRecord>("a", bad.as_bytes());
            assert!(matches!(damaged, Err(StateError::Damaged { .. })), "{bad}");
        }
        let mut unknown_phase = serde_json::to_value(record("a")).unwrap();
        unknown_phase["version"] = 1.into();
        unknown_phase["phase"] = "Hibernated".into();
        let unknown_phase = unknown_phase.to_string();
        for other in ["{}", r#"{"version": 1, "id": 7}"#, &unknown_phase] {
            let foreign = database.decode::<PodRecord>("a", other.as_bytes());
            assert!(
                matches!(foreign, Err(StateError::Foreign { .. })),
                "{other}"
            );
            database.put_bytes::<PodRecord>("a", other.as_bytes());
            assert!(database.all::<PodRecord>().is_err(), "{other}");
        }
    }
}
