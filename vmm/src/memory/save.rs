//! Writes guest memory to a snapshot's file, and reads differences back.

use std::fs::File;
use std::io;
use std::iter;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use vm_memory::{Bytes, GuestAddress, GuestMemory as _, GuestRegionMmap};

use super::mapping::HUGE_PAGE_SIZE;
use super::pages::PageMap;
use super::{GuestMemory, MemoryError, PAGE_SIZE, PageSet, Span, mapping, spans};

/// Bytes handled per step: whole pages.
pub(crate) const CHUNK: u64 = 256 << 10;

/// The maximum number of ranges of a span in a difference, for each of which its state file, of at
/// most 64 MiB, has 16 bytes.
const MAX_RANGES: usize = 1 << 19;

/// Selects the pages that are written to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SaveScope {
    /// Everything.
    All,
    /// Pages that were written since the file that backs this memory was mapped.
    Own,
}

impl GuestMemory {
    /// Writes memory to `file`, which is empty, at the offsets of its [`Span`]s. Pages of zeroes
    /// become holes. Returns the ranges of the file that were examined; everything outside of them
    /// is zero, or with [`SaveScope::Own`] as in the file that backs this memory. If there are too
    /// many ranges, neighbours are joined across the pages between them, which are written, too.
    ///
    /// Of the memory that may be plugged in, only the first `plugged` bytes are examined: the rest
    /// is zero in the file, even if a guest wrote there without plugging it in.
    ///
    /// Nothing may write to guest memory meanwhile.
    pub(crate) fn write_to(
        &self,
        file: &File,
        which: SaveScope,
        plugged: u64,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        let map = self.page_map()?;
        let hotplug = self.shape().hotplug_region().map(|region| region.start);
        file.set_len(self.shape().total().as_bytes())
            .map_err(failed("write", 0))?;
        let mut ranges = Vec::new();
        let mut buffer = vec![0; CHUNK as usize];
        for (mut span, region) in spans(self.shape()).zip(self.ram().iter()) {
            if Some(span.start) == hotplug {
                span.len = span.len.min(plugged);
            }
            for range in self.wanted(&map, which, span, region)? {
                self.write_range(file, span, &range, &mut buffer)?;
                ranges.push(range.start + span.offset..range.end + span.offset);
            }
        }
        Ok(ranges)
    }

    /// Returns the ranges of a span that have to be written, as offsets into it.
    pub(super) fn wanted(
        &self,
        map: &PageMap,
        which: SaveScope,
        span: Span,
        region: &GuestRegionMmap,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        let own = map.own(region.as_ptr().addr(), span.len);
        let own = own.map_err(MemoryError::PageMap)?;
        Ok(match (which, &self.file) {
            (SaveScope::Own, _) => join_neighbours(own, MAX_RANGES),
            (SaveScope::All, None) => own,
            (SaveScope::All, Some(behind)) => union(
                own,
                data_of(behind, span).map_err(failed("find", span.start))?,
            ),
        })
    }

    /// Returns all pages that may not be zero.
    pub(crate) fn touched(&self) -> Result<PageSet, MemoryError> {
        let map = self.page_map()?;
        let mut touched = PageSet::default();
        for (span, region) in spans(self.shape()).zip(self.ram().iter()) {
            let own = map.own(region.as_ptr().addr(), span.len);
            let mut ranges = own.map_err(MemoryError::PageMap)?;
            if let Some(behind) = &self.file {
                ranges.extend(data_of(behind, span).map_err(failed("find", span.start))?);
            }
            for range in ranges {
                touched.insert(&(span.start + range.start..span.start + range.end));
            }
        }
        Ok(touched)
    }

