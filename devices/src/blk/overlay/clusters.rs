//! Tracks which clusters of the file are in use.
//!
//! A cluster is allocated once and never freed: a range that the driver discards loses its blocks
//! on the host (a hole), but keeps its cluster. So each reference count is 0 or 1, and those of
//! newly allocated clusters are written when the mapping is ([`Clusters::account`]).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::damaged;
use super::header::{CLUSTER, COUNTS, ENTRIES, Header, OFFSET};

/// The maximum number of ranges that wait for [`Clusters::account`].
const MAX_PENDING: usize = 1024;

/// The maximum number of clusters of a file: its refcount table has one cluster, whose refcount
/// blocks count this many. A bit for each takes 32 MiB.
pub(super) const MAX_CLUSTERS: u64 = ENTRIES * COUNTS;

/// The clusters of a file.
#[derive(Debug)]
pub(super) struct Clusters {
    /// A bit for each cluster that is in use.
    used: Vec<u64>,
    /// The number of clusters of the file. Clusters to be allocated beyond its end are in `used`
    /// too.
    count: u64,
    /// Where the search for a free cluster starts.
    next: u64,
    /// Allocated clusters that are not counted in the file yet.
    pending: Vec<Range<u64>>,
    /// The offset of each refcount block, and of the table of them.
    blocks: Vec<u64>,
    table: u64,
}

impl Clusters {
    /// Creates the record of a file of `len` bytes, with no cluster marked as in use yet. There are
    /// no more than [`MAX_CLUSTERS`].
    ///
    /// # Errors
    /// If the refcount table cannot be read.
    pub(super) fn open(file: &File, len: u64, header: &Header) -> io::Result<Self> {
        let mut table = vec![0; CLUSTER as usize];
        file.read_exact_at(&mut table, header.counts_offset)?;
        let blocks = table.as_chunks().0.iter();
        let mut clusters = Self {
            used: Vec::new(),
            count: len.div_ceil(CLUSTER),
            next: 0,
            pending: Vec::new(),
            blocks: blocks.map(|entry| u64::from_be_bytes(*entry)).collect(),
            table: header.counts_offset,
        };
        let words = clusters.count.div_ceil(64);
        clusters.used = vec![0; usize::try_from(words).unwrap_or(0)];
        for block in clusters.blocks.clone() {
            if block != 0 {
                clusters.claim(block)?;
            }
        }
        Ok(clusters)
    }

    /// The number of clusters of the file.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Marks the cluster at `offset` of the file as in use.
    ///
    /// # Errors
    /// If it does not exist, or is in use already.
    pub(super) fn claim(&mut self, offset: u64) -> io::Result<()> {
        let index = offset / CLUSTER;
        if !offset.is_multiple_of(CLUSTER) || offset & !OFFSET != 0 || index >= self.count {
            return Err(damaged("a cluster lies outside the file"));
        }
        match self.bit(index) {
            Some((word, bit)) if *word & bit == 0 => {
                *word |= bit;
                Ok(())
            }
            _ => Err(damaged("a cluster is used twice")),
        }
    }

    fn bit(&mut self, index: u64) -> Option<(&mut u64, u64)> {
        let word = usize::try_from(index / 64).ok()?;
        Some((self.used.get_mut(word)?, 1 << (index % 64)))
    }

