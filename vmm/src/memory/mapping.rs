//! Host mappings: anonymous ones on huge page boundaries, private ones of a file, and read-only
//! ones.
#![allow(unsafe_code)] // mmap hints and madvise on memory that no Rust reference covers

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{FileOffset, MmapRegion};

const PAGE_SIZE: u64 = 4096;
pub(super) const HUGE_PAGE_SIZE: u64 = 2 << 20;

/// Attempts to get an aligned mapping, after which another one is merely slower.
const MAX_ELSEWHERE: usize = 4;

/// The maximum number of holes of one mapping that are replaced. Each is up to two mappings more,
/// and a process may have 65,530 (`vm.max_map_count`). Memory of 4 GiB has no more holes of a huge
/// page.
pub(super) const MAX_REPLACED: usize = 1024;

/// Creates an owned anonymous mapping that starts on a 2 MiB boundary if the address space allows.
pub(super) fn anonymous(len: usize) -> Result<MmapRegion<()>, MmapRegionError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let region = aligned(len, libc::PROT_READ | libc::PROT_WRITE, flags, None)?;
    keep_to_this_process(&region);
    if let Err(error) = advise(&region, libc::MADV_HUGEPAGE) {
        // Without huge pages in the kernel everything works, only slower.
        tracing::debug!(%error, "no transparent huge pages");
    }
    Ok(region)
}

/// Maps `len` bytes of `file` from `offset` on, copied on write: the file is never written. It must
/// not be truncated, or accesses to the missing part raise SIGBUS. The mapping starts on a 2 MiB
/// boundary if the address space allows, so that huge pages of the file can be mapped as such.
///
/// `holes`, offsets into the mapping, are where the file has no data. The largest of them, up to
/// [`MAX_REPLACED`], are anonymous memory, in huge pages: a file on a tmpfs would get a page of
/// zeroes for each one that is touched, and keep it, in addition to the copy. The others, and those
/// that the kernel does not replace, stay the file's, which reads as zeroes, too.
pub(super) fn private(
    file: Arc<File>,
    offset: u64,
    len: usize,
    mut holes: Vec<Range<u64>>,
) -> Result<MmapRegion<()>, MmapRegionError> {
    let file = FileOffset::from_arc(file, offset);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let region = aligned(len, access, libc::MAP_PRIVATE, Some(file))?;
    if holes.len() > MAX_REPLACED {
        holes.sort_unstable_by_key(|hole| Reverse(hole.end - hole.start));
        holes.truncate(MAX_REPLACED);
    }
    for hole in &holes {
        if let Err(error) = replace_by_zeroes(&region, hole) {
            if !is_mapped(&region, hole) {
                return Err(MmapRegionError::Mmap(error));
            }
            tracing::debug!(%error, "holes of a memory file are not anonymous memory");
            break;
        }
    }
    keep_to_this_process(&region);
    Ok(region)
}