    /// Returns the pages of the memory that the guest boots with which were written since the file
    /// that backs it was mapped, as offsets into that file; `None` if there is no file.
    pub(crate) fn own_pages(&self) -> Result<Option<Vec<Range<u64>>>, MemoryError> {
        if self.file.is_none() {
            return Ok(None);
        }
        let map = self.page_map()?;
        let mut ranges = Vec::new();
        for (span, region) in self.boot_spans() {
            let start = region.as_ptr().addr();
            let own = map.own(start, span.len).map_err(MemoryError::PageMap)?;
            ranges.extend(
                own.iter()
                    .map(|r| r.start + span.offset..r.end + span.offset),
            );
        }
        Ok(Some(ranges))
    }

    /// Copies pages of the file that backs this memory up front, before they are written: otherwise
    /// each costs the guest a nested page fault, or three if it is read first. `pages` are offsets
    /// into that file. It is not an error if the kernel cannot do this.
    pub(crate) fn make_own(&self, pages: &[Range<u64>]) {
        for (span, region) in self.boot_spans() {
            for page in pages {
                let start = page.start.saturating_sub(span.offset);
                let end = page.end.saturating_sub(span.offset).min(span.len);
                if let Err(error) = mapping::copy_now(region, &(start..end)) {
                    tracing::debug!(%error, "memory is copied when it is written");
                    return;
                }
            }
        }
    }

    pub(super) fn page_map(&self) -> Result<PageMap, MemoryError> {
        self.page_map.clone().map_or_else(PageMap::open, Ok)
    }

    /// Returns all of memory except what may be plugged in.
    fn boot_spans(&self) -> impl Iterator<Item = (Span, &GuestRegionMmap)> {
        let hotplug = self.shape().hotplug_region().map(|region| region.start);
        let spans = spans(self.shape()).zip(self.ram().iter());
        spans.filter(move |(span, _)| Some(span.start) != hotplug)
    }

    /// Writes one range of a span to `file`, from the span's offset on, except for its pages of
    /// zeroes.
    pub(super) fn write_range(
        &self,
        file: &File,
        span: Span,
        range: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), MemoryError> {
        for at in range.clone().step_by(CHUNK as usize) {
            let len = (range.end - at).min(CHUNK) as usize;
            let bytes = &mut buffer[..len];
            let address = span.start + at;
            self.read(address, bytes)?;
            for run in runs_of_data(bytes) {
                file.write_all_at(&bytes[run.clone()], span.offset + at + run.start as u64)
                    .map_err(failed("write", address))?;
            }
        }
        Ok(())
    }

    /// Reads `ranges`, in order, of a file that [`Self::write_to`] wrote with [`SaveScope::Own`]
    /// into new memory. The ranges are not trusted: only where this file or the one that backs the
    /// memory has data does memory become this process's own.
    pub(crate) fn read_from(&self, file: &File, ranges: &[Range<u64>]) -> Result<(), MemoryError> {
        let size = self.shape().total();
        let len = file.metadata().map_or(0, |meta| meta.len());
        if len < size.as_bytes() {
            return Err(MemoryError::FileTooShort { size, len });
        }
        let mut buffer = vec![0; CHUNK as usize];
        for span in spans(self.shape()) {
            let find = |file: &File| data_of(file, span).map_err(failed("find", span.start));
            let data = find(file)?;
            for range in intersection(&within(ranges, span), &data) {
                self.copy_range(file, span, &range, &mut buffer)?;
            }
            let Some(behind) = &self.file else {
                continue;
            };
            let holes = intersection(&within(ranges, span), &gaps(&data, span.len));
            for range in intersection(&holes, &find(behind)?) {
                self.clear_range(span, &range, &mut buffer)?;
            }
        }
        Ok(())
    }

    /// Reads one range of a span from `file`.
    fn copy_range(
        &self,
        file: &File,
        span: Span,
        range: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), MemoryError> {
        for at in range.clone().step_by(CHUNK as usize) {
            let bytes = &mut buffer[..(range.end - at).min(CHUNK) as usize];
            let address = span.start + at;
            file.read_exact_at(bytes, span.offset + at)
                .and_then(|()| self.put(bytes, address))
                .map_err(failed("restore", address))?;
        }
        Ok(())
    }

