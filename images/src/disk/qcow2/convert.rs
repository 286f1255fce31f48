//! Moves the clusters of a file to the disk.

use std::collections::BTreeMap;
use std::io::{self, Read};

use super::claims::Claims;
use super::clusters::{Place, Unpacker, l2_offset, place};
use super::header::{HEADER, Header};
use super::plan::{Packed, Plan};
use crate::disk::convert_error::{ConvertError, Qcow2Error};
use crate::disk::job::{Job, at_most, fill};
use crate::disk::sparse::SparseFile;

/// Kept parts of the file start after the disk at a multiple of this, which is a multiple of every
/// cluster size and block size.
const TAIL: u64 = 2 << 20;

/// Space is freed in ranges of at least this many bytes.
const PUNCH: u64 = 16 << 20;

/// Maximum number of planned runs of clusters, some 64 bytes each.
const PLANNED: usize = 1 << 20;

/// Reads a qcow2 file to its end and writes its disk; returns the size of the disk in bytes.
pub(in crate::disk) fn convert(
    input: &mut dyn Read,
    out: &mut SparseFile,
    job: &Job<'_>,
) -> Result<u64, ConvertError> {
    convert_with(input, out, job, Plan::new(PLANNED))
}

pub(super) fn convert_with(
    input: &mut dyn Read,
    out: &mut SparseFile,
    job: &Job<'_>,
    plan: Plan,
) -> Result<u64, ConvertError> {
    let mut head = [0; HEADER];
    let got = fill(input, &mut head)?;
    let header = Header::parse(&head, job.limits)?;
    let mut file = Conversion::new(header, out, job, plan)?;
    file.read(&head[..got], input)?;
    file.finish()
}

struct Conversion<'a> {
    header: Header,
    out: &'a mut SparseFile,
    job: &'a Job<'a>,
    /// Where in the output the kept parts of the file are.
    base: u64,
    /// Bytes of the file that have been read.
    position: u64,
    /// Up to here the file's content is in its place on the disk, kept or not needed.
    settled: u64,
    l1_known: bool,
    /// L2 tables still to come, by offset: their index in the L1 table.
    tables: BTreeMap<u64, u64>,
    /// Tables that the plan had no room for.
    later: Vec<(u64, u64)>,
    plan: Plan,
    claims: Claims,
    unpacker: Unpacker,
    /// Bytes of all clusters that were unpacked.
    unpacked: u64,
    /// The file from `recent_start` to `position`, while it contains compressed data that is not
    /// complete.
    recent: Vec<u8>,
    recent_start: u64,
    freed: Freed,
}

/// A range of the kept file that is no longer needed.
#[derive(Debug, Default)]
struct Freed {
    start: u64,
    end: u64,
}

impl<'a> Conversion<'a> {
    fn new(
        header: Header,
        out: &'a mut SparseFile,
        job: &'a Job<'a>,
        plan: Plan,
    ) -> Result<Self, Qcow2Error> {
        let mut claims = Claims::new(header.cluster_bits);
        claims.whole("header", 0)?;
        let l1_end = header.l1_offset.saturating_add(header.l1_entries * 8);
        let mut offset = header.l1_offset;
        while offset < l1_end {
            claims.whole("L1 table", offset)?;
            offset += header.cluster();
        }
        Ok(Self {
            base: header.size.next_multiple_of(TAIL),
            unpacker: Unpacker::new(&header),
            unpacked: 0,
            header,
            out,
            job,
            position: 0,
            settled: 0,
            l1_known: false,
            tables: BTreeMap::new(),
            later: Vec::new(),
            plan,
            claims,
            recent: Vec::new(),
            recent_start: 0,
            freed: Freed::default(),
        })
    }

    fn read(&mut self, head: &[u8], input: &mut dyn Read) -> Result<(), ConvertError> {
        // At most 2 MiB.
        let cluster = self.header.cluster() as usize;
        let mut buffer = vec![0; cluster];
        let mut have = head.len();
        buffer[..have].copy_from_slice(head);
        loop {
            have += fill(input, &mut buffer[have..])?;
            if have == 0 {
                return Ok(());
            }
            buffer[have..].fill(0);
            self.job.check_file_size(self.position + have as u64)?;
            self.cluster(&buffer, have as u64)?;
            if have < cluster {
                return Ok(());
            }
            have = 0;
        }
    }

    /// Takes the next cluster of the file, of which `length` bytes were read and the rest is zeros.
    fn cluster(&mut self, data: &[u8], length: u64) -> Result<(), ConvertError> {
        let offset = self.position;
        let end = offset + length;
        let packed = self.plan.first_packed().is_some_and(|start| start < end);
        if packed {
            if self.recent.is_empty() {
                self.recent_start = offset;
            }
            // Never more than three clusters: the longest compressed data and what was read with
            // its end.
            self.recent.extend_from_slice(&data[..length as usize]);
        }
        if let Some(guest) = self.plan.take(offset >> self.header.cluster_bits) {
            write_guest(self.out, &self.header, guest, data)?;
            self.settled = end;
        } else if !packed {
            self.keep(offset, data)?;
            self.settled = end;
        }
        self.position = end;
        self.unpack_complete(false)?;
        if !self.l1_known {
            if end >= self.l1_end() {
                self.l1_table()?;
            }
        } else if let Some(index) = self.tables.remove(&offset) {
            self.l2_table(index, offset, data, false)?;
        }
        Ok(())
    }

