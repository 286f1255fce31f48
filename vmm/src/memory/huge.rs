//! Huge pages for the file that clones of a snapshot read.
//!
//! A page of guest memory costs the guest a nested page fault when it first touches it. If the host
//! has a huge page of the file in its page cache, and a clone has not written to that part, KVM
//! maps 2 MiB by one fault. Most of what clones only read is the kernel's text.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::save::data_of;
use super::{MemoryShape, mapping, spans};

const HUGE_PAGE: u64 = mapping::HUGE_PAGE_SIZE;

/// The minimum amount of data in a block: holes use memory in a huge page. The end of the kernel's
/// text is often not much more than half a block.
const LEAST_DATA: u64 = HUGE_PAGE / 2;

/// Asks the kernel to put what clones only read into huge pages. `written` is what they write, in
/// order. Returns the number of bytes that are then in huge pages.
///
/// # Errors
/// Fails if there is no huge page at all, since the kernel or the file system does not support them
/// for files (`MADV_COLLAPSE`, Linux 6.1; tmpfs). The file's content stays the same either way.
pub(crate) fn gather(
    file: &Arc<File>,
    shape: MemoryShape,
    written: &[Range<u64>],
) -> io::Result<u64> {
    let mut gathered = 0;
    let mut refused = None;
    // Otherwise a huge page of the file is not a huge page of the guest's memory.
    let aligned = |span: &super::Span| (span.start | span.offset).is_multiple_of(HUGE_PAGE);
    for span in spans(shape).filter(aligned) {
        let data = data_of(file, span)?;
        let blocks = read_only_blocks(&data, written, span.offset);
        let Ok(len) = usize::try_from(span.len) else {
            continue;
        };
        if blocks.is_empty() {
            continue;
        }
        let region = mapping::shared(file.clone(), span.offset, len)
            .map_err(|error| io::Error::other(error.to_string()))?;
        for block in blocks {
            match mapping::collapse(&region, &block) {
                Ok(()) => gathered += block.end - block.start,
                Err(error) => refused = Some(error),
            }
        }
    }
    match refused {
        Some(error) if gathered == 0 => Err(error),
        _ => Ok(gathered),
    }
}

/// Returns the huge pages, as offsets from `offset` of the file on, that are mostly data and of
/// which nothing is written. `data` is relative to `offset`, `written` to the file; both are in
/// order.
fn read_only_blocks(data: &[Range<u64>], written: &[Range<u64>], offset: u64) -> Vec<Range<u64>> {
    let end = data.last().map_or(0, |range| range.end);
    let within = |ranges: &[Range<u64>], block: &Range<u64>| -> u64 {
        let first = ranges.partition_point(|range| range.end <= block.start);
        let touching = ranges.iter().skip(first);
        touching
            .take_while(|range| range.start < block.end)
            .map(|range| range.end.min(block.end) - range.start.max(block.start))
            .sum()
    };
    (0..end / HUGE_PAGE)
        .map(|number| number * HUGE_PAGE..(number + 1) * HUGE_PAGE)
        .filter(|block| within(data, block) >= LEAST_DATA)
        .filter(|block| within(written, &(offset + block.start..offset + block.end)) == 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};

    use super::*;
    use crate::MemorySize;

    const PAGE: u64 = 4096;

    #[test]
    fn blocks_are_mostly_data_and_not_written() {
        let data = [
            0..3 * HUGE_PAGE - PAGE,
            4 * HUGE_PAGE..4 * HUGE_PAGE + HUGE_PAGE / 4,
            6 * HUGE_PAGE - PAGE..6 * HUGE_PAGE,
        ];
        let all = read_only_blocks(&data, &[], 0);
        let block = |number: u64| number * HUGE_PAGE..(number + 1) * HUGE_PAGE;
        assert_eq!(all, [block(0), block(1), block(2)]);
        let one_page = HUGE_PAGE + PAGE..HUGE_PAGE + 2 * PAGE;
        assert_eq!(
            read_only_blocks(&data, std::slice::from_ref(&one_page), 0),
            [block(0), block(2)]
        );
        // The same page of the file, with a larger offset.
        assert_eq!(
            read_only_blocks(&data, &[one_page], HUGE_PAGE),
            [block(1), block(2)]
        );
        assert!(read_only_blocks(&[], &[], 0).is_empty());
    }

    #[test]
    fn guest_blocks_become_huge_pages_and_their_content_stays() {
        // A file on tmpfs, which has huge pages if the kernel provides any.
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        let bytes: Vec<u8> = (0..4 * HUGE_PAGE / 4)
            .flat_map(|word| (word as u32).to_le_bytes())
            .collect();
        file.write_all(&bytes).unwrap();
        let file = Arc::new(file);
        let shape = MemoryShape::fixed(MemorySize::bytes(4 * HUGE_PAGE));
        let written = HUGE_PAGE..HUGE_PAGE + PAGE;
        match gather(&file, shape, std::slice::from_ref(&written)) {
            Ok(gathered) => assert_eq!(gathered, 3 * HUGE_PAGE),
            // No huge page is free.
            Err(error) => assert!(
                matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN)),
                "{error}"
            ),
        }
        let mut after = Vec::new();
        let mut reader = &*file;
        reader.rewind().unwrap();
        reader.read_to_end(&mut after).unwrap();
        assert!(after == bytes);
    }
}