    /// Makes one range of a span zero. Pages that are zero already are not written.
    fn clear_range(
        &self,
        span: Span,
        range: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), MemoryError> {
        let addresses = span.start + range.start..span.start + range.end;
        self.clear(&addresses, buffer)
    }

    /// Makes these physical addresses zero. Pages that are zero already are not written. `buffer`
    /// has [`CHUNK`] bytes.
    pub(crate) fn clear(
        &self,
        addresses: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), MemoryError> {
        for address in addresses.clone().step_by(CHUNK as usize) {
            let bytes = &mut buffer[..(addresses.end - address).min(CHUNK) as usize];
            self.ram()
                .read_slice(bytes, GuestAddress(address))
                .map_err(io::Error::other)
                .map_err(failed("restore", address))?;
            for run in runs_of_data(bytes) {
                let start = address + run.start as u64;
                bytes[run.clone()].fill(0);
                self.put(&bytes[run], start)
                    .map_err(failed("restore", start))?;
            }
        }
        Ok(())
    }

    /// Reads from a physical address on.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.ram()
            .read_slice(bytes, GuestAddress(address))
            .map_err(io::Error::other)
            .map_err(failed("read", address))
    }

    fn put(&self, bytes: &[u8], address: u64) -> io::Result<()> {
        let ram = self.ram();
        ram.write_slice(bytes, GuestAddress(address))
            .map_err(io::Error::other)
    }
}

pub(super) fn failed(what: &'static str, address: u64) -> impl Fn(io::Error) -> MemoryError {
    move |source| MemoryError::Transfer {
        what,
        address,
        source,
    }
}

/// Returns where `file` has data rather than holes, as offsets into the span.
pub(super) fn data_of(file: &File, span: Span) -> io::Result<Vec<Range<u64>>> {
    let file = file.as_fd();
    let end = span.offset + span.len;
    let mut data = Vec::new();
    let mut at = span.offset;
    while at < end {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < end => start & !(PAGE_SIZE - 1),
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(start.max(at)))?;
        at = hole.next_multiple_of(PAGE_SIZE).min(end);
        data.push(start - span.offset..at - span.offset);
    }
    Ok(data)
}

/// Returns the holes of `file`, as offsets into the span: those of whole huge pages, since each is
/// a mapping of its own. A file system may not tell.
pub(super) fn holes_of(file: &File, span: Span) -> Vec<Range<u64>> {
    let mut holes = Vec::new();
    let mut at = 0;
    while at < span.len {
        let data = match seek(file, SeekFrom::Data(span.offset + at)) {
            Ok(data) => data.saturating_sub(span.offset).min(span.len),
            Err(rustix::io::Errno::NXIO) => span.len,
            Err(_) => break,
        };
        let end = match data == span.len {
            true => data,
            false => data / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE,
        };
        if at < end {
            holes.push(at..end);
        }
        at = end.saturating_add(HUGE_PAGE_SIZE);
    }
    holes
}

