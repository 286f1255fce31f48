//! The mapping of the disk's clusters to the file's: the L1 table, which is in memory completely,
//! and L2 tables, some of which are.
//!
//! Changes stay in memory until [`Tables::write_new`] and [`Tables::link`]. Between the two the
//! file must be made durable: then it never points to missing data, even after a power failure.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::clusters::Clusters;
use super::damaged;
use super::header::{CLUSTER, ENTRIES, Header, OFFSET, OWN};

/// The maximum number of tables in memory: 64 KiB each, which map 512 MiB.
pub(super) const MAX_TABLES: usize = 32;

/// Entries that are written together: a sector of them.
const GROUP: usize = 64;

/// An entry of a cluster that reads as zeroes.
const ZERO: u64 = 1;

/// Where a cluster of the disk is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the base.
    Base,
    /// Nowhere: it reads as zeroes.
    Zeroes,
    /// At this byte of the file.
    File(u64),
}

#[derive(Debug)]
struct Table {
    /// Its offset in the file.
    at: u64,
    entries: Vec<u64>,
    /// A bit for each [`GROUP`] that must be written.
    dirty: u128,
    /// The time of its last use.
    used: u64,
}

#[derive(Debug)]
pub(super) struct Tables {
    l1_at: u64,
    /// The offset of each L2 table; 0 if it does not exist.
    l1: Vec<u64>,
    cached: HashMap<usize, Table>,
    /// Tables that the L1 table in the file does not point to yet.
    unlinked: Vec<usize>,
    clock: u64,
}

impl Tables {
    /// Reads and checks the whole mapping, and claims its clusters.
    ///
    /// # Errors
    /// If it cannot be read, or is inconsistent.
    pub(super) fn open(file: &File, header: &Header, clusters: &mut Clusters) -> io::Result<Self> {
        let entries = usize::try_from(header.l1_entries).unwrap_or(0);
        let mut bytes = vec![0; entries.saturating_mul(8)];
        file.read_exact_at(&mut bytes, header.l1_offset)?;
        let mut l1 = Vec::new();
        for entry in bytes.as_chunks().0 {
            let entry = u64::from_be_bytes(*entry);
            match entry {
                0 => {}
                _ if entry & !(OWN | OFFSET) != 0 || entry & OWN == 0 => {
                    return Err(damaged("a table is not the first level's alone"));
                }
                _ => clusters.claim(entry & OFFSET)?,
            }
            l1.push(entry & OFFSET);
        }
        for at in l1.iter().copied().filter(|at| *at != 0) {
            for entry in read_table(file, at)? {
                if let (_, Some(at)) = parse(entry)? {
                    clusters.claim(at)?;
                }
            }
        }
        Ok(Self {
            l1_at: header.l1_offset,
            l1,
            cached: HashMap::new(),
            unlinked: Vec::new(),
            clock: 0,
        })
    }

    /// Maps more of a disk that has grown: there is nothing yet behind its end.
    pub(super) fn grow(&mut self, entries: u64) {
        let entries = usize::try_from(entries).unwrap_or(0);
        self.l1.resize(entries.max(self.l1.len()), 0);
    }

    /// The number of tables in memory.
    #[cfg(test)]
    pub(super) fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Whether a table may have to be written to make room before [`Self::place`] or [`Self::set`].
    pub(super) fn needs_room(&self, cluster: u64) -> bool {
        let (number, _) = split(cluster);
        let changed = |table: &Table| table.dirty != 0;
        !self.cached.contains_key(&number)
            && self.cached.len() >= MAX_TABLES
            && self.cached.values().all(changed)
    }

    /// Returns where a cluster of the disk is stored.
    ///
    /// # Errors
    /// If its table cannot be read.
    pub(super) fn place(&mut self, file: &File, cluster: u64) -> io::Result<Place> {
        Ok(parse(self.entry(file, cluster)?)?.0)
    }

    /// Returns the place of a cluster in the file, even if it reads as zeroes.
    pub(super) fn reserved(&mut self, file: &File, cluster: u64) -> io::Result<Option<u64>> {
        Ok(parse(self.entry(file, cluster)?)?.1)
    }

    fn entry(&mut self, file: &File, cluster: u64) -> io::Result<u64> {
        let (number, index) = split(cluster);
        match self.l1.get(number) {
            Some(0) => Ok(0),
            Some(_) => {
                let table = self.table(file, number)?;
                Ok(table.entries.get(index).copied().unwrap_or(0))
            }
            None => Err(damaged("a cluster lies beyond the disk")),
        }
    }

