//! The database: names, times of use, pins. Everything else is derived from the files.
//!
//! A database can be open in only one process at a time, and a store must serve several, so it is
//! opened for each transaction under a separate lock and closed again. A transaction is on the disk
//! when it ends.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::disk_records::{self, DiskChange, Disks};
use super::layout::Layout;
use super::private;
use super::work::sync_directory_of;
use crate::signature::Claim;
use crate::{Digest, Error, Result};

/// Full reference, with tag or digest, to the hexadecimal id.
const NAMES: TableDefinition<'_, &str, &str> = TableDefinition::new("names");
/// Hexadecimal id to a [`Record`] in JSON.
const IMAGES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("images");

/// Bytes of the database kept in memory; all of it is small.
const CACHE_SIZE: usize = 1 << 20;

/// The record of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The image's manifest.
    pub(super) manifest: Digest,
    /// Indexes that named it.
    #[serde(default)]
    pub(super) indexes: Vec<Digest>,
    /// Seconds since 1970.
    pub(super) pulled: u64,
    /// Seconds since 1970.
    pub(super) used: u64,
    #[serde(default)]
    pub(super) pinned: bool,
    /// The disk image that was found in it.
    #[serde(default)]
    pub(super) disk: Option<Digest>,
    /// Signatures that were verified when it was pulled.
    #[serde(default)]
    pub(super) signatures: Vec<Claim>,
}

impl Record {
    /// Creates the record of an image that was just added.
    pub(super) fn new(manifest: Digest) -> Self {
        let now = now();
        Self {
            manifest,
            indexes: Vec::new(),
            pulled: now,
            used: now,
            pinned: false,
            disk: None,
            signatures: Vec::new(),
        }
    }
}

/// A name and the image that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) name: String,
    pub(super) id: Digest,
}

/// Everything in the database.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    pub(super) images: Vec<(Digest, Record)>,
    /// Sorted by name.
    pub(super) names: Vec<Name>,
    pub(super) disks: Disks,
    /// Images whose records this version cannot read: a later one has written them.
    pub(super) unreadable: Vec<Digest>,
}

/// A change.
#[derive(Clone, Debug)]
pub(super) enum Change {
    PutImage(Digest, Record),
    DropImage(Digest),
    PutName(Name),
    DropName(String),
    Disk(DiskChange),
}

pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

pub(super) fn time(seconds: u64) -> SystemTime {
    UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds))
        .unwrap_or(UNIX_EPOCH)
}

/// Reads everything; a missing database is empty. Nothing is written, unless a crash left something
/// to repair.
pub(super) fn read(layout: &Layout) -> Result<Contents> {
    let shared = lock(layout, FlockOperation::LockShared)?;
    let path = layout.database();
    if !path.exists() {
        return Ok(Contents::default());
    }
    if let Ok(database) = Database::builder()
        .set_cache_size(CACHE_SIZE)
        .open_read_only(&path)
    {
        return load(&database).map_err(|source| failed(layout, source));
    }
    // Opening it for writing repairs it, or reports what is wrong.
    drop(shared);
    update(layout, |_| Ok((Vec::new(), ()))).map(|(contents, ())| contents)
}

/// Runs one transaction: `decide` gets the contents and returns the changes. Returns the contents
/// after it.
pub(super) fn update<T>(
    layout: &Layout,
    decide: impl FnOnce(&Contents) -> Result<(Vec<Change>, T)>,
) -> Result<(Contents, T)> {
    let _lock = lock(layout, FlockOperation::LockExclusive)?;
    let fault = |source: redb::Error| failed(layout, source);
    let path = layout.database();
    if !path.exists() {
        create_database(&layout.database()).map_err(fault)?;
    }
    let database = Database::builder()
        .set_cache_size(CACHE_SIZE)
        .open(&path)
        .map_err(|error| fault(error.into()))?;
    let mut contents = load(&database).map_err(fault)?;
    let (changes, out) = decide(&contents)?;
    if !changes.is_empty() {
        apply(&database, &changes).map_err(fault)?;
        changes
            .into_iter()
            .for_each(|change| contents.apply(change));
    }
    Ok((contents, out))
}

/// Creates an empty redb database, accessible only to its owner, that gets its name only when it is
/// complete: a partly created one could not be repaired. A crash leaves a file of the same name
/// with `.new` appended, which the next attempt removes.
///
/// # Errors
/// The name does not exist then.
pub fn create_database(path: &Path) -> Result<(), redb::Error> {
    let new = path.with_added_extension("new");
    let make = || -> Result<(), redb::Error> {
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => drop(private::open(&new)?),
        }
        // An empty file is treated as a new database.
        drop(Database::create(&new)?);
        File::open(&new)?.sync_all()?;
        fs::rename(&new, path)?;
        Ok(sync_directory_of(path)?)
    };
    make().inspect_err(|_| {
        // A file that cannot be removed now is removed at the next open.
        let _ = fs::remove_file(&new);
    })
}

