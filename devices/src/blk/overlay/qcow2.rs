//! A disk that is a qcow2 file over a raw image.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use vm_memory::VolatileSlice;

use super::Qcow2Error;
use super::clusters::{Clusters, MAX_CLUSTERS};
use super::header::{CLUSTER, Header};
use super::tables::{Place, Tables};
use crate::GuestRam;
use crate::blk::disk::{Disk, Operation, Submitted, Topology};
use crate::blk::file::{PAGE, give_back, len, transfer, write_zeroes};
use crate::virtio::iovec;

/// A disk that its driver may write, over an image that stays unchanged.
///
/// Requests are carried out by the calling thread. What a flush has made durable survives any crash
/// of the process or its machine; what was written since may be lost in a crash, cluster by
/// cluster, as from a disk with a volatile cache. After [`Disk::settle`] or a drop the file is
/// complete, and other programs can open it.
#[derive(Debug)]
pub struct Qcow2Disk {
    base: File,
    base_len: u64,
    file: File,
    size: u64,
    pub(super) clusters: Clusters,
    pub(super) tables: Tables,
}

impl Qcow2Disk {
    /// Takes an image that is open for reading, and an overlay of it that is open for reading and
    /// writing and that has no other writer. The caller must pass the image that the overlay was
    /// created from. The whole mapping is read and checked: 64 KiB for each 512 MiB of the disk
    /// that something was written to.
    ///
    /// # Errors
    /// If the file is not an overlay, is damaged, or uses an unsupported feature.
    pub fn open(base: File, file: File) -> Result<Self, Qcow2Error> {
        let base_len = len(&base).map_err(Qcow2Error::io("find the size of the image"))?;
        Self::over(base, base_len, file)
    }

