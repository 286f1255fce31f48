//! Writes entries of a tar: ustar, with POSIX.1-2001 records for what does not fit.

use std::io::{self, Write};

use tar::{EntryType, Header};

/// Bytes of a header, and the unit of padding.
const RECORD: u64 = 512;
/// Bytes that the header has for a name.
const NAME: usize = 100;
/// Seconds that fit the header's 11 octal digits.
const TIME: i64 = 1 << 33;

/// An entry without its data.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) kind: EntryType,
    /// Relative; a directory's ends with a slash.
    pub(super) path: &'a [u8],
    /// Target of a symbolic or hard link.
    pub(super) link: &'a [u8],
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: (i64, u32),
    /// Major and minor number.
    pub(super) device: (u32, u32),
    /// Length of a file.
    pub(super) size: u64,
    pub(super) xattrs: &'a [(Vec<u8>, Vec<u8>)],
    /// Ranges that have data, if there are holes.
    pub(super) sparse: Option<&'a [(u64, u64)]>,
}

impl Entry<'_> {
    /// Writes everything that precedes the data. The returned number of bytes of data has to
    /// follow, and then [`pad`].
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<u64> {
        let map = self.sparse.map(map);
        let data = match self.sparse {
            Some(ranges) => ranges.iter().map(|(_, length)| length).sum(),
            None => self.size,
        };
        let records = self.records();
        if !records.is_empty() {
            let mut header = Header::new_ustar();
            header.set_entry_type(EntryType::XHeader);
            header.set_size(records.len() as u64);
            set_name(&mut header, b"pax");
            header.set_mode(0o644);
            header.set_cksum();
            out.write_all(header.as_bytes())?;
            out.write_all(&records)?;
            pad(out, records.len() as u64)?;
        }
        let mut header = Header::new_ustar();
        header.set_entry_type(self.kind);
        set_name(&mut header, self.path);
        if let Some(ustar) = header.as_ustar_mut() {
            let cut = &self.link[..self.link.len().min(NAME)];
            ustar.linkname[..cut.len()].copy_from_slice(cut);
        }
        header.set_mode(self.mode);
        header.set_uid(self.uid.into());
        header.set_gid(self.gid.into());
        header.set_mtime(self.mtime.0.clamp(0, TIME - 1).unsigned_abs());
        header.set_device_major(self.device.0)?;
        header.set_device_minor(self.device.1)?;
        header.set_size(data + map.as_ref().map_or(0, |map| map.len() as u64));
        header.set_cksum();
        out.write_all(header.as_bytes())?;
        out.write_all(map.as_deref().unwrap_or_default())?;
        Ok(data)
    }

    fn records(&self) -> Vec<u8> {
        let mut records = Vec::new();
        if self.path.len() > NAME {
            record(&mut records, b"path", self.path);
        }
        if self.link.len() > NAME {
            record(&mut records, b"linkpath", self.link);
        }
        if self.mtime.1 != 0 || !(0..TIME).contains(&self.mtime.0) {
            record(&mut records, b"mtime", time(self.mtime).as_bytes());
        }
        if self.sparse.is_some() {
            record(&mut records, b"GNU.sparse.major", b"1");
            record(&mut records, b"GNU.sparse.minor", b"0");
            record(&mut records, b"GNU.sparse.name", self.path);
            let size = self.size.to_string();
            record(&mut records, b"GNU.sparse.realsize", size.as_bytes());
        }
        for (name, value) in self.xattrs {
            let key = [b"SCHILY.xattr.", name.as_slice()].concat();
            record(&mut records, &key, value);
        }
        records
    }
}

/// Writes the end of an archive.
pub(super) fn finish(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * RECORD as usize])
}

/// Pads the last record of `size` bytes of data.
pub(super) fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    let rest = size.wrapping_neg() % RECORD;
    out.write_all(&[0; RECORD as usize][..rest as usize])
}

fn set_name(header: &mut Header, name: &[u8]) {
    if let Some(ustar) = header.as_ustar_mut() {
        let cut = &name[..name.len().min(NAME)];
        ustar.name[..cut.len()].copy_from_slice(cut);
    }
}

