//! Maps of sparse files: which ranges have data in the archive.

use super::error::TarError;
use super::header::{RECORD, number};
use super::pax::decimal;

/// Maximum number of ranges of a sparse file, as a limit for hostile maps.
const MAX_RANGES: usize = 1 << 20;

/// The data ranges of a file, in order and without overlap; everything else is zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SparseMap {
    pub(super) ranges: Vec<(u64, u64)>,
}

impl SparseMap {
    /// Checks a map against the file's size; `stored` is the number of bytes that the archive has
    /// for it.
    pub(super) fn check(&self, size: u64, stored: u64) -> Result<(), TarError> {
        let mut end = 0u64;
        let mut data = 0u64;
        for (offset, length) in &self.ranges {
            let next = offset
                .checked_add(*length)
                .filter(|next| *offset >= end && *next <= size);
            end = next.ok_or(TarError::Header("sparse map"))?;
            data += length;
        }
        if data == stored {
            Ok(())
        } else {
            Err(TarError::Header("sparse map"))
        }
    }

    pub(super) fn push(&mut self, offset: u64, length: u64) -> Result<(), TarError> {
        if self.ranges.len() >= MAX_RANGES {
            return Err(TarError::Header("sparse map"));
        }
        self.ranges.push((offset, length));
        Ok(())
    }

    /// Reads alternating numbers: offset, length, offset, …
    pub(super) fn from_numbers(numbers: &[u64]) -> Result<Self, TarError> {
        let mut map = Self::default();
        let (pairs, []) = numbers.as_chunks::<2>() else {
            return Err(TarError::Header("sparse map"));
        };
        for [offset, length] in pairs {
            map.push(*offset, *length)?;
        }
        Ok(map)
    }

    /// Adds a table of GNU tar's old format: pairs of 12-byte numbers, ended by an empty one.
    pub(super) fn push_table(&mut self, table: &[u8]) -> Result<(), TarError> {
        for pair in table.chunks_exact(24) {
            if pair[0] == 0 {
                break;
            }
            let (offset, length) = number(&pair[..12])
                .zip(number(&pair[12..]))
                .ok_or(TarError::Header("sparse map"))?;
            self.push(offset, length)?;
        }
        Ok(())
    }
}

/// Reads format 1.0's map, decimal lines before the data, record by record.
#[derive(Debug, Default)]
pub(super) struct MapInData {
    line: Vec<u8>,
    expected: Option<u64>,
    numbers: Vec<u64>,
}

impl MapInData {
    /// Takes a record; returns the map when it is complete.
    pub(super) fn record(&mut self, record: &[u8; RECORD]) -> Result<Option<SparseMap>, TarError> {
        let fault = || TarError::Header("sparse map");
        for byte in record {
            if *byte != b'\n' {
                self.line.push(*byte);
                if self.line.len() > 20 {
                    return Err(fault());
                }
                continue;
            }
            let value = decimal(&self.line).ok_or_else(fault)?;
            self.line.clear();
            match self.expected {
                None if value > MAX_RANGES as u64 => return Err(fault()),
                None => self.expected = Some(value * 2),
                Some(_) => self.numbers.push(value),
            }
            if self.expected == Some(self.numbers.len() as u64) {
                return SparseMap::from_numbers(&self.numbers).map(Some);
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_must_be_in_order_within_the_file_and_match_the_data() {
        let map = |ranges: &[(u64, u64)]| SparseMap {
            ranges: ranges.to_vec(),
        };
        assert_eq!(map(&[(0, 5), (10, 5)]).check(20, 10), Ok(()));
        for bad in [
            &[(5, 5), (0, 5)][..],
            &[(0, 6), (5, 4)],
            &[(15, 10)],
            &[(u64::MAX, 2)],
            &[(0, 9)],
        ] {
            assert!(map(bad).check(20, 10).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_map_in_the_data_may_span_records() {
        let mut text = b"60\n".to_vec();
        (0..60).for_each(|i| text.extend_from_slice(format!("{}\n512\n", i * 1024).as_bytes()));
        text.resize(text.len().next_multiple_of(RECORD), 0);
        let mut reader = MapInData::default();
        let mut records = text
            .chunks_exact(RECORD)
            .map(|record| reader.record(record.try_into().unwrap()));
        assert_eq!(records.next(), Some(Ok(None)));
        let map = records.last().unwrap().unwrap().unwrap();
        assert_eq!((map.ranges.len(), map.ranges[59]), (60, (59 * 1024, 512)));
    }
}
