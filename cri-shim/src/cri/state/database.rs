//! The database file.

use std::path::{Path, PathBuf};

use redb::{Database as Redb, ReadableDatabase as _, ReadableTable as _, TableDefinition};

use super::Record;
use super::records::{AnyRecord, Versioned};

/// Why the database is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// The file, or the disk under it.
    #[error("cannot {action} the database {}", .path.display())]
    Database {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    /// A record that makes no sense.
    #[error(
        "record {id:?} of {table} in {} is damaged; stop all pods of podvisor and remove the file",
        .path.display()
    )]
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
        /// The newest that is known.
        known: u32,
    },
}

/// Pods and containers of the node; one daemon at a time has it open.
#[derive(Debug)]
pub(crate) struct Database {
    redb: Redb,
    path: PathBuf,
}

fn table<R: Record>() -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(R::TABLE)
}

impl Database {
    /// Opens the file or makes it.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        let path = path.to_owned();
        match Redb::create(&path) {
            Ok(redb) => Ok(Self { redb, path }),
            Err(error) => Err(StateError::Database {
                action: "open",
                path,
                source: Box::new(error.into()),
            }),
        }
    }

    /// Writes a record; on the disk when this returns.
    pub(crate) fn put<R: Record>(&self, record: &R) -> Result<(), StateError> {
        let versioned = Versioned {
            version: R::VERSION,
            rest: record,
        };
        let bytes = serde_json::to_vec(&versioned);
        let bytes = bytes.map_err(|source| self.damaged::<R>(record.id(), source))?;
        self.write(|redb| {
            let transaction = redb.begin_write()?;
            transaction
                .open_table(table::<R>())?
                .insert(record.id(), bytes.as_slice())?;
            Ok(transaction.commit()?)
        })
    }

    /// Forgets a record; one that is not there is no error.
    pub(crate) fn remove<R: Record>(&self, id: &str) -> Result<(), StateError> {
        self.write(|redb| {
            let transaction = redb.begin_write()?;
            transaction.open_table(table::<R>())?.remove(id)?;
            Ok(transaction.commit()?)
        })
    }

    /// All records of a kind.
    pub(crate) fn all<R: Record>(&self) -> Result<Vec<R>, StateError> {
        let mut found: Vec<(String, Vec<u8>)> = Vec::new();
        let mut read = || -> Result<(), redb::Error> {
            let transaction = self.redb.begin_read()?;
            let table = match transaction.open_table(table::<R>()) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for entry in table.iter()? {
                let (id, bytes) = entry?;
                found.push((id.value().to_owned(), bytes.value().to_vec()));
            }
            Ok(())
        };
        read().map_err(|source| self.failed("read", source))?;
        let decode = |(id, bytes): (String, Vec<u8>)| self.decode::<R>(&id, &bytes);
        found.into_iter().map(decode).collect()
    }

    fn decode<R: Record>(&self, id: &str, bytes: &[u8]) -> Result<R, StateError> {
        let damaged = |source| self.damaged::<R>(id, source);
        let any: AnyRecord = serde_json::from_slice(bytes).map_err(damaged)?;
        if any.version > R::VERSION {
            return Err(StateError::Newer {
                path: self.path.clone(),
                table: R::TABLE,
                id: id.to_owned(),
                version: any.version,
                known: R::VERSION,
            });
        }
        let record: Versioned<R> = serde_json::from_slice(bytes).map_err(damaged)?;
        Ok(record.rest)
    }

    fn write(
        &self,
        write: impl FnOnce(&Redb) -> Result<(), redb::Error>,
    ) -> Result<(), StateError> {
        write(&self.redb).map_err(|source| self.failed("write", source))
    }

    fn failed(&self, action: &'static str, source: redb::Error) -> StateError {
        StateError::Database {
            action,
            path: self.path.clone(),
            source: Box::new(source),
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::state::{GuestSize, PodPhase, PodRecord};

    fn record(id: &str) -> PodRecord {
        PodRecord {
            id: id.to_owned(),
            config: k8s_cri::v1::PodSandboxConfig {
                hostname: "web".to_owned(),
                ..Default::default()
            },
            handler: String::new(),
            created_at: 7,
            phase: PodPhase::Ready,
            addresses: vec!["10.0.0.2".parse().unwrap()],
            size: GuestSize {
                memory: 1 << 28,
                growth: 1 << 34,
                vcpus: 1,
                max_vcpus: 8,
            },
            memory_volumes: None,
            extra: 0,
        }
    }

    #[test]
    fn records_survive_and_are_replaced_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        {
            let database = Database::open(&path).unwrap();
            assert!(database.all::<PodRecord>().unwrap().is_empty());
            database.put(&record("a")).unwrap();
            database.put(&record("b")).unwrap();
        }
        let database = Database::open(&path).unwrap();
        assert_eq!(
            database.all::<PodRecord>().unwrap(),
            [record("a"), record("b")]
        );
        let stopped = PodRecord {
            phase: PodPhase::Stopped {
                reason: Some("x".to_owned()),
            },
            ..record("a")
        };
        database.put(&stopped).unwrap();
        database.remove::<PodRecord>("b").unwrap();
        database.remove::<PodRecord>("b").unwrap();
        assert_eq!(database.all::<PodRecord>().unwrap(), [stopped]);
    }

    #[test]
    fn one_daemon_at_a_time_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        let _first = Database::open(&path).unwrap();
        assert!(Database::open(&path).is_err());
    }

    #[test]
    fn a_newer_or_damaged_record_is_told_not_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("x.redb")).unwrap();
        let newer = database.decode::<PodRecord>("a", br#"{"version": 99}"#);
        assert!(matches!(newer, Err(StateError::Newer { version: 99, .. })));
        for bad in ["", "{}", r#"{"version": 1, "id": 7}"#] {
            let damaged = database.decode::<PodRecord>("a", bad.as_bytes());
            assert!(matches!(damaged, Err(StateError::Damaged { .. })), "{bad}");
        }
    }
}