/// Removes what a crash left of an unfinished database.
pub(super) fn clear(layout: &Layout) -> Result<()> {
    let path = layout.new_database();
    if !path.exists() {
        return Ok(());
    }
    let _lock = lock(layout, FlockOperation::LockExclusive)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", &path, error))
        }
        _ => Ok(()),
    }
}

fn lock(layout: &Layout, how: FlockOperation) -> Result<File> {
    let path = layout.lock();
    let mut opened = private::open(&path);
    if let Err(error) = &opened
        && error.kind() == io::ErrorKind::NotFound
    {
        // The store was removed while it was open.
        layout.create_directories()?;
        opened = private::open(&path);
    }
    let locked = opened.and_then(|file| {
        flock(&file, how)?;
        Ok(file)
    });
    locked.map_err(|source| Error::io("lock", &path, source))
}

fn failed(layout: &Layout, source: redb::Error) -> Error {
    match source {
        redb::Error::Io(source) => Error::io("use the database", &layout.database(), source),
        source => Error::Database {
            path: layout.database(),
            source: Box::new(source),
        },
    }
}

fn load(database: &impl ReadableDatabase) -> Result<Contents, redb::Error> {
    let transaction = database.begin_read()?;
    let mut contents = Contents {
        disks: disk_records::load(&transaction)?,
        ..Contents::default()
    };
    match transaction.open_table(IMAGES) {
        Ok(images) => {
            for row in images.iter()? {
                let (id, record) = row?;
                let Ok(id) = Digest::from_hex(id.value()) else {
                    continue;
                };
                match serde_json::from_slice(record.value()) {
                    Ok(record) => contents.images.push((id, record)),
                    Err(_) => contents.unreadable.push(id),
                }
            }
        }
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(contents),
        Err(error) => return Err(error.into()),
    }
    for row in transaction.open_table(NAMES)?.iter()? {
        let (name, id) = row?;
        if let Ok(id) = Digest::from_hex(id.value()) {
            contents.names.push(Name {
                name: name.value().to_owned(),
                id,
            });
        }
    }
    Ok(contents)
}

fn apply(database: &Database, changes: &[Change]) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut images = transaction.open_table(IMAGES)?;
        let mut names = transaction.open_table(NAMES)?;
        for change in changes {
            match change {
                Change::PutImage(id, record) => {
                    let json = serde_json::to_vec(record).map_err(io::Error::other)?;
                    images.insert(id.hex().as_str(), json.as_slice())?;
                }
                Change::DropImage(id) => drop(images.remove(id.hex().as_str())?),
                Change::PutName(Name { name, id }) => {
                    drop(names.insert(name.as_str(), id.hex().as_str())?);
                }
                Change::DropName(name) => drop(names.remove(name.as_str())?),
                Change::Disk(change) => disk_records::apply(&transaction, change)?,
            }
        }
    }
    transaction.commit()?;
    Ok(())
}

impl Contents {
    /// Applies a change to the contents as [`apply`] does to the database.
    fn apply(&mut self, change: Change) {
        match change {
            Change::PutImage(id, record) => {
                self.apply(Change::DropImage(id));
                self.images.push((id, record));
            }
            Change::DropImage(id) => {
                self.images.retain(|(found, _)| *found != id);
                self.unreadable.retain(|found| *found != id);
            }
            Change::PutName(name) => {
                self.apply(Change::DropName(name.name.clone()));
                self.names.push(name);
                self.names.sort_by(|a, b| a.name.cmp(&b.name));
            }
            Change::DropName(name) => self.names.retain(|found| found.name != name),
            Change::Disk(change) => self.disks.apply(change),
        }
    }

    pub(super) fn record(&self, id: &Digest) -> Option<&Record> {
        self.images
            .iter()
            .find(|(found, _)| found == id)
            .map(|(_, record)| record)
    }

    pub(super) fn names_of(&self, id: &Digest) -> impl Iterator<Item = &str> {
        self.names
            .iter()
            .filter(move |name| name.id == *id)
            .map(|name| name.name.as_str())
    }
}

/// Stores a record as some other version might have written it.
#[cfg(test)]
pub(super) fn put_raw(layout: &Layout, id: Digest, record: &[u8]) {
    update(layout, |_| Ok((Vec::new(), ()))).unwrap();
    let database = Database::open(layout.database()).unwrap();
    let transaction = database.begin_write().unwrap();
    let mut images = transaction.open_table(IMAGES).unwrap();
    images.insert(id.hex().as_str(), record).unwrap();
    drop(images);
    drop(transaction.open_table(NAMES).unwrap());
    transaction.commit().unwrap();
}
