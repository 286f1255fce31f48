//! Reads tar streams: ustar, GNU and PAX, with limits on all lengths.
//!
//! An entry's data is read with [`TarReader::read_data`] or left; the next entry skips the rest of
//! it.

use std::collections::BTreeMap;
use std::io::{self, Read};

use super::error::{MAX_EXTENDED_HEADERS, TarError};
use super::header::{Header, RECORD};
use super::pax::Pax;
use super::sparse::{MapInData, SparseMap};

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    File,
    Dir,
    Symlink,
    Hardlink,
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
    /// A type that images do not contain.
    Unknown(u8),
}

/// An entry without its data.
#[derive(Clone, Debug)]
pub(crate) struct TarEntry {
    pub(crate) kind: EntryKind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u16,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: (i64, u32),
    /// Length of the file, holes included.
    pub(crate) size: u64,
    pub(crate) xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

/// A piece of a file's data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FilePiece {
    /// This many bytes are in the buffer.
    Data(usize),
    /// This many zeros.
    Hole(u64),
}

/// Reads the entries of a tar stream.
#[derive(Debug)]
pub(crate) struct TarReader<R> {
    input: R,
    /// Bytes of the entry's data that are still in the stream.
    stored: u64,
    padding: u64,
    /// Position in the file whose data is read, holes included, and its length.
    at: u64,
    size: u64,
    map: std::vec::IntoIter<(u64, u64)>,
    range: (u64, u64),
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self {
            input,
            stored: 0,
            padding: 0,
            at: 0,
            size: 0,
            map: Vec::new().into_iter(),
            range: (0, 0),
        }
    }

    /// Returns the next entry; `None` at the end of the archive.
    pub(crate) fn next_entry(&mut self) -> Result<Option<TarEntry>, TarError> {
        self.skip_rest()?;
        let mut pax = Pax::default();
        let (mut long_name, mut long_link) = (None, None);
        let mut extended = 0;
        loop {
            let Some(header) = self.read_header()? else {
                return Ok(None);
            };
            let size = header.size()?;
            let target = match header.typeflag() {
                b'x' | b'g' | b'L' | b'K' => header.typeflag(),
                _ => return self.entry(&header, pax, long_name, long_link).map(Some),
            };
            extended += size.saturating_add(RECORD as u64);
            if size > MAX_EXTENDED_HEADERS || extended > MAX_EXTENDED_HEADERS {
                return Err(TarError::ExtendedTooLong);
            }
            let mut bytes = vec![0; size as usize];
            self.read_exact(&mut bytes)?;
            self.padding = padding(size);
            self.skip_rest()?;
            match target {
                b'x' => pax.parse(&bytes)?,
                // A global header's defaults: none of them concerns an image.
                b'g' => {}
                b'L' => long_name = Some(super::header::until_nul(&bytes).to_vec()),
                _ => long_link = Some(super::header::until_nul(&bytes).to_vec()),
            }
        }
    }

    /// Returns the next piece of the entry's data, at most as long as `buffer`; `None` at its end.
    pub(crate) fn read_data(&mut self, buffer: &mut [u8]) -> Result<Option<FilePiece>, TarError> {
        if self.range.1 == 0 {
            if self.at == self.size {
                return Ok(None);
            }
            self.range = self.map.next().unwrap_or((self.size, 0));
        }
        let (offset, length) = self.range;
        if offset > self.at {
            let hole = offset - self.at;
            self.at = offset;
            return Ok(Some(FilePiece::Hole(hole)));
        }
        if length == 0 {
            // GNU tar ends a map with an empty range at the file's end.
            return Ok(Some(FilePiece::Hole(0)));
        }
        let want = length.min(buffer.len() as u64) as usize;
        let got = read_some(&mut self.input, &mut buffer[..want])?;
        self.stored -= got as u64;
        self.at += got as u64;
        self.range = (self.at, length - got as u64);
        Ok(Some(FilePiece::Data(got)))
    }

    /// Reads the stream to its end, so that all of it counts for its digest.
    pub(crate) fn drain(&mut self) -> Result<(), TarError> {
        io::copy(&mut self.input, &mut io::sink())?;
        Ok(())
    }

    /// Returns the stream, at the entry's data directly after [`TarReader::next_entry`].
    pub(crate) fn input(&self) -> &R {
        &self.input
    }

    pub(crate) fn into_input(self) -> R {
        self.input
    }

    fn entry(
        &mut self,
        header: &Header,
        mut pax: Pax,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<TarEntry, TarError> {
        let stored = pax.size.map_or_else(|| header.size(), Ok)?;
        let path = pax.sparse.name.take().or(pax.path.take()).or(long_name);
        let path = path.unwrap_or_else(|| header.name());
        let kind = match header.typeflag() {
            // Before POSIX, a trailing slash made an ordinary file a directory.
            0 | b'0' | b'7' if path.ends_with(b"/") => EntryKind::Dir,
            0 | b'0' | b'7' | b'S' => EntryKind::File,
            b'1' => EntryKind::Hardlink,
            b'2' => EntryKind::Symlink,
            b'3' => header
                .device()
                .map(|(major, minor)| EntryKind::Char(major, minor))?,
            b'4' => header
                .device()
                .map(|(major, minor)| EntryKind::Block(major, minor))?,
            b'5' => EntryKind::Dir,
            b'6' => EntryKind::Fifo,
            other => EntryKind::Unknown(other),
        };
        // Only files have data; some tars nevertheless give the size of a hard link's target.
        let has_data = matches!(kind, EntryKind::File | EntryKind::Unknown(_));
        self.stored = if has_data { stored } else { 0 };
        self.padding = padding(self.stored);
        let size = if kind == EntryKind::File {
            self.begin_file(header, &pax)?
        } else {
            0
        };
        Ok(TarEntry {
            kind,
            path,
            link: pax
                .link_path
                .or(long_link)
                .unwrap_or_else(|| header.link_name()),
            mode: (header.mode()? & 0o7777) as u16,
            uid: pax.uid.map_or_else(|| header.uid(), Ok)?,
            gid: pax.gid.map_or_else(|| header.gid(), Ok)?,
            mtime: pax
                .mtime
                .map_or_else(|| header.mtime().map(|seconds| (seconds, 0)), Ok)?,
            size,
            xattrs: pax.xattrs,
        })
    }

    /// Prepares reading a file's data and returns the file's length.
    fn begin_file(&mut self, header: &Header, pax: &Pax) -> Result<u64, TarError> {
        let (map, size) = if header.typeflag() == b'S' {
            self.old_sparse_map(header)?
        } else if pax.sparse.map_in_data {
            let size = pax
                .sparse
                .real_size
                .ok_or(TarError::Header("sparse size"))?;
            (self.map_in_data()?, size)
        } else if pax.sparse.is_sparse() {
            let size = pax
                .sparse
                .real_size
                .ok_or(TarError::Header("sparse size"))?;
            (SparseMap::from_numbers(&pax.sparse.map)?, size)
        } else {
            (
                SparseMap {
                    ranges: vec![(0, self.stored)],
                },
                self.stored,
            )
        };
        map.check(size, self.stored)?;
        (self.at, self.size, self.range) = (0, size, (0, 0));
        self.map = map.ranges.into_iter();
        Ok(size)
    }

    /// GNU tar's first sparse format: the map is in the header and in blocks between it and the
    /// data.
    fn old_sparse_map(&mut self, header: &Header) -> Result<(SparseMap, u64), TarError> {
        let mut map = SparseMap::default();
        map.push_table(&header.0[386..482])?;
        let size =
            super::header::number(&header.0[483..495]).ok_or(TarError::Header("sparse size"))?;
        let mut more = header.0[482] != 0;
        while more {
            let mut block = [0; RECORD];
            self.read_exact(&mut block)?;
            map.push_table(&block[..504])?;
            more = block[504] != 0;
        }
        Ok((map, size))
    }

    fn map_in_data(&mut self) -> Result<SparseMap, TarError> {
        let mut reader = MapInData::default();
        loop {
            let mut record = [0; RECORD];
            self.stored = self
                .stored
                .checked_sub(RECORD as u64)
                .ok_or(TarError::Header("sparse map"))?;
            self.read_exact(&mut record)?;
            if let Some(map) = reader.record(&record)? {
                return Ok(map);
            }
        }
    }

    fn read_header(&mut self) -> Result<Option<Header>, TarError> {
        let mut block = [0; RECORD];
        // An archive may end without the two blocks of zeros.
        let first = read_or_end(&mut self.input, &mut block)?;
        if first == 0 {
            return Ok(None);
        }
        self.read_exact(&mut block[first..])?;
        Header::parse(block)
    }

    fn skip_rest(&mut self) -> Result<(), TarError> {
        let (stored, padding) = (self.stored, self.padding);
        let rest = stored.saturating_add(padding);
        let skipped = io::copy(&mut (&mut self.input).take(rest), &mut io::sink())?;
        (self.stored, self.padding) = (0, 0);
        (self.at, self.size, self.range) = (0, 0, (0, 0));
        // The last entry's padding may be missing, but not its data.
        if skipped < stored {
            Err(TarError::Truncated)
        } else {
            Ok(())
        }
    }

    fn read_exact(&mut self, mut buffer: &mut [u8]) -> Result<(), TarError> {
        while !buffer.is_empty() {
            let got = read_some(&mut self.input, buffer)?;
            buffer = &mut buffer[got..];
        }
        Ok(())
    }
}

fn padding(size: u64) -> u64 {
    size.wrapping_neg() % RECORD as u64
}

fn read_or_end(input: &mut impl Read, buffer: &mut [u8]) -> Result<usize, TarError> {
    loop {
        match input.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return Ok(other?),
        }
    }
}

fn read_some(input: &mut impl Read, buffer: &mut [u8]) -> Result<usize, TarError> {
    match read_or_end(input, buffer)? {
        0 => Err(TarError::Truncated),
        got => Ok(got),
    }
}