/// Adds `LENGTH KEY=VALUE\n`, where LENGTH counts all of it.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + digits(rest);
    if digits(length) > digits(rest) {
        length = rest + digits(length);
    }
    records.extend(length.to_string().bytes());
    records.push(b' ');
    records.extend(key);
    records.push(b'=');
    records.extend(value);
    records.push(b'\n');
}

fn digits(number: usize) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}

/// Formats seconds with a fraction.
fn time((seconds, nanos): (i64, u32)) -> String {
    match (seconds < 0, nanos) {
        (_, 0) => seconds.to_string(),
        (false, nanos) => format!("{seconds}.{nanos:09}"),
        // The nanoseconds count upwards, but the text counts away from zero.
        (true, nanos) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
    }
}

/// Encodes GNU tar's map of a sparse file, format 1.0: decimal lines, padded.
fn map(ranges: &[(u64, u64)]) -> Vec<u8> {
    use std::fmt::Write as _;
    let mut text = format!("{}\n", ranges.len());
    for (offset, length) in ranges {
        let _ = write!(text, "{offset}\n{length}\n");
    }
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(RECORD as usize), 0);
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::layer::{EntryKind, TarReader};

    fn name() -> impl Strategy<Value = Vec<u8>> {
        let bytes = prop::collection::vec(1..=255u8, 1..400);
        bytes.prop_map(|mut bytes| {
            // A trailing slash would make it a directory.
            bytes.push(b'x');
            bytes
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            path in name(),
            link in prop::option::of(name()),
            mode in 0..0o10000u32,
            owner in any::<(u32, u32)>(),
            mtime in (-(1i64 << 62)..1 << 62, 0..1_000_000_000u32),
            xattrs in prop::collection::btree_map("user\\.[a-z]{1,90}", prop::collection::vec(any::<u8>(), 0..1200), 0..3),
            gaps in prop::option::of(prop::collection::vec((1..5000u64, 1..3000u64), 0..40)),
        ) {
            let xattrs: Vec<_> = xattrs.into_iter().map(|(name, value)| (name.into_bytes(), value)).collect();
            let mut at = 0;
            let ranges = gaps.map(|gaps| {
                let mut ranges: Vec<_> = gaps.into_iter().map(|(gap, length)| {
                    at += gap + length;
                    (at - length, length)
                }).collect();
                at += 1000;
                ranges.push((at, 0));
                ranges
            });
            let ranges = ranges.filter(|_| link.is_none());
            let entry = Entry {
                kind: if link.is_some() { EntryType::Symlink } else { EntryType::Regular },
                path: &path,
                link: link.as_deref().unwrap_or_default(),
                mode,
                uid: owner.0,
                gid: owner.1,
                mtime,
                device: (0, 0),
                size: if ranges.is_some() { at } else { 0 },
                xattrs: &xattrs,
                sparse: ranges.as_deref(),
            };
            let mut tar = Vec::new();
            let data = entry.write(&mut tar).unwrap();
            tar.extend(vec![7; data as usize]);
            pad(&mut tar, data).unwrap();
            finish(&mut tar).unwrap();
            prop_assert_eq!(tar.len() % 512, 0);
            let mut reader = TarReader::new(tar.as_slice());
            let read = reader.next_entry().unwrap().unwrap();
            let kind = if link.is_some() { EntryKind::Symlink } else { EntryKind::File };
            prop_assert_eq!(read.kind, kind);
            prop_assert_eq!(&read.path, &path);
            prop_assert_eq!(read.link, entry.link);
            prop_assert_eq!(u32::from(read.mode), mode);
            prop_assert_eq!((read.uid, read.gid), (owner.0.into(), owner.1.into()));
            prop_assert_eq!(read.mtime, mtime);
            prop_assert_eq!(read.size, entry.size);
            let read: Vec<_> = read.xattrs.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
            prop_assert_eq!(read, xattrs);
            prop_assert!(reader.next_entry().unwrap().is_none());
        }
    }
}