    /// Keeps a part of the file, if it may still be needed.
    fn keep(&mut self, offset: u64, data: &[u8]) -> Result<(), ConvertError> {
        match self.is_known() {
            true => Ok(()),
            false => self.out.keep(self.base + offset, data).to_write(),
        }
    }

    /// Keeps what was read before `end` and is not settled; all of that is in `recent`.
    fn keep_unsettled(&mut self, recent: &[u8], end: u64) -> Result<(), ConvertError> {
        if self.settled < end && !self.is_known() {
            let from = (self.settled.saturating_sub(self.recent_start)) as usize;
            let to = (end.saturating_sub(self.recent_start)) as usize;
            if let Some(data) = recent.get(from..to) {
                self.out.keep(self.base + self.settled, data).to_write()?;
            }
        }
        self.settled = self.settled.max(end);
        Ok(())
    }

    fn l1_end(&self) -> u64 {
        self.header
            .l1_offset
            .saturating_add(self.header.l1_entries * 8)
    }

    /// Returns whether everything of the disk is either in its place or planned: no other data is
    /// needed.
    fn is_known(&self) -> bool {
        self.l1_known && self.tables.is_empty() && self.later.is_empty()
    }

    /// Reads the L1 table, and the L2 tables that were before it.
    fn l1_table(&mut self) -> Result<(), ConvertError> {
        self.l1_known = true;
        // At most 8 MiB.
        let mut bytes = vec![0; self.header.l1_entries as usize * 8];
        self.out
            .read(self.base + self.header.l1_offset, &mut bytes)
            .to_write()?;
        let mut here = Vec::new();
        for (index, entry) in (0..).zip(entries(&bytes)) {
            if let Some(offset) = l2_offset(entry, &self.header)? {
                self.claims.whole("L2 table", offset)?;
                if offset < self.position {
                    here.push((index, offset));
                } else {
                    self.tables.insert(offset, index);
                }
            }
        }
        for (index, offset) in here {
            self.kept_l2_table(index, offset, false)?;
        }
        Ok(())
    }

    fn kept_l2_table(&mut self, index: u64, offset: u64, last: bool) -> Result<(), ConvertError> {
        self.job.check_cancelled()?;
        // At most 2 MiB.
        let mut bytes = vec![0; self.header.cluster() as usize];
        self.out.read(self.base + offset, &mut bytes).to_write()?;
        self.l2_table(index, offset, &bytes, last)
    }

    /// Places clusters of a table that were read, and plans for those that were not.
    fn l2_table(
        &mut self,
        index: u64,
        offset: u64,
        bytes: &[u8],
        last: bool,
    ) -> Result<(), ConvertError> {
        let used = entries(bytes).filter(|entry| *entry != 0).count();
        if !last && !self.plan.has_room(used) {
            self.later.push((index, offset));
            return Ok(());
        }
        let first = index * self.header.l2_entries();
        let end = self.header.size.div_ceil(self.header.cluster());
        for (guest, entry) in (first..end).zip(entries(bytes)) {
            match place(entry, guest, &self.header)? {
                Place::Zero => {}
                Place::Whole(host) => {
                    self.claims.whole("cluster", host)?;
                    if host < self.position {
                        self.place_kept(host, guest)?;
                    } else {
                        self.plan.expect(host >> self.header.cluster_bits, guest);
                    }
                }
                Place::Packed(packed) => {
                    self.claims.compressed(packed.start)?;
                    if packed.end <= self.position || last && packed.start < self.position {
                        self.unpack_kept(packed)?;
                    } else {
                        self.expect_packed(packed)?;
                    }
                }
            }
        }
        self.punch_freed()
    }

    /// Moves a cluster from where it was kept to its final place.
    fn place_kept(&mut self, host: u64, guest: u64) -> Result<(), ConvertError> {
        // At most 2 MiB.
        let mut data = vec![0; self.header.cluster() as usize];
        self.out.read(self.base + host, &mut data).to_write()?;
        write_guest(self.out, &self.header, guest, &data)?;
        if self.freed.end != host {
            self.punch_freed()?;
            self.freed.start = host;
        }
        self.freed.end = host + self.header.cluster();
        if self.freed.end - self.freed.start >= PUNCH {
            self.punch_freed()?;
        }
        Ok(())
    }

    fn punch_freed(&mut self) -> Result<(), ConvertError> {
        let Freed { start, end } = std::mem::take(&mut self.freed);
        if start < end {
            self.out.punch(self.base + start, end - start).to_write()?;
        }
        Ok(())
    }