/// Replaces `range` of a new mapping, offsets into it, by anonymous memory.
fn replace_by_zeroes(region: &MmapRegion<()>, range: &Range<u64>) -> io::Result<()> {
    let Some((start, len)) = part(region, range) else {
        return Ok(());
    };
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: within the mapping, as `part` says, which is not used yet and remains its owner.
    let mapped = unsafe { libc::mmap(start.cast(), len, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A kernel without huge pages refuses this.
    let _ = advise_range(region, range, libc::MADV_HUGEPAGE);
    Ok(())
}

/// Returns whether `range` of a mapping is still there: a kernel that fails to replace a part may
/// have unmapped it before (Linux before 6.12).
fn is_mapped(region: &MmapRegion<()>, range: &Range<u64>) -> bool {
    // The default, which changes nothing.
    let advised = advise_range(region, range, libc::MADV_NORMAL);
    !advised.is_err_and(|error| error.raw_os_error() == Some(libc::ENOMEM))
}

fn aligned(
    len: usize,
    access: i32,
    flags: i32,
    file: Option<FileOffset>,
) -> Result<MmapRegion<()>, MmapRegionError> {
    // Mappings at other places, which the kernel does not choose again while they are there.
    let mut elsewhere = Vec::new();
    loop {
        let padding = Padding::below_which_aligned(len);
        let mut builder = MmapRegionBuilder::new(len)
            .with_mmap_prot(access)
            .with_mmap_flags(flags | libc::MAP_NORESERVE);
        if let Some(file) = &file {
            builder = builder.with_file_offset(file.clone());
        }
        let built = builder.build();
        drop(padding);
        let region = match (built, elsewhere.pop()) {
            (Ok(region), last) => {
                elsewhere.extend(last);
                region
            }
            // There is no room for both, or they count against a limit.
            (Err(_), Some(last)) => return Ok(last),
            (Err(error), None) => return Err(error),
        };
        let is_aligned = (region.as_ptr().addr() as u64).is_multiple_of(HUGE_PAGE_SIZE);
        if is_aligned || elsewhere.len() == MAX_ELSEWHERE {
            return Ok(region);
        }
        elsewhere.push(region);
    }
}

/// Maps `len` bytes of `file` from `offset` on: pages of the host's page cache, of which the last
/// one may extend beyond the file's end. The file must not be truncated. The mapping starts on a 2
/// MiB boundary if the address space allows.
pub(super) fn shared(
    file: Arc<File>,
    offset: u64,
    len: usize,
) -> Result<MmapRegion<()>, MmapRegionError> {
    let file = FileOffset::from_arc(file, offset);
    let region = aligned(len, libc::PROT_READ, libc::MAP_SHARED, Some(file))?;
    keep_to_this_process(&region);
    Ok(region)
}

/// Maps `len` bytes of read-only zeroes: they use no memory.
pub(super) fn zeroes(len: usize) -> Result<MmapRegion<()>, MmapRegionError> {
    let region = MmapRegionBuilder::new(len)
        .with_mmap_prot(libc::PROT_READ)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        .build()?;
    keep_to_this_process(&region);
    Ok(region)
}

/// Excludes a mapping from child processes, which have no use for a guest and would make each of
/// its pages copy on write, and from core dumps.
fn keep_to_this_process(region: &MmapRegion<()>) {
    for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        if let Err(error) = advise(region, advice) {
            tracing::debug!(%error, advice, "advice on guest memory was refused");
        }
    }
}

/// Copies the pages of `range`, offsets into a mapping of ours, as if each was written, but all in
/// one call. Anything beyond the mapping's end is left out.
///
/// # Errors
/// Kernels before 5.14 do not support it.
pub(super) fn copy_now(region: &MmapRegion<()>, range: &Range<u64>) -> io::Result<()> {
    advise_range(region, range, libc::MADV_POPULATE_WRITE)
}

/// Puts the pages of `range`, offsets into a mapping of a file, into huge pages of the page cache.
///
/// # Errors
/// Kernels before 6.1, and most file systems, do not support it; or no huge page is free.
pub(super) fn collapse(region: &MmapRegion<()>, range: &Range<u64>) -> io::Result<()> {
    // Some kernels collapse the file's pages, and then fail with EINVAL if the mapping has no page
    // table there. Kernels before 5.14 do not know the advice.
    let first = range.start..range.start + PAGE_SIZE;
    let _ = advise_range(region, &first, libc::MADV_POPULATE_READ);
    advise_range(region, range, libc::MADV_COLLAPSE)
}

fn advise_range(region: &MmapRegion<()>, range: &Range<u64>, advice: i32) -> io::Result<()> {
    let Some((start, len)) = part(region, range) else {
        return Ok(());
    };
    // SAFETY: within the mapping, as `part` says; advice of the kinds above changes how pages are
    // provided, not their content.
    let result = unsafe { libc::madvise(start.cast(), len, advice) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the part of `range`, offsets into a mapping, that lies within it; `None` if nothing
/// does.
fn part(region: &MmapRegion<()>, range: &Range<u64>) -> Option<(*mut u8, usize)> {
    let end = range.end.min(region.size() as u64);
    let len = end.checked_sub(range.start).filter(|len| *len > 0)?;
    let start = usize::try_from(range.start).ok()?;
    let len = usize::try_from(len).ok()?;
    Some((region.as_ptr().wrapping_add(start), len))
}

fn advise(region: &MmapRegion<()>, advice: i32) -> io::Result<()> {
    // SAFETY: the range is a mapping that was just created and is not used elsewhere yet; advice of
    // the kinds above changes how pages are provided, not their content.
    let result = unsafe { libc::madvise(region.as_ptr().cast(), region.size(), advice) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A reservation of the top of a free address range, so that the next mapping of a given length,
/// which the kernel puts right below, starts on a 2 MiB boundary. (Kernels before 6.7 do not align
/// by themselves.) The mapping ends up elsewhere if another thread maps something in between, or
/// if a gap further up is large enough for it, but not for it and the padding.
struct Padding {
    start: *mut libc::c_void,
    len: usize,
}

impl Padding {
    fn below_which_aligned(len: usize) -> Option<Self> {
        let huge = usize::try_from(HUGE_PAGE_SIZE).ok()?;
        let page = usize::try_from(PAGE_SIZE).ok()?;
        let wanted = len.checked_next_multiple_of(page)?.checked_add(huge)?;
        let probe = Self::map(ptr::null_mut(), wanted, 0)?;
        let base = probe.start.addr();
        let aligned = base.checked_next_multiple_of(huge)?;
        let end = aligned.checked_add(len.checked_next_multiple_of(page)?)?;
        let top = base.checked_add(wanted)?;
        drop(probe);
        if end == top {
            return None;
        }
        Self::map(
            ptr::without_provenance_mut(end),
            top - end,
            libc::MAP_FIXED_NOREPLACE,
        )
    }

    fn map(at: *mut libc::c_void, len: usize, flags: i32) -> Option<Self> {
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping without access; with an address, MAP_FIXED_NOREPLACE
        // makes the call fail rather than replace what is there.
        let start = unsafe { libc::mmap(at, len, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { start, len })
    }
}

impl Drop for Padding {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `map` created; no copy of its address is in use.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_that_cannot_be_replaced_stays_the_files() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(HUGE_PAGE_SIZE).unwrap();
        let len = usize::try_from(HUGE_PAGE_SIZE).unwrap();
        // mmap refuses to replace parts of pages.
        let holes = std::iter::once(PAGE_SIZE / 2..PAGE_SIZE).collect();
        let region = private(file, 0, len, holes).unwrap();
        assert!(is_mapped(&region, &(0..HUGE_PAGE_SIZE)));
    }
}
