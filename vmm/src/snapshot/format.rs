//! The state file: a header and records, each with its own checksum. docs/snapshot.md has the
//! layout.
//!
//! Input is not trusted: no length is used before the bytes are known to exist, and a file is
//! either understood completely or refused.

use std::ops::RangeInclusive;

use zerocopy::{FromBytes, Immutable, IntoBytes};

pub(super) const MAGIC: [u8; 8] = *b"PODVSNAP";
/// Incremented if the layout of header or records changes.
const FORMAT: u32 = 1;
pub(super) const HEADER_LEN: usize = 28;
const RECORD_HEADER_LEN: usize = 16;

/// The maximum size of a state file: 254 vCPUs take 2 MiB.
pub(super) const MAX_LEN: u64 = 64 << 20;

/// More than the vCPUs, devices and queues that a machine can have. Each record is compared with
/// all previous ones.
const MAX_RECORDS: u32 = 4096;

/// The maximum length of an id: devices have short names.
const MAX_ID_LEN: u16 = 64;

/// The subject of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub(crate) enum RecordKind {
    /// vCPUs, memory, identity.
    Machine = 1,
    /// The content of the memory file.
    Memory = 2,
    /// One vCPU.
    Vcpu = 3,
    /// Interrupt controllers, timer, clock.
    Chips = 4,
    /// A device's registers on MMIO, and its rings.
    Transport = 5,
    /// A device's own state.
    Device = 6,
    /// The PCI bus.
    Pci = 7,
    /// A device's registers on PCI, and its rings.
    Function = 8,
    /// The pages that a clone writes first.
    WorkingSet = 9,
}

impl RecordKind {
    const ALL: [Self; 9] = [
        Self::Machine,
        Self::Memory,
        Self::Vcpu,
        Self::Chips,
        Self::Transport,
        Self::Device,
        Self::Pci,
        Self::Function,
        Self::WorkingSet,
    ];

    fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == number)
    }
}

/// One part of the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: RecordKind,
    /// Which one of its kind: a device's name, or a vCPU's number.
    pub(crate) id: String,
    /// The version of the layout of `bytes`.
    pub(crate) version: u32,
    pub(crate) bytes: Vec<u8>,
}