/// Returns the union of two lists of ranges, in order.
fn union(mut a: Vec<Range<u64>>, b: Vec<Range<u64>>) -> Vec<Range<u64>> {
    a.extend(b);
    a.sort_by_key(|range| range.start);
    let mut all: Vec<Range<u64>> = Vec::with_capacity(a.len());
    for range in a {
        match all.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// Joins neighbours across the smallest gaps until there are at most `most` ranges. Gaps are of
/// whole pages, so that the loop ends.
fn join_neighbours(mut ranges: Vec<Range<u64>>, most: usize) -> Vec<Range<u64>> {
    let mut gap = PAGE_SIZE;
    while ranges.len() > most.max(1) {
        ranges.dedup_by(|next, last| {
            let is_near = next.start - last.end <= gap;
            if is_near {
                last.end = next.end;
            }
            is_near
        });
        gap = gap.saturating_mul(2);
    }
    ranges
}

/// Returns the parts of ranges of a file that lie in a span, as offsets into it.
fn within(ranges: &[Range<u64>], span: Span) -> Vec<Range<u64>> {
    let end = span.offset + span.len;
    ranges
        .iter()
        .map(|range| range.start.max(span.offset)..range.end.min(end))
        .filter(|range| !range.is_empty())
        .map(|range| range.start - span.offset..range.end - span.offset)
        .collect()
}

/// Returns what two lists of ranges, each in order, have in common.
fn intersection(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut common = Vec::new();
    while let (Some(one), Some(other)) = (a.peek(), b.peek()) {
        let both = one.start.max(other.start)..one.end.min(other.end);
        if one.end <= other.end {
            a.next();
        } else {
            b.next();
        }
        if !both.is_empty() {
            common.push(both);
        }
    }
    common
}

/// Returns what is between ranges, in order, up to `len`.
fn gaps(ranges: &[Range<u64>], len: u64) -> Vec<Range<u64>> {
    let starts = iter::once(0).chain(ranges.iter().map(|range| range.end));
    let ends = ranges.iter().map(|range| range.start);
    let gaps = starts.zip(ends.chain(iter::once(len)));
    gaps.map(|(start, end)| start..end)
        .filter(|gap| !gap.is_empty())
        .collect()
}

/// Returns the runs of pages that are not all zeroes.
pub(crate) fn runs_of_data(bytes: &[u8]) -> Vec<Range<usize>> {
    const ZEROES: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];
    let page = PAGE_SIZE as usize;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, content) in bytes.chunks(page).enumerate() {
        if content == &ZEROES[..content.len()] {
            continue;
        }
        let start = number * page;
        let end = start + content.len();
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::super::{MemoryShape, MemorySize};
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::slice;
    use std::sync::Arc;

    const SIZE: MemorySize = MemorySize::mib(32);
    const SHAPE: MemoryShape = MemoryShape::fixed(SIZE);

    fn write(memory: &GuestMemory, at: u64, byte: u8) {
        let bytes = [byte; 5000];
        let at = GuestAddress(at);
        memory.ram().write_slice(&bytes, at).unwrap();
    }

    fn contents(memory: &GuestMemory) -> Vec<u8> {
        let mut bytes = vec![0; SIZE.as_bytes() as usize];
        memory
            .ram()
            .read_slice(&mut bytes, GuestAddress(0))
            .unwrap();
        bytes
    }

    fn save(memory: &GuestMemory, which: SaveScope) -> (Arc<File>, Vec<Range<u64>>) {
        let file = tempfile::tempfile().unwrap();
        let ranges = memory.write_to(&file, which, 0).unwrap();
        (Arc::new(file), ranges)
    }

    #[test]
    fn memory_comes_back_from_its_file_and_zeroes_take_no_room() {
        let memory = GuestMemory::anonymous(SHAPE).unwrap();
        write(&memory, 0x1000, 1);
        write(&memory, 0x100_0800, 2);
        write(&memory, SIZE.as_bytes() - 5000, 3);
        let (file, _) = save(&memory, SaveScope::All);
        let blocks = file.metadata().unwrap().blocks() * 512;
        assert!(blocks <= 16 * PAGE_SIZE, "{blocks} bytes on disk");
        let clone = GuestMemory::private(SHAPE, file).unwrap();
        assert!(contents(&clone) == contents(&memory));
    }

    /// Checks what a clone has for its own: pages of its file's data, and `of_hole`, which may be
    /// part of a huge page.
    fn assert_own(own: &[Range<u64>], of_data: &[Range<u64>], of_hole: Range<u64>) {
        let (last, others) = own.split_last().unwrap();
        assert_eq!(others, of_data);
        let huge = of_hole.start / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
        let huge = huge..huge + HUGE_PAGE_SIZE;
        assert!(*last == of_hole || *last == huge, "{last:x?}");
    }

    #[test]
    fn a_clone_is_saved_whole_or_as_the_difference_to_its_file() {
        let memory = GuestMemory::anonymous(SHAPE).unwrap();
        for at in [0x1000, 0x10_0000, 0x100_0000] {
            write(&memory, at, 1);
        }
        let (base, _) = save(&memory, SaveScope::All);
        let clone = GuestMemory::private(SHAPE, base.clone()).unwrap();
        write(&clone, 0x1000, 2);
        // Back to zeroes, and over existing zeroes.
        write(&clone, 0x10_0000, 0);
        write(&clone, 0x180_0000, 4);

        let (difference, ranges) = save(&clone, SaveScope::Own);
        let of_data = [0x1000..0x3000, 0x10_0000..0x10_2000];
        assert_own(&ranges, &of_data, 0x180_0000..0x180_2000);
        let (whole, _) = save(&clone, SaveScope::All);
        for (file, ranges) in [(base, &*ranges), (whole, &[])] {
            let again = GuestMemory::private(SHAPE, file).unwrap();
            again.read_from(&difference, ranges).unwrap();
            assert!(contents(&again) == contents(&clone));
        }
    }

    #[test]
    fn pages_are_made_a_clones_own_before_they_are_written() {
        let memory = GuestMemory::anonymous(SHAPE).unwrap();
        write(&memory, 0x1000, 1);
        let (file, _) = save(&memory, SaveScope::All);
        let first = GuestMemory::private(SHAPE, file.clone()).unwrap();
        let own_pages = |memory: &GuestMemory| memory.own_pages().unwrap().unwrap();
        assert_eq!(own_pages(&first), []);
        write(&first, 0x2000, 2);
        let end = SIZE.as_bytes();
        write(&first, end - 5000, 3);
        let own = own_pages(&first);
        assert_own(&own, slice::from_ref(&(0x2000..0x4000)), end - 0x2000..end);

        let second = GuestMemory::private(SHAPE, file.clone()).unwrap();
        second.make_own(&own);
        assert_eq!(own_pages(&second), own);
        assert!(contents(&second) == contents(&memory));

        // Ranges outside of memory are ignored.
        let third = GuestMemory::private(SHAPE, file).unwrap();
        let beyond = [end..end + PAGE_SIZE, u64::MAX - 5..u64::MAX];
        third.make_own(&beyond);
        assert_eq!(own_pages(&third), []);
        assert_eq!(memory.own_pages().unwrap(), None);
    }

    #[test]
    fn memory_that_was_not_plugged_in_is_not_looked_at_and_takes_huge_pages_in_a_clone() {
        let shape = MemoryShape {
            boot: SIZE,
            hotplug: MemorySize::mib(256),
        };
        let region = shape.hotplug_region().unwrap();
        let file_behind = |memory: &GuestMemory| {
            let region = memory.ram().find_region(GuestAddress(region.start));
            region.unwrap().file_offset().is_some()
        };
        let memory = GuestMemory::anonymous(shape).unwrap();
        write(&memory, 0x1000, 1);
        write(&memory, region.start + 0x1000, 2);
        write(&memory, region.start + (4 << 20), 3);
        for (plugged, seen) in [(0, [0, 0]), (2 << 20, [2, 0]), (8 << 20, [2, 3])] {
            let file = tempfile::tempfile().unwrap();
            memory.write_to(&file, SaveScope::All, plugged).unwrap();
            let clone = GuestMemory::private(shape, Arc::new(file)).unwrap();
            let byte = |at| {
                let at = GuestAddress(region.start + at);
                clone.ram().read_obj::<u8>(at).unwrap()
            };
            assert_eq!([byte(0x1000), byte(4 << 20)], seen, "{plugged}");
            assert_eq!(file_behind(&clone), plugged > 0);
        }
    }

    #[test]
    fn ranges_from_a_damaged_file_reach_guest_memory_only() {
        let memory = GuestMemory::anonymous(SHAPE).unwrap();
        let (file, _) = save(&memory, SaveScope::All);
        let end = SIZE.as_bytes();
        let beyond = [end - PAGE_SIZE..u64::MAX, u64::MAX - 5..u64::MAX];
        memory.read_from(&file, &beyond).unwrap();
        file.set_len(PAGE_SIZE).unwrap();
        let error = memory.read_from(&file, &[]).unwrap_err();
        assert!(matches!(error, MemoryError::FileTooShort { .. }), "{error}");
    }

    #[test]
    fn a_difference_of_holes_costs_no_more_than_the_data_of_its_base() {
        let memory = GuestMemory::anonymous(SHAPE).unwrap();
        write(&memory, 0x10_0000, 1);
        let (base, _) = save(&memory, SaveScope::All);
        let difference = tempfile::tempfile().unwrap();
        difference.set_len(SIZE.as_bytes()).unwrap();
        difference.write_all_at(&[3; 4096], 0x20_0000).unwrap();
        let clone = GuestMemory::private(SHAPE, base).unwrap();
        let everything = 0..SIZE.as_bytes();
        clone
            .read_from(&difference, slice::from_ref(&everything))
            .unwrap();
        let mut expected = vec![0; SIZE.as_bytes() as usize];
        expected[0x20_0000..0x20_1000].fill(3);
        let own = clone.own_pages().unwrap().unwrap();
        let own: u64 = own.iter().map(|range| range.end - range.start).sum();
        // A write to a hole may take a huge page.
        assert!(own <= HUGE_PAGE_SIZE + 2 * PAGE_SIZE, "{own:#x}");
        assert!(contents(&clone) == expected);
    }

    #[test]
    fn too_many_ranges_are_joined_across_the_smallest_gaps() {
        let page = |start: u64, end: u64| start * PAGE_SIZE..end * PAGE_SIZE;
        let ranges = vec![
            page(0, 1),
            page(2, 3),
            page(4, 6),
            page(9, 10),
            page(90, 91),
        ];
        assert_eq!(join_neighbours(ranges.clone(), 5), ranges);
        let fewer = [page(0, 6), page(9, 10), page(90, 91)];
        assert_eq!(join_neighbours(ranges.clone(), 4), fewer);
        let fewer = [page(0, 10), page(90, 91)];
        assert_eq!(join_neighbours(ranges.clone(), 2), fewer);
        assert_eq!(join_neighbours(ranges, 0), [page(0, 91)]);
    }

    #[test]
    fn what_lists_of_ranges_have_in_common_and_between_them_is_found() {
        let (a, b) = ([0..4, 6..9, 20..30], [1..2, 3..7, 8..21, 29..40]);
        let common = [1..2, 3..4, 6..7, 8..9, 20..21, 29..30];
        assert_eq!(intersection(&a, &b), common);
        assert_eq!(intersection(&b, &a), common);
        assert_eq!(intersection(&a, &[]), []);
        assert_eq!(gaps(&a, 40), [4..6, 9..20, 30..40]);
        assert_eq!(gaps(&b, 40), [0..1, 2..3, 7..8, 21..29]);
        assert_eq!(gaps(&[], 0), []);
    }

    #[test]
    fn unions_are_sorted_and_joined() {
        let union = |a: &[(u64, u64)], b: &[(u64, u64)]| {
            let ranges = |list: &[(u64, u64)]| list.iter().map(|(a, b)| *a..*b).collect();
            union(ranges(a), ranges(b))
                .iter()
                .map(|range| (range.start, range.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(union(&[(5, 7)], &[(0, 5), (6, 9)]), [(0, 9)]);
        assert_eq!(union(&[(0, 9), (20, 21)], &[(1, 2)]), [(0, 9), (20, 21)]);
        assert_eq!(union(&[], &[]), []);
    }
}