    fn expect_packed(&mut self, packed: Packed) -> Result<(), ConvertError> {
        // The part that was read is kept, and moves to where the rest will be.
        if packed.start < self.position {
            let known = match self.recent.is_empty() {
                true => self.position,
                false => self.recent_start,
            };
            if packed.start < known {
                // Compressed data is at most two clusters long.
                let mut recent = vec![0; (known - packed.start) as usize];
                self.out
                    .read(self.base + packed.start, &mut recent)
                    .to_write()?;
                recent.append(&mut self.recent);
                self.recent = recent;
                self.recent_start = packed.start;
            }
        }
        self.plan.expect_packed(packed);
        Ok(())
    }

    fn unpack_kept(&mut self, packed: Packed) -> Result<(), ConvertError> {
        let end = packed.end.min(self.position);
        // At most two clusters.
        let mut data = vec![0; (end - packed.start) as usize];
        self.out
            .read(self.base + packed.start, &mut data)
            .to_write()?;
        self.unpack(packed, &data).map(drop)
    }

    /// Decompresses planned data that is complete; at the end of the file, all of it.
    fn unpack_complete(&mut self, all: bool) -> Result<(), ConvertError> {
        let recent = std::mem::take(&mut self.recent);
        for packed in self.plan.take_packed(self.position, all) {
            let broken = Qcow2Error::Compressed {
                offset: packed.start,
            };
            let end = packed.end.min(self.position);
            let data = packed
                .start
                .checked_sub(self.recent_start)
                .zip(end.checked_sub(self.recent_start))
                .and_then(|(start, end)| recent.get(start as usize..end as usize))
                .ok_or(broken)?;
            let used = self.unpack(packed, data)?;
            // Between two clusters may be a third one, of a table that is still to come.
            self.keep_unsettled(&recent, packed.start)?;
            self.settled = self.settled.max(packed.start + used);
        }
        let needed = self.plan.first_packed().unwrap_or(u64::MAX);
        if !recent.is_empty() {
            self.keep_unsettled(&recent, needed.min(self.position))?;
        }
        self.recent = recent;
        if needed >= self.position {
            self.recent.clear();
        } else if needed > self.recent_start {
            self.recent.drain(..(needed - self.recent_start) as usize);
            self.recent_start = needed;
        }
        Ok(())
    }

    /// Writes the cluster that `data` starts with; returns how many bytes of it that took, or
    /// slightly fewer.
    fn unpack(&mut self, packed: Packed, data: &[u8]) -> Result<u64, ConvertError> {
        let broken = Qcow2Error::Compressed {
            offset: packed.start,
        };
        self.job.check_cancelled()?;
        self.unpacked = self.unpacked.saturating_add(self.header.cluster());
        let limits = self.job.limits;
        let allowed = self.position.saturating_mul(limits.disk_unpacked_ratio);
        let allowed = allowed.saturating_add(limits.disk_unpacked_bytes);
        at_most("decompressed clusters", self.unpacked, allowed)?;
        let (cluster, used) = self.unpacker.unpack(data).ok_or(broken)?;
        write_guest(self.out, &self.header, packed.guest, cluster)?;
        Ok(used)
    }

    /// Ends the conversion at the end of the file: places everything that had to wait for it.
    fn finish(mut self) -> Result<u64, ConvertError> {
        let past_end = |what, offset| ConvertError::from(Qcow2Error::PastEnd { what, offset });
        if !self.l1_known {
            return Err(past_end("L1 table", self.header.l1_offset));
        }
        if let Some((offset, _)) = self.tables.first_key_value() {
            return Err(past_end("L2 table", *offset));
        }
        self.unpack_complete(true)?;
        for (index, offset) in std::mem::take(&mut self.later) {
            self.kept_l2_table(index, offset, true)?;
        }
        match self.plan.first(self.header.cluster_bits) {
            Some(offset) => Err(past_end("cluster", offset)),
            None => Ok(self.header.size),
        }
    }
}

/// Writes a cluster of the disk; the last one may be shorter.
fn write_guest(
    out: &mut SparseFile,
    header: &Header,
    guest: u64,
    data: &[u8],
) -> Result<(), ConvertError> {
    let start = guest << header.cluster_bits;
    let length = header.size.saturating_sub(start).min(data.len() as u64);
    out.write(start, &data[..length as usize])
}

fn entries(table: &[u8]) -> impl Iterator<Item = u64> {
    let (entries, _) = table.as_chunks::<8>();
    entries.iter().map(|entry| u64::from_be_bytes(*entry))
}

/// Marks errors as errors of the output.
trait ToWrite<T> {
    fn to_write(self) -> Result<T, ConvertError>;
}

impl<T> ToWrite<T> for io::Result<T> {
    fn to_write(self) -> Result<T, ConvertError> {
        self.map_err(ConvertError::Write)
    }
}
