//! Copies of raw disks that write no zeros where the target can make them by itself.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// Of what is read, blocks of this size are not written if they are all zeros. Smaller ones would
/// scatter a disk for little.
const ZEROS: usize = 64 << 10;

/// A unit that every block device can zero by itself.
const BLOCK: u64 = 4096;

/// Returns the length of a disk in bytes: a file's, or a block device's, for which `stat(2)`
/// reports none. It moves the file's position.
///
/// # Errors
/// What `lseek(2)` fails with.
pub fn disk_len(disk: &File) -> io::Result<u64> {
    Ok(seek(disk, SeekFrom::End(0))?)
}

/// Makes `to` from `start` on what `from` is in `range`, whatever was there; `tell` hears how many
/// of the bytes before the end of `range` are done. Holes and blocks of zeros are not written, but
/// freed in `to`, or else zeroed. An empty file may end up shorter than the copy: it has no zeros
/// at its end.
///
/// # Errors
/// What reading and writing fail with; [`io::ErrorKind::UnexpectedEof`] if `from` ends before
/// `range` does.
pub fn copy_disk(
    from: &File,
    to: &File,
    range: Range<u64>,
    start: u64,
    tell: &dyn Fn(u64),
) -> io::Result<()> {
    let target = |at: u64| start + (at - range.start);
    // All before this is in `to`.
    let mut copied = range.start;
    let mut put = |at: u64, block: &[u8]| {
        zero_disk(to, target(copied)..target(at))?;
        to.write_all_at(block, target(at))?;
        copied = at + block.len() as u64;
        Ok(())
    };
    visit_data(from, range.clone(), &mut put, tell)?;
    zero_disk(to, target(copied)..target(range.end.max(copied)))
}

/// Shows `visit` the data of `disk` in `range`, in order and with their places; `tell` hears how
/// many of the bytes before the end of `range` are done. Holes and blocks of zeros are left out. A
/// block has 64 KiB at most.
///
/// # Errors
/// What reading and `visit` fail with; [`io::ErrorKind::UnexpectedEof`] if `disk` ends before
/// `range` does.
pub fn visit_data(
    disk: &File,
    range: Range<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    tell: &dyn Fn(u64),
) -> io::Result<()> {
    if disk_len(disk)? < range.end {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut buffer = vec![0; CHUNK];
    let mut at = range.start;
    while at < range.end {
        let data = next_data(disk, at)?.clamp(at, range.end);
        let hole = next_hole(disk, data)?.clamp(data, range.end);
        at = data;
        while at < hole {
            let chunk = &mut buffer[..at_most(hole - at, CHUNK)];
            disk.read_exact_at(chunk, at)?;
            for block in chunk.chunks(ZEROS) {
                if block.iter().any(|byte| *byte != 0) {
                    visit(at, block)?;
                }
                at += block.len() as u64;
            }
            tell(at);
        }
    }
    Ok(())
}

/// Makes a range of a disk read as zeros: its blocks by the file system or the device, which frees
/// them if it can, and else by writing.
///
/// # Errors
/// What writing fails with.
pub fn zero_disk(disk: &File, range: Range<u64>) -> io::Result<()> {
    let blocks = range.start.next_multiple_of(BLOCK)..range.end - range.end % BLOCK;
    if !blocks.is_empty() {
        for mode in [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE] {
            let mode = mode | FallocateFlags::KEEP_SIZE;
            if fallocate(disk, mode, blocks.start, blocks.end - blocks.start).is_ok() {
                write_zeros(disk, range.start..blocks.start)?;
                return write_zeros(disk, blocks.end..range.end);
            }
        }
    }
    write_zeros(disk, range)
}

fn write_zeros(disk: &File, range: Range<u64>) -> io::Result<()> {
    let mut at = range.start;
    let zeros = vec![0; at_most(range.end.saturating_sub(at), CHUNK)];
    while at < range.end {
        let count = at_most(range.end - at, zeros.len());
        disk.write_all_at(&zeros[..count], at)?;
        at += count as u64;
    }
    Ok(())
}

fn at_most(left: u64, most: usize) -> usize {
    usize::try_from(left).unwrap_or(most).min(most)
}

/// Returns where data begin, at `at` or behind it.
fn next_data(disk: &File, at: u64) -> io::Result<u64> {
    match seek(disk, SeekFrom::Data(at)) {
        Ok(data) => Ok(data),
        Err(Errno::NXIO) => Ok(u64::MAX),
        // A file system or a device that does not tell.
        Err(Errno::INVAL) => Ok(at),
        Err(error) => Err(error.into()),
    }
}

/// Returns where the data at `data` end.
fn next_hole(disk: &File, data: u64) -> io::Result<u64> {
    match seek(disk, SeekFrom::Hole(data)) {
        // Somebody may have freed them since.
        Ok(hole) => Ok(hole.max(data + 1)),
        Err(Errno::NXIO | Errno::INVAL) => Ok(u64::MAX),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use proptest::prelude::*;

    use super::*;

    fn bytes(file: &File, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start).unwrap();
        bytes
    }

    #[test]
    fn zeros_of_the_source_take_no_space_in_a_new_file() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.set_len(64 << 20).unwrap();
        // Half of it is written zeros, the rest a hole.
        from.write_all_at(&vec![0; 32 << 20], 0).unwrap();
        from.write_all_at(&[7; 5000], 3 << 20).unwrap();
        copy_disk(&from, &to, 0..64 << 20, 0, &|_| ()).unwrap();
        to.set_len(64 << 20).unwrap();
        assert!(bytes(&to, 0..64 << 20) == bytes(&from, 0..64 << 20));
        let blocks = to.metadata().unwrap().blocks();
        assert!(blocks * 512 <= 256 << 10, "{blocks}");
    }

    #[test]
    fn a_source_that_is_too_short_is_an_error() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.write_all_at(&[1; 100], 0).unwrap();
        let error = copy_disk(&from, &to, 0..200, 0, &|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_target_is_the_source_and_keeps_what_lies_around(
            pieces in prop::collection::vec((0u64..600_000, 1usize..90_000, 0u8..3), 0..6),
            range in (0u64..300_000, 0u64..300_000),
            start in 0u64..10_000,
        ) {
            let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            from.set_len(700_000).unwrap();
            for (at, len, byte) in pieces {
                from.write_all_at(&vec![byte; len], at).unwrap();
            }
            to.write_all_at(&vec![0xaa; 700_000], 0).unwrap();
            let range = range.0..range.0 + range.1;
            let told = std::cell::Cell::new(range.start);
            let tell = |at| {
                assert!(at > told.get() && at <= range.end);
                told.set(at);
            };
            copy_disk(&from, &to, range.clone(), start, &tell).unwrap();
            let end = start + (range.end - range.start);
            prop_assert!(bytes(&to, start..end) == bytes(&from, range));
            prop_assert!(bytes(&to, 0..start).iter().all(|byte| *byte == 0xaa));
            prop_assert!(bytes(&to, end..700_000).iter().all(|byte| *byte == 0xaa));
        }
    }
}