    /// Sets where a cluster of the disk is stored.
    ///
    /// # Errors
    /// If its table can be neither read nor created.
    pub(super) fn set(
        &mut self,
        file: &File,
        clusters: &mut Clusters,
        cluster: u64,
        place: Place,
    ) -> io::Result<()> {
        let (number, index) = split(cluster);
        if self.l1.get(number) == Some(&0) {
            self.make_room();
            let at = clusters.allocate()?;
            let table = Table {
                at,
                entries: vec![0; ENTRIES as usize],
                dirty: u128::MAX,
                used: self.clock,
            };
            self.cached.insert(number, table);
            self.unlinked.push(number);
            if let Some(entry) = self.l1.get_mut(number) {
                *entry = at;
            }
        }
        let table = self.table(file, number)?;
        let new = match place {
            Place::Base => 0,
            Place::Zeroes => ZERO,
            Place::File(at) => at | OWN,
        };
        if let Some(entry) = table.entries.get_mut(index) {
            *entry = new;
            table.dirty |= 1 << (index / GROUP);
        }
        Ok(())
    }

    fn table(&mut self, file: &File, number: usize) -> io::Result<&mut Table> {
        self.clock = self.clock.saturating_add(1);
        let used = self.clock;
        if !self.cached.contains_key(&number) {
            self.make_room();
        }
        let at = self.l1.get(number).copied().unwrap_or(0);
        let table = match self.cached.entry(number) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Table {
                at,
                entries: read_table(file, at)?,
                dirty: 0,
                used,
            }),
        };
        table.used = used;
        Ok(table)
    }

    /// Drops the least recently used of the tables that are unchanged since they were read or
    /// written.
    fn make_room(&mut self) {
        if self.cached.len() < MAX_TABLES {
            return;
        }
        let clean = self.cached.iter().filter(|(_, table)| table.dirty == 0);
        let oldest = clean.min_by_key(|(_, table)| table.used);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.cached.remove(&number);
        }
    }

    /// Whether nothing is waiting to be written.
    pub(super) fn is_clean(&self) -> bool {
        self.unlinked.is_empty() && self.cached.values().all(|table| table.dirty == 0)
    }

    /// Writes new tables, which nothing in the file points to yet.
    ///
    /// # Errors
    /// If the file cannot be written; then nothing is forgotten.
    pub(super) fn write_new(&mut self, file: &File) -> io::Result<()> {
        for number in &self.unlinked {
            if let Some(table) = self.cached.get_mut(number) {
                table.write(file)?;
            }
        }
        Ok(())
    }

    /// Writes the changes of other tables, and makes the L1 table point to new ones. What they
    /// point to must be durable.
    ///
    /// # Errors
    /// If the file cannot be written; then nothing is forgotten.
    pub(super) fn link(&mut self, file: &File) -> io::Result<()> {
        for table in self.cached.values_mut() {
            table.write(file)?;
        }
        while let Some(number) = self.unlinked.last().copied() {
            let entry = self.l1.get(number).copied().unwrap_or(0) | OWN;
            let at = (number as u64).saturating_mul(8).saturating_add(self.l1_at);
            file.write_all_at(&entry.to_be_bytes(), at)?;
            self.unlinked.pop();
        }
        Ok(())
    }
}

impl Table {
    fn write(&mut self, file: &File) -> io::Result<()> {
        for (number, group) in self.entries.chunks(GROUP).enumerate() {
            let bit = 1u128 << (number % 128);
            if self.dirty & bit != 0 {
                let bytes: Vec<u8> = group.iter().flat_map(|entry| entry.to_be_bytes()).collect();
                let at = (number as u64).saturating_mul(bytes.len() as u64);
                file.write_all_at(&bytes, self.at.saturating_add(at))?;
                self.dirty &= !bit;
            }
        }
        Ok(())
    }
}

/// The L2 table of a cluster of the disk, and its index there.
fn split(cluster: u64) -> (usize, usize) {
    let number = usize::try_from(cluster / ENTRIES).unwrap_or(usize::MAX);
    // Less than the number of a table's entries.
    (number, (cluster % ENTRIES) as usize)
}

fn read_table(file: &File, at: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; CLUSTER as usize];
    file.read_exact_at(&mut bytes, at)?;
    let entries = bytes.as_chunks().0.iter();
    Ok(entries.map(|entry| u64::from_be_bytes(*entry)).collect())
}

/// Returns where a cluster is stored by its entry, and its place in the file.
fn parse(entry: u64) -> io::Result<(Place, Option<u64>)> {
    let at = entry & OFFSET;
    let owned = (at != 0).then_some(at);
    if entry & !(OWN | OFFSET | ZERO) != 0 || !at.is_multiple_of(CLUSTER) {
        return Err(damaged("a cluster is compressed, or lies where none can"));
    }
    if owned.is_some() != (entry & OWN != 0) {
        return Err(damaged("a cluster is not one disk's alone"));
    }
    Ok(match (entry & ZERO, owned) {
        (0, Some(at)) => (Place::File(at), owned),
        (0, None) => (Place::Base, None),
        _ => (Place::Zeroes, owned),
    })
}
