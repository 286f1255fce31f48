//! Records of disk images in the database.

use std::io;

use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::disk::Validators;

/// Hexadecimal id to a [`DiskRecord`] in JSON.
const DISKS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("disks");
/// URL to a [`DiskName`] in JSON.
const NAMES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("disk_names");

/// A disk image. Its id is the digest of the file that it came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskRecord {
    /// Format of the file.
    pub(super) format: String,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Checksums, in addition to the id, that the file is known to have.
    #[serde(default)]
    pub(super) checksums: Vec<String>,
    /// Seconds since 1970.
    pub(super) fetched: u64,
    /// Seconds since 1970.
    pub(super) used: u64,
    #[serde(default)]
    pub(super) pinned: bool,
    /// Whether it came out of an OCI image; it is removed with that image.
    #[serde(default)]
    pub(super) from_image: bool,
}

/// What a URL referred to when it was last asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskName {
    pub(super) id: Digest,
    #[serde(default)]
    pub(super) validators: Validators,
    /// Nanoseconds since 1970, so that two answers can be told apart.
    pub(super) asked: u64,
}

/// All records of disk images.
#[derive(Clone, Debug, Default)]
pub(super) struct Disks {
    pub(super) records: Vec<(Digest, DiskRecord)>,
    /// Sorted by URL.
    pub(super) names: Vec<(String, DiskName)>,
    /// Those of records that this version cannot read.
    pub(super) unreadable: Vec<Digest>,
}

/// A change.
#[derive(Clone, Debug)]
pub(super) enum DiskChange {
    Put(Digest, DiskRecord),
    Drop(Digest),
    PutName(String, DiskName),
    DropName(String),
}

/// The rows of a table.
struct Rows<T> {
    found: Vec<(String, T)>,
    /// Keys of those that this version cannot read.
    unreadable: Vec<String>,
}

/// Reads all rows of a table; a missing table has none.
fn rows<T: for<'a> Deserialize<'a>>(
    transaction: &ReadTransaction,
    table: TableDefinition<'_, &str, &[u8]>,
) -> Result<Rows<T>, redb::Error> {
    let mut rows = Rows {
        found: Vec::new(),
        unreadable: Vec::new(),
    };
    let table = match transaction.open_table(table) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(rows),
        Err(error) => return Err(error.into()),
    };
    for row in table.iter()? {
        let (key, value) = row?;
        let key = key.value().to_owned();
        match serde_json::from_slice(value.value()) {
            Ok(value) => rows.found.push((key, value)),
            Err(_) => rows.unreadable.push(key),
        }
    }
    Ok(rows)
}

pub(super) fn load(transaction: &ReadTransaction) -> Result<Disks, redb::Error> {
    let records = rows(transaction, DISKS)?;
    let id = |hex: &String| Digest::from_hex(hex).ok();
    Ok(Disks {
        unreadable: records.unreadable.iter().filter_map(id).collect(),
        records: records
            .found
            .into_iter()
            .filter_map(|(hex, record)| Some((id(&hex)?, record)))
            .collect(),
        names: rows(transaction, NAMES)?.found,
    })
}

pub(super) fn apply(
    transaction: &WriteTransaction,
    change: &DiskChange,
) -> Result<(), redb::Error> {
    let mut disks = transaction.open_table(DISKS)?;
    let mut names = transaction.open_table(NAMES)?;
    match change {
        DiskChange::Put(id, record) => {
            let json = serde_json::to_vec(record).map_err(io::Error::other)?;
            disks.insert(id.hex().as_str(), json.as_slice())?;
        }
        DiskChange::Drop(id) => drop(disks.remove(id.hex().as_str())?),
        DiskChange::PutName(address, name) => {
            let json = serde_json::to_vec(name).map_err(io::Error::other)?;
            names.insert(address.as_str(), json.as_slice())?;
        }
        DiskChange::DropName(address) => drop(names.remove(address.as_str())?),
    }
    Ok(())
}

impl Disks {
    /// Applies a change to the records as [`apply`] does to the database.
    pub(super) fn apply(&mut self, change: DiskChange) {
        match change {
            DiskChange::Put(id, record) => {
                self.apply(DiskChange::Drop(id));
                self.records.push((id, record));
            }
            DiskChange::Drop(id) => self.records.retain(|(found, _)| *found != id),
            DiskChange::PutName(address, name) => {
                self.apply(DiskChange::DropName(address.clone()));
                self.names.push((address, name));
                self.names.sort_by(|a, b| a.0.cmp(&b.0));
            }
            DiskChange::DropName(address) => self.names.retain(|(found, _)| *found != address),
        }
    }

    pub(super) fn record(&self, id: &Digest) -> Option<&DiskRecord> {
        let mut records = self.records.iter();
        records
            .find(|(found, _)| found == id)
            .map(|(_, record)| record)
    }

    pub(super) fn name(&self, address: &str) -> Option<&DiskName> {
        let mut names = self.names.iter();
        names
            .find(|(found, _)| found == address)
            .map(|(_, name)| name)
    }

    pub(super) fn names_of(&self, id: &Digest) -> impl Iterator<Item = &str> {
        let names = self.names.iter().filter(move |(_, name)| name.id == *id);
        names.map(|(address, _)| address.as_str())
    }
}

/// Puts a record as another version may write it.
#[cfg(test)]
pub(super) fn put_raw(database: &redb::Database, id: Digest, record: &[u8]) {
    let transaction = database.begin_write().unwrap();
    let mut disks = transaction.open_table(DISKS).unwrap();
    disks.insert(id.hex().as_str(), record).unwrap();
    drop(disks);
    transaction.commit().unwrap();
}
