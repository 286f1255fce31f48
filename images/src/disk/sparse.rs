//! Writes files without their zeros.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::convert_error::ConvertError;

/// Size of the blocks that are left out if they are all zeros; the block size of file systems.
const BLOCK: usize = 4096;

static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// A file that can be written at any offset. Blocks of zeros are left out, so no range may be
/// written twice.
#[derive(Debug)]
pub(super) struct SparseFile {
    file: File,
    limit: u64,
    /// Bytes that may still be written.
    left: u64,
}

impl SparseFile {
    /// Creates a writer for an empty file that takes at most `limit` bytes besides zeros.
    pub(super) fn new(file: File, limit: u64) -> Self {
        Self {
            file,
            limit,
            left: limit,
        }
    }

    /// Writes `data` at `offset`, except for its blocks of zeros.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), ConvertError> {
        for (start, end) in runs(offset, data) {
            let left = self.left.checked_sub((end - start) as u64);
            self.left = left.ok_or(ConvertError::TooLarge {
                what: "data",
                limit: self.limit,
            })?;
            self.put(offset + start as u64, &data[start..end])
                .map_err(ConvertError::Write)?;
        }
        Ok(())
    }

    /// As [`SparseFile::write`], for temporary data, which does not count towards the limit.
    pub(super) fn keep(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        runs(offset, data)
            .try_for_each(|(start, end)| self.put(offset + start as u64, &data[start..end]))
    }

    fn put(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    /// Fills `buffer` from `offset`; what was never written reads as zeros.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    /// Frees the disk space of a range.
    pub(super) fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, mode, offset, length) {
            // A file system without holes; the space is freed when the file gets its final length.
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Truncates or extends the file to its final length.
    pub(super) fn finish(self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }
}

/// Returns the ranges of `data`, which belongs at `offset`, that are not blocks of zeros.
fn runs(offset: u64, data: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let mut start = None;
        while at < data.len() {
            let end = block_end(offset, at).min(data.len());
            let zero = data[at..end] == ZEROS[..end - at];
            match (zero, start) {
                (true, Some(start)) => return Some((start, at)),
                (false, None) => start = Some(at),
                _ => {}
            }
            at = end;
        }
        start.map(|start| (start, at))
    })
}

/// Returns where the block of the file ends that contains byte `at` of the data.
fn block_end(offset: u64, at: usize) -> usize {
    // Less than a block, so the cast loses nothing.
    let within = ((offset + at as u64) % BLOCK as u64) as usize;
    at + BLOCK - within
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn zeros_take_no_space_and_read_as_zeros() {
        let file = tempfile::tempfile().unwrap();
        let mut sparse = SparseFile::new(file.try_clone().unwrap(), 1 << 20);
        let mut data = vec![0; 1 << 20];
        data[500_000] = 7;
        sparse.write(0, &data).unwrap();
        let mut back = vec![1; 1 << 20];
        sparse.read(0, &mut back).unwrap();
        assert_eq!(back, data);
        sparse.finish(2 << 20).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), 2 << 20);
        assert!(metadata.blocks() * 512 <= 64 << 10, "{}", metadata.blocks());
    }

    #[test]
    fn more_data_than_allowed_is_not_written() {
        let mut sparse = SparseFile::new(tempfile::tempfile().unwrap(), 4096);
        sparse.write(0, &[1; 4096]).unwrap();
        sparse.write(1 << 30, &[0; 8192]).unwrap();
        sparse.keep(1 << 20, &[1; 8192]).unwrap();
        assert!(matches!(
            sparse.write(8192, &[1]),
            Err(ConvertError::TooLarge { limit: 4096, .. })
        ));
    }

    proptest! {
        #[test]
        fn runs_cover_all_that_is_not_zero(
            offset in 0u64..10_000,
            ones in prop::collection::vec(0usize..40_000, 0..6),
            length in 0usize..40_000,
        ) {
            let mut data = vec![0; length];
            ones.iter().filter(|at| **at < length).for_each(|at| data[*at] = 1);
            let mut copy = vec![0; length];
            for (start, end) in runs(offset, &data) {
                prop_assert!(start < end && data[start..end].contains(&1));
                copy[start..end].copy_from_slice(&data[start..end]);
            }
            prop_assert_eq!(copy, data);
        }
    }
}