    /// As [`Self::open`], over the first `base_len` bytes of the image.
    pub(super) fn over(base: File, base_len: u64, file: File) -> Result<Self, Qcow2Error> {
        let read = Qcow2Error::io("read the overlay");
        let file_len = len(&file).map_err(&read)?;
        let first = file_len.min(CLUSTER);
        let mut cluster = vec![0; usize::try_from(first).unwrap_or(0)];
        file.read_exact_at(&mut cluster, 0).map_err(&read)?;
        let header = Header::parse(&cluster)?;
        // The record of used clusters grows with the file's length, including holes.
        if file_len.div_ceil(CLUSTER) > MAX_CLUSTERS {
            return Err(Qcow2Error::Damaged {
                what: "it is longer than its tables can say",
            });
        }
        let opened = Self::tables(&file, file_len, &header);
        let (clusters, tables) = opened.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => Qcow2Error::Damaged {
                what: "a cluster is used twice, not its own, or lies outside the file",
            },
            io::ErrorKind::UnexpectedEof => Qcow2Error::Damaged {
                what: "a table lies outside the file",
            },
            _ => read(error),
        })?;
        Ok(Self {
            base,
            base_len,
            file,
            size: header.size,
            clusters,
            tables,
        })
    }

    fn tables(file: &File, len: u64, header: &Header) -> io::Result<(Clusters, Tables)> {
        let mut clusters = Clusters::open(file, len, header)?;
        clusters.claim(0)?;
        clusters.claim(header.counts_offset)?;
        let l1_len = header.l1_entries.saturating_mul(8);
        for index in 0..l1_len.div_ceil(CLUSTER) {
            let within = index.saturating_mul(CLUSTER);
            clusters.claim(header.l1_offset.saturating_add(within))?;
        }
        let tables = Tables::open(file, header, &mut clusters)?;
        Ok((clusters, tables))
    }

    /// Returns where the bytes from `at` on are stored, and how many of at most `most` are
    /// contiguous there. Clusters in `fresh` count as mapped already.
    fn run(&mut self, at: u64, most: u64, fresh: &[Fresh]) -> io::Result<(Place, u64)> {
        let within = at % CLUSTER;
        let mut cluster = at / CLUSTER;
        let first = self.place_of(cluster, fresh)?;
        let mut run = CLUSTER.saturating_sub(within);
        while run < most {
            cluster = cluster.saturating_add(1);
            let next = match first {
                Place::File(start) => Place::File(start.saturating_add(within).saturating_add(run)),
                other => other,
            };
            if self.place_of(cluster, fresh)? != next {
                break;
            }
            run = run.saturating_add(CLUSTER);
        }
        let place = match first {
            Place::File(start) => Place::File(start.saturating_add(within)),
            other => other,
        };
        Ok((place, run.min(most)))
    }

    /// Where bytes of the disk are stored, and how many of them are contiguous there.
    #[cfg(test)]
    pub(super) fn run_at(&mut self, at: u64, most: u64) -> (Place, u64) {
        self.run(at, most, &[]).unwrap()
    }

    fn place_of(&mut self, cluster: u64, fresh: &[Fresh]) -> io::Result<Place> {
        match fresh.iter().find(|fresh| fresh.cluster == cluster) {
            Some(fresh) => Ok(Place::File(fresh.at)),
            None => self.place(cluster),
        }
    }

    fn place(&mut self, cluster: u64) -> io::Result<Place> {
        if self.tables.needs_room(cluster) {
            self.write_mapping(false)?;
        }
        let place = self.tables.place(&self.file, cluster)?;
        match place {
            // Its entry was checked when the file was opened, and no other process should write it.
            Place::File(at) if at / CLUSTER >= self.clusters.count() => {
                Err(super::damaged("a cluster lies outside the file"))
            }
            place => Ok(place),
        }
    }

    fn set(&mut self, cluster: u64, place: Place) -> io::Result<()> {
        if self.tables.needs_room(cluster) || self.clusters.is_behind() {
            self.write_mapping(false)?;
        }
        self.tables
            .set(&self.file, &mut self.clusters, cluster, place)
    }

    fn read(&mut self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        let mut cursor = Cursor::new(offset, slices);
        while cursor.left > 0 {
            let (place, mut run) = self.run(cursor.at, cursor.left, &[])?;
            match place {
                Place::File(from) => {
                    let part = cursor.take(run)?;
                    transfer(&part, from, |slices, skip, at| {
                        iovec::read_at(self.file.as_fd(), slices, skip, at)
                    })?;
                }
                Place::Base if cursor.at < self.base_len => {
                    run = run.min(self.base_len.saturating_sub(cursor.at));
                    let from = cursor.at;
                    let part = cursor.take(run)?;
                    transfer(&part, from, |slices, skip, at| {
                        iovec::read_at(self.base.as_fd(), slices, skip, at)
                    })?;
                }
                Place::Base | Place::Zeroes => {
                    for slice in cursor.take(run)? {
                        zero(&slice);
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes data first and the mapping after it: the file never points to a cluster that was not
    /// written.
    fn write(&mut self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        let mut cursor = Cursor::new(offset, slices);
        let fresh = self.reserve(offset, cursor.left)?;
        while cursor.left > 0 {
            let (place, run) = self.run(cursor.at, cursor.left, &fresh)?;
            let Place::File(to) = place else {
                return Err(super::damaged("a cluster that was reserved is gone"));
            };
            let part = cursor.take(run)?;
            transfer(&part, to, |slices, skip, at| {
                iovec::write_at(self.file.as_fd(), slices, skip, at)
            })?;
        }
        self.map(fresh)
    }

    /// Reserves a place in the file for each cluster of a range that will be written, and copies
    /// the bytes that the range does not cover into newly reserved ones. Places that are lost by an
    /// error are free again when the file is next opened.
    fn reserve(&mut self, offset: u64, len: u64) -> io::Result<Vec<Fresh>> {
        let end = offset.saturating_add(len);
        let mut fresh = Vec::new();
        let mut at = offset;
        while at < end {
            let cluster = at / CLUSTER;
            let start = cluster.saturating_mul(CLUSTER);
            let next = start.saturating_add(CLUSTER);
            let place = self.place(cluster)?;
            if !matches!(place, Place::File(_)) {
                let to = match self.tables.reserved(&self.file, cluster)? {
                    Some(to) => to,
                    None => self.clusters.allocate()?,
                };
                self.copy_up(place, start, at, to)?;
                self.copy_up(place, end.min(next), next, to)?;
                fresh.push(Fresh { cluster, at: to });
            }
            at = next;
        }
        Ok(fresh)
    }

    /// Maps clusters to the places that were reserved for them.
    fn map(&mut self, fresh: Vec<Fresh>) -> io::Result<()> {
        for Fresh { cluster, at } in fresh {
            self.set(cluster, Place::File(at))?;
        }
        Ok(())
    }

    /// Copies the bytes from `from` to `end` of the disk, which lie within one cluster and are not
    /// in the file yet, to that cluster of the file.
    fn copy_up(&self, place: Place, from: u64, end: u64, cluster: u64) -> io::Result<()> {
        let len = usize::try_from(end.saturating_sub(from)).unwrap_or(0);
        if len == 0 {
            return Ok(());
        }
        let mut bytes = vec![0; len];
        if place == Place::Base && from < self.base_len {
            let there = usize::try_from(self.base_len.saturating_sub(from)).unwrap_or(len);
            let (bytes, _) = bytes.split_at_mut(there.min(len));
            self.base.read_exact_at(bytes, from)?;
        }
        self.file
            .write_all_at(&bytes, cluster.saturating_add(from % CLUSTER))
    }

    /// Makes the range read as zeroes. `unmap`: whether the file's blocks may be given back.
    fn zero(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let end = offset.saturating_add(len);
        let mut at = offset;
        while at < end {
            let (place, run) = self.run(at, end.saturating_sub(at), &[])?;
            match place {
                Place::File(to) => write_zeroes(&self.file, to, run, unmap)?,
                Place::Zeroes => {}
                Place::Base => self.zero_base(at, run)?,
            }
            at = at.saturating_add(run);
        }
        Ok(())
    }

    /// As [`Self::zero`], for a range that is not in the file but in the base.
    fn zero_base(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len);
        let mut at = offset;
        while at < end {
            let cluster = at / CLUSTER;
            let start = cluster.saturating_mul(CLUSTER);
            let next = start.saturating_add(CLUSTER);
            // The disk's last cluster may be incomplete.
            if at == start && end >= next.min(self.size) {
                self.set(cluster, Place::Zeroes)?;
            } else {
                let len = end.min(next).saturating_sub(at);
                let fresh = self.reserve(at, len)?;
                if let (Place::File(to), _) = self.run(at, len, &fresh)? {
                    // Written, since the file may end here; it is less than a cluster.
                    let zeroes = vec![0; usize::try_from(len).unwrap_or(0)];
                    self.file.write_all_at(&zeroes, to)?;
                }
                self.map(fresh)?;
            }
            at = next;
        }
        Ok(())
    }

    /// Gives back the blocks that the file has of the range. What comes from the base is still
    /// visible.
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len);
        let mut at = offset;
        while at < end {
            let (place, run) = self.run(at, end.saturating_sub(at), &[])?;
            if let Place::File(to) = place {
                give_back(&self.file, to, run)?;
            }
            at = at.saturating_add(run);
        }
        Ok(())
    }

    /// Writes the part of the mapping that is only in memory: first what it points to, durably,
    /// then itself.
    fn write_mapping(&mut self, durable: bool) -> io::Result<()> {
        if self.tables.is_clean() {
            return if durable {
                self.file.sync_data()
            } else {
                Ok(())
            };
        }
        self.clusters.account(&self.file)?;
        self.tables.write_new(&self.file)?;
        self.file.sync_data()?;
        self.tables.link(&self.file)?;
        if durable {
            self.file.sync_data()
        } else {
            Ok(())
        }
    }
}

impl Disk for Qcow2Disk {
    fn len(&self) -> u64 {
        self.size
    }

    fn topology(&self) -> Topology {
        Topology {
            physical_block: PAGE,
            optimal: u32::try_from(CLUSTER).unwrap_or(0),
        }
    }

    /// Follows [`grow_overlay`](super::grow_overlay), which writes nothing that this one writes.
    fn refresh(&mut self) -> io::Result<()> {
        let mut first = vec![0; super::CLUSTER_LEN];
        self.file.read_exact_at(&mut first, 0)?;
        let header = Header::parse(&first).map_err(io::Error::other)?;
        if header.size > self.size {
            self.tables.grow(header.l1_entries);
            self.size = header.size;
        }
        Ok(())
    }

    fn submit(&mut self, _: &GuestRam, _token: u16, operation: Operation<'_, '_>) -> Submitted {
        Submitted::Done(match operation {
            Operation::Read { offset, slices } => self.read(offset, slices),
            Operation::Write { offset, slices } => self.write(offset, slices),
            Operation::Flush => self.write_mapping(true),
            Operation::Discard { offset, len } => self.discard(offset, len),
            Operation::WriteZeroes { offset, len, unmap } => self.zero(offset, len, unmap),
        })
    }

    fn settle(&mut self) -> io::Result<()> {
        self.write_mapping(false)
    }

    fn next_change(&mut self, from: u64) -> io::Result<Option<Range<u64>>> {
        let mut at = from;
        while at < self.size {
            let (place, run) = self.run(at, self.size.saturating_sub(at), &[])?;
            let end = at.saturating_add(run);
            if place != Place::Base {
                return Ok(Some(at..end));
            }
            at = end;
        }
        Ok(None)
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        if let Err(error) = self.write_mapping(false) {
            tracing::error!(
                %error,
                "overlay: failed to write its tables; the last writes are lost"
            );
        }
    }
}

/// A cluster of the disk with a reserved place in the file that the mapping does not point to yet.
struct Fresh {
    cluster: u64,
    at: u64,
}

fn zero(slice: &VolatileSlice<'_>) {
    const ZEROES: [u8; 4096] = [0; 4096];
    let mut rest = *slice;
    while !rest.is_empty() {
        rest.copy_from(&ZEROES);
        let done = rest.len().min(ZEROES.len());
        let Ok(next) = rest.offset(done) else { break };
        rest = next;
    }
}

/// Slices that are consumed from the front, and the position of their next byte on the disk.
struct Cursor<'s, 'm> {
    slices: &'s [VolatileSlice<'m>],
    /// Bytes of the first slice that are consumed.
    skip: usize,
    at: u64,
    left: u64,
}

impl<'s, 'm> Cursor<'s, 'm> {
    fn new(at: u64, slices: &'s [VolatileSlice<'m>]) -> Self {
        let lengths = slices.iter().map(|slice| slice.len() as u64);
        let left = lengths.fold(0, u64::saturating_add);
        Self {
            slices,
            skip: 0,
            at,
            left,
        }
    }

    /// Takes the next `len` bytes.
    fn take(&mut self, len: u64) -> io::Result<Vec<VolatileSlice<'m>>> {
        let mut part = Vec::new();
        let mut wanted = usize::try_from(len).unwrap_or(usize::MAX);
        while wanted > 0 {
            let Some((first, others)) = self.slices.split_first() else {
                break;
            };
            let there = first.len().saturating_sub(self.skip);
            let piece = there.min(wanted);
            part.push(first.subslice(self.skip, piece).map_err(io::Error::other)?);
            wanted = wanted.saturating_sub(piece);
            if piece == there {
                self.slices = others;
                self.skip = 0;
            } else {
                self.skip = self.skip.saturating_add(piece);
            }
        }
        self.at = self.at.saturating_add(len);
        self.left = self.left.saturating_sub(len);
        Ok(part)
    }
}