/// Why a state file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotFormatError {
    /// The magic number is missing.
    #[error("it is not a snapshot's state file")]
    NotAState,
    /// Written by another version of this library.
    #[error("it has format {found}, this version reads format {FORMAT}")]
    Format {
        /// The version in the file.
        found: u32,
    },
    /// The file is too short or too long.
    #[error("it has the wrong length: {len} bytes")]
    Length {
        /// Its length.
        len: u64,
    },
    /// The file is damaged.
    #[error("the checksum of {what} is wrong")]
    Checksum {
        /// Which part.
        what: String,
    },
    /// A record of a kind that this version of the library does not know.
    #[error(
        "record {number}, named {id:?}, is of the unknown kind {kind}: a newer version wrote it"
    )]
    UnknownKind {
        /// Its position in the file.
        number: u32,
        /// Its name.
        id: String,
        /// Its kind.
        kind: u16,
    },
    /// A record of a version that this version of the library cannot read.
    #[error("{what} has version {found}, this version reads {oldest} to {newest}")]
    Version {
        /// Which part.
        what: String,
        /// The version in the file.
        found: u32,
        /// The oldest that can be read.
        oldest: u32,
        /// The newest that can be read.
        newest: u32,
    },
    /// Inconsistent, though the checksum is right.
    #[error("{what} is invalid: {why}")]
    Invalid {
        /// Which part.
        what: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// Encodes these records as a state file.
pub(crate) fn encode(records: &[Record]) -> Vec<u8> {
    let mut body = Vec::new();
    for record in records {
        let mut header = Writer::default();
        header.u16(record.kind as u16);
        header.u16(u16::try_from(record.id.len()).unwrap_or(u16::MAX));
        header.u32(record.version);
        header.u32(u32::try_from(record.bytes.len()).unwrap_or(u32::MAX));
        let header = header.finish();
        let sum = checksum(&[&header, record.id.as_bytes(), &record.bytes]);
        body.extend(header);
        body.extend(sum.to_le_bytes());
        body.extend(record.id.as_bytes());
        body.extend(&record.bytes);
    }
    let mut file = Writer::default();
    file.raw(&MAGIC);
    file.u32(FORMAT);
    file.u32(u32::try_from(records.len()).unwrap_or(u32::MAX));
    file.u64((HEADER_LEN + body.len()) as u64);
    let mut file = file.finish();
    file.extend(checksum(&[&file]).to_le_bytes());
    file.extend(body);
    file
}

/// Decodes the records of a state file.
///
/// # Errors
/// See [`SnapshotFormatError`].
pub(crate) fn decode(file: &[u8]) -> Result<Vec<Record>, SnapshotFormatError> {
    let len = file.len() as u64;
    let truncated = |_| SnapshotFormatError::Length { len };
    let mut reader = Reader::new(file);
    if reader.raw(8).map_err(truncated)? != MAGIC {
        return Err(SnapshotFormatError::NotAState);
    }
    let found = reader.u32().map_err(truncated)?;
    if found != FORMAT {
        return Err(SnapshotFormatError::Format { found });
    }
    let count = reader.u32().map_err(truncated)?;
    let stated = reader.u64().map_err(truncated)?;
    let sum = reader.u32().map_err(truncated)?;
    if sum != checksum(&[&file[..HEADER_LEN - 4]]) {
        return Err(SnapshotFormatError::Checksum {
            what: "the header".to_owned(),
        });
    }
    if stated != len {
        return Err(SnapshotFormatError::Length { len });
    }
    if count > MAX_RECORDS {
        return Err(SnapshotFormatError::Invalid {
            what: "the header".to_owned(),
            why: "no machine has so many records",
        });
    }
    let mut records: Vec<Record> = Vec::new();
    for number in 0..count {
        let what = || format!("record {number}");
        let start = reader.rest();
        let kind = reader.u16().map_err(truncated)?;
        let id_len = reader.u16().map_err(truncated)?;
        let version = reader.u32().map_err(truncated)?;
        let bytes_len = reader.u32().map_err(truncated)?;
        let sum = reader.u32().map_err(truncated)?;
        if id_len > MAX_ID_LEN {
            return Err(SnapshotFormatError::Invalid {
                what: what(),
                why: "no record has so long an id",
            });
        }
        let id = reader.raw(usize::from(id_len)).map_err(truncated)?;
        let bytes_len = usize::try_from(bytes_len).unwrap_or(usize::MAX);
        let bytes = reader.raw(bytes_len).map_err(truncated)?;
        if sum != checksum(&[&start[..RECORD_HEADER_LEN - 4], id, bytes]) {
            return Err(SnapshotFormatError::Checksum { what: what() });
        }
        let id = std::str::from_utf8(id).map_err(|_| SnapshotFormatError::Invalid {
            what: what(),
            why: "its id is no text",
        })?;
        let unknown = || SnapshotFormatError::UnknownKind {
            number,
            id: id.escape_debug().to_string(),
            kind,
        };
        let record = Record {
            kind: RecordKind::from_number(kind).ok_or_else(unknown)?,
            id: id.to_owned(),
            version,
            bytes: bytes.to_vec(),
        };
        if records
            .iter()
            .any(|r| (r.kind, &r.id) == (record.kind, &record.id))
        {
            return Err(SnapshotFormatError::Invalid {
                what: what(),
                why: "it is there twice",
            });
        }
        records.push(record);
    }
    reader.end().map_err(truncated)?;
    Ok(records)
}

fn checksum(parts: &[&[u8]]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize()
}

impl Record {
    /// Returns what errors call it.
    pub(crate) fn name(&self) -> String {
        format!("the record {:?} {}", self.kind, self.id)
    }

    /// Parses the record with `parse`, which must consume all of it. A record of any of `versions`
    /// can be read, and the newest is what is written: `parse` gets the record's, gives fields that
    /// came later the value that says the same, and drops those that are no more.
    pub(crate) fn parse<T>(
        &self,
        versions: RangeInclusive<u32>,
        parse: impl FnOnce(&mut Reader<'_>, u32) -> Result<T, &'static str>,
    ) -> Result<T, SnapshotFormatError> {
        let what = || self.name();
        if !versions.contains(&self.version) {
            return Err(SnapshotFormatError::Version {
                what: what(),
                found: self.version,
                oldest: *versions.start(),
                newest: *versions.end(),
            });
        }
        let mut reader = Reader::new(&self.bytes);
        parse(&mut reader, self.version)
            .and_then(|value| reader.end().map(|()| value))
            .map_err(|why| SnapshotFormatError::Invalid { what: what(), why })
    }
}

/// Writes numbers in little-endian order.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }
    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    /// Bytes whose number the reader knows.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }
    /// Bytes, after their number.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.raw(bytes);
    }
    /// A structure of the kernel's interface, whose layout never changes.
    pub(crate) fn abi<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.raw(value.as_bytes());
    }
    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads what a [`Writer`] wrote, or arbitrary bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn raw(&mut self, len: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or("it ends too early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let bytes = self.raw(N)?;
        bytes.try_into().map_err(|_| "it ends too early")
    }

    pub(crate) fn u8(&mut self) -> Result<u8, &'static str> {
        self.array().map(u8::from_le_bytes)
    }
    pub(crate) fn u16(&mut self) -> Result<u16, &'static str> {
        self.array().map(u16::from_le_bytes)
    }
    pub(crate) fn u32(&mut self) -> Result<u32, &'static str> {
        self.array().map(u32::from_le_bytes)
    }
    pub(crate) fn u64(&mut self) -> Result<u64, &'static str> {
        self.array().map(u64::from_le_bytes)
    }

    /// 0 or 1.
    pub(crate) fn bool(&mut self) -> Result<bool, &'static str> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err("a flag that is neither 0 nor 1"),
        }
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], &'static str> {
        let len = self.u32()?;
        self.raw(usize::try_from(len).unwrap_or(usize::MAX))
    }

    pub(crate) fn abi<T: FromBytes>(&mut self) -> Result<T, &'static str> {
        let bytes = self.raw(size_of::<T>())?;
        T::read_from_bytes(bytes).map_err(|_| "it ends too early")
    }

    /// Reads a count and as many elements, each by `each`.
    pub(crate) fn list<T>(
        &mut self,
        each: impl FnMut(&mut Self) -> Result<T, &'static str>,
    ) -> Result<Vec<T>, &'static str> {
        self.short_list(usize::MAX, each)
    }

    /// As [`Self::list`], with at most `most` elements.
    pub(crate) fn short_list<T>(
        &mut self,
        most: usize,
        mut each: impl FnMut(&mut Self) -> Result<T, &'static str>,
    ) -> Result<Vec<T>, &'static str> {
        let count = self.u32()?;
        if usize::try_from(count).unwrap_or(usize::MAX) > most {
            return Err("a list of more than there can be");
        }
        // The count is not trusted: the list grows as it is read.
        (0..count).map(|_| each(self)).collect()
    }

    /// Fails if bytes are left.
    fn end(&self) -> Result<(), &'static str> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err("it goes on too long")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records() -> Vec<Record> {
        let record = |kind, id: &str, version, len: usize| Record {
            kind,
            id: id.to_owned(),
            version,
            bytes: (0..len).map(|n| n as u8).collect(),
        };
        vec![
            record(RecordKind::Machine, "", 1, 40),
            record(RecordKind::Vcpu, "0", 1, 300),
            record(RecordKind::Vcpu, "1", 2, 0),
            record(RecordKind::Device, "blk0", 1, 5),
        ]
    }

    #[test]
    fn records_come_back() {
        assert_eq!(decode(&encode(&records())).unwrap(), records());
        assert_eq!(decode(&encode(&[])).unwrap(), []);
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_noticed() {
        let file = encode(&records());
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut damaged = file.clone();
                damaged[at] ^= 1 << bit;
                assert!(decode(&damaged).is_err(), "byte {at} bit {bit}");
            }
            assert!(decode(&file[..at]).is_err(), "{at} bytes");
        }
        let mut longer = file;
        longer.push(0);
        assert!(decode(&longer).is_err());
    }

    #[test]
    fn a_file_of_many_small_records_is_refused_before_they_are_looked_at() {
        let record = |number: u32| Record {
            id: number.to_string(),
            ..records()[0].clone()
        };
        let most: Vec<Record> = (0..MAX_RECORDS).map(record).collect();
        assert_eq!(decode(&encode(&most)).unwrap().len(), most.len());
        let more: Vec<Record> = (0..=MAX_RECORDS).map(record).collect();
        let error = decode(&encode(&more)).unwrap_err();
        assert!(error.to_string().contains("so many"), "{error}");
    }

    #[test]
    fn an_id_that_no_record_has_is_refused() {
        let decoded = |len| {
            let mut record = records()[3].clone();
            record.id = "x".repeat(len);
            decode(&encode(&[record]))
        };
        assert_eq!(decoded(64).unwrap().len(), 1);
        let error = decoded(65).unwrap_err();
        assert!(error.to_string().contains("so long an id"), "{error}");
    }

    #[test]
    fn a_record_is_there_once() {
        let mut twice = records();
        twice.push(twice[1].clone());
        let error = decode(&encode(&twice)).unwrap_err();
        assert!(
            matches!(error, SnapshotFormatError::Invalid { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_record_of_an_older_version_is_read_as_such_and_of_a_newer_one_is_refused() {
        let record = Record {
            version: 2,
            ..records()[3].clone()
        };
        let take = |count| move |reader: &mut Reader<'_>, _| reader.raw(count).map(|_| ());
        let version = |_: &mut Reader<'_>, version| Ok(version);
        let empty = Record {
            bytes: Vec::new(),
            ..record.clone()
        };
        for readable in [2..=2, 1..=3, 2..=9] {
            assert_eq!(empty.parse(readable, version).unwrap(), 2);
        }
        for readable in [1..=1, 3..=9] {
            let error = record.parse(readable, take(5)).unwrap_err();
            assert!(
                matches!(error, SnapshotFormatError::Version { found: 2, .. }),
                "{error}"
            );
            assert!(error.to_string().contains("blk0"), "{error}");
        }
        let error = record.parse(1..=2, take(4)).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        let error = record.parse(1..=2, take(6)).unwrap_err();
        assert!(error.to_string().contains("too early"), "{error}");
    }

    #[test]
    fn a_record_of_an_unknown_kind_is_refused_by_its_name() {
        let mut file = encode(&records()[3..]);
        file[HEADER_LEN] = 200;
        let bytes = file[HEADER_LEN..].to_vec();
        let (header, rest) = bytes.split_at(RECORD_HEADER_LEN);
        let sum = checksum(&[&header[..RECORD_HEADER_LEN - 4], rest]);
        let at = HEADER_LEN + RECORD_HEADER_LEN - 4;
        file[at..at + 4].copy_from_slice(&sum.to_le_bytes());
        let error = decode(&file).unwrap_err();
        let SnapshotFormatError::UnknownKind { kind: 200, id, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(id, "blk0");
    }

    proptest! {
        #[test]
        fn nothing_that_is_read_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            let mut reader = Reader::new(&bytes);
            let _ = reader.list(|r| r.bytes().map(<[u8]>::len));
            let _ = (reader.bool(), reader.u64());
        }
    }
}