    /// Allocates a free cluster and returns its offset in the file. Its content is undefined.
    ///
    /// # Errors
    /// If the file has its maximum length.
    pub(super) fn allocate(&mut self) -> io::Result<u64> {
        let index = self.free();
        if index >= MAX_CLUSTERS {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if index >= self.count {
            self.count = index.saturating_add(1);
            let words = usize::try_from(self.count.div_ceil(64)).unwrap_or(0);
            self.used.resize(words.max(self.used.len()), 0);
        }
        if let Some((word, bit)) = self.bit(index) {
            *word |= bit;
        }
        self.next = index.saturating_add(1);
        let end = self.next;
        match self.pending.last_mut() {
            Some(last) if last.end == index => last.end = end,
            _ => self.pending.push(index..end),
        }
        Ok(index.saturating_mul(CLUSTER))
    }

    /// The first free cluster from `next` on, beyond the file's end if there is none in it.
    fn free(&self) -> u64 {
        let mut index = self.next;
        while index < self.count {
            let word = usize::try_from(index / 64).ok();
            let used = word.and_then(|word| self.used.get(word)).copied();
            let Some(used) = used else { break };
            let passed = index % 64;
            let free = u64::from((used >> passed).trailing_ones());
            index = index.saturating_add(free);
            if passed.saturating_add(free) < 64 {
                return index.min(self.count);
            }
        }
        self.count.max(index.min(self.count))
    }

    /// Whether [`Self::account`] should be called soon.
    pub(super) fn is_behind(&self) -> bool {
        self.pending.len() >= MAX_PENDING
    }

    /// Writes the refcounts of newly allocated clusters. They must be durable before anything
    /// points to those.
    ///
    /// # Errors
    /// If the file cannot be written; then nothing is forgotten.
    pub(super) fn account(&mut self, file: &File) -> io::Result<()> {
        // A refcount block that is created meanwhile is allocated, too, and counted by a later
        // iteration.
        let mut done = 0usize;
        while let Some(range) = self.pending.get(done).cloned() {
            let written = self.write_counts(file, range.clone());
            match written {
                Ok(()) if self.pending.get(done) == Some(&range) => {
                    done = done.saturating_add(1);
                }
                // The range has become longer.
                Ok(()) => {}
                Err(error) => {
                    self.pending.drain(..done);
                    return Err(error);
                }
            }
        }
        self.pending.clear();
        Ok(())
    }

    fn write_counts(&mut self, file: &File, mut range: Range<u64>) -> io::Result<()> {
        while range.start < range.end {
            let number = range.start / COUNTS;
            let first_of_next = number.saturating_add(1).saturating_mul(COUNTS);
            let end = range.end.min(first_of_next);
            let ones = usize::try_from(end.saturating_sub(range.start)).unwrap_or(0);
            let within = (range.start % COUNTS).saturating_mul(2);
            let block = self.block(file, number)?;
            file.write_all_at(&[0, 1].repeat(ones), block.saturating_add(within))?;
            range.start = end;
        }
        Ok(())
    }

    /// Returns the offset of a refcount block, and creates it if it is missing.
    fn block(&mut self, file: &File, number: u64) -> io::Result<u64> {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        match self.blocks.get(index) {
            None => return Err(io::ErrorKind::StorageFull.into()),
            Some(0) => {}
            Some(block) => return Ok(*block),
        }
        let block = self.allocate()?;
        file.write_all_at(&[0; CLUSTER as usize], block)?;
        // The table must never point to something that is not in the file.
        file.sync_data()?;
        let entry = self.table.saturating_add(number.saturating_mul(8));
        file.write_all_at(&block.to_be_bytes(), entry)?;
        if let Some(place) = self.blocks.get_mut(index) {
            *place = block;
        }
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clusters of a file that is `count` clusters long and whose refcount table is empty.
    fn clusters(count: u64) -> (File, Clusters) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(count * CLUSTER).unwrap();
        let header = Header {
            size: 0,
            l1_offset: 0,
            l1_entries: 0,
            counts_offset: CLUSTER,
        };
        let clusters = Clusters::open(&file, count * CLUSTER, &header).unwrap();
        (file, clusters)
    }

    #[test]
    fn clusters_are_claimed_once_whole_and_within_the_file() {
        let (_, mut clusters) = clusters(70);
        for claimed in [0, 63, 64, 69] {
            clusters.claim(claimed * CLUSTER).unwrap();
            let twice = clusters.claim(claimed * CLUSTER).unwrap_err();
            assert_eq!(twice.kind(), io::ErrorKind::InvalidData);
        }
        for wrong in [70 * CLUSTER, CLUSTER + 512, CLUSTER | 1 << 60, u64::MAX] {
            let error = clusters.claim(wrong).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{wrong:x}");
        }
    }

    #[test]
    fn free_clusters_are_given_out_in_order_and_then_those_behind_the_file() {
        let (_, mut clusters) = clusters(200);
        let free = [3, 62, 63, 64, 127, 130, 199];
        for index in (0..200).filter(|index| !free.contains(index)) {
            clusters.claim(index * CLUSTER).unwrap();
        }
        for index in free.into_iter().chain(200..300) {
            assert_eq!(clusters.allocate().unwrap(), index * CLUSTER);
        }
        assert_eq!(clusters.count(), 300);
        assert!(clusters.claim(250 * CLUSTER).is_err(), "it is given out");
        // Neighbours are counted together.
        assert_eq!(
            clusters.pending,
            [3..4, 62..65, 127..128, 130..131, 199..300]
        );
    }

    #[test]
    fn counts_are_written_for_what_was_given_out_alone() {
        let (file, mut clusters) = clusters(2 * MAX_PENDING as u64 + 10);
        for index in (1..2 * MAX_PENDING as u64).step_by(2) {
            clusters.claim(index * CLUSTER).unwrap();
        }
        while !clusters.is_behind() {
            assert!(clusters.pending.len() < MAX_PENDING);
            clusters.allocate().unwrap();
        }
        assert_eq!(clusters.pending.len(), MAX_PENDING);
        clusters.account(&file).unwrap();
        assert!(clusters.pending.is_empty() && !clusters.is_behind());
        let mut entry = [0; 8];
        file.read_exact_at(&mut entry, CLUSTER).unwrap();
        let block = u64::from_be_bytes(entry);
        let mut counts = vec![0; CLUSTER as usize];
        file.read_exact_at(&mut counts, block).unwrap();
        for (index, count) in counts.chunks(2).enumerate() {
            let given = index % 2 == 0 && index < 2 * MAX_PENDING;
            let own = index as u64 * CLUSTER == block;
            assert_eq!(count, [0, u8::from(given || own)], "{index}");
        }
    }
}
