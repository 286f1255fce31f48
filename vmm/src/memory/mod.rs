//! Guest memory: its size, its place in the guest's physical address space, and the host
//! mappings behind it.
//!
//! The mappings start on a 2 MiB boundary and ask for transparent huge pages: with them a
//! booting guest takes a few nested page faults instead of thousands.
#![allow(unsafe_code)] // mmap hints and madvise on memory that no Rust reference covers

mod host;

use std::fmt;
use std::io;
use std::ptr;
use std::str::FromStr;

use podvisor_devices::GuestRam;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestRegionMmap};

pub(crate) use host::host_memory;

use crate::layout;

const MIB: u64 = 1 << 20;
const PAGE_SIZE: u64 = 4096;
const HUGE_PAGE_SIZE: u64 = 2 * MIB;

/// An amount of guest memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemorySize(u64);

impl MemorySize {
    /// The least that a guest gets: below it no Linux kernel unpacks itself.
    pub const MIN: Self = Self(16 * MIB);

    /// `count` MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(MIB))
    }

    /// `count` GiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(1024 * MIB))
    }

    /// `count` bytes.
    #[must_use]
    pub const fn bytes(count: u64) -> Self {
        Self(count)
    }

    /// The size in bytes.
    #[must_use]
    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(MIB) {
            write!(f, "{} MiB", self.0 / MIB)
        } else {
            write!(f, "{} bytes", self.0)
        }
    }
}

/// An invalid memory size.
#[derive(Debug, thiserror::Error)]
#[error("invalid memory size {text:?}: write a number with a unit, such as 512M, 1536MiB or 2G")]
pub struct ParseMemorySizeError {
    text: String,
}

impl FromStr for MemorySize {
    type Err = ParseMemorySizeError;

    /// A number of bytes, or one with `k`, `M`, `G` or `T` (powers of 1024), as `M`, `MB` or
    /// `MiB`, in upper or lower case.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMemorySizeError {
            text: text.to_owned(),
        };
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| error())?;
        let unit = unit.trim_start().to_ascii_lowercase();
        let letter = unit
            .strip_suffix("ib")
            .or_else(|| unit.strip_suffix('b'))
            .unwrap_or(&unit);
        let shift = match letter {
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return Err(error()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(error)
    }
}

/// Why guest memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// `mmap` refused.
    #[error("failed to map {size} of guest memory")]
    Map {
        /// How much.
        size: MemorySize,
        /// The operating system's answer.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The regions do not fit together: more memory than the address space holds.
    #[error("failed to lay out {size} of guest memory")]
    Layout {
        /// How much.
        size: MemorySize,
        /// None when the size itself is beyond the address space.
        #[source]
        source: Option<vm_memory::GuestRegionCollectionError>,
    },
}

/// Maps `size` bytes of anonymous memory and lays them around the hole for devices.
pub(crate) fn allocate(size: MemorySize) -> Result<GuestRam, MemoryError> {
    let mut regions = Vec::with_capacity(2);
    for (start, len) in ranges(size) {
        let layout_error = || MemoryError::Layout { size, source: None };
        let len = usize::try_from(len).map_err(|_| layout_error())?;
        let region = map_aligned(len).map_err(|source| MemoryError::Map { size, source })?;
        let region = GuestRegionMmap::new(region, GuestAddress(start)).ok_or_else(layout_error)?;
        regions.push(region);
    }
    GuestRam::from_regions(regions).map_err(|source| MemoryError::Layout {
        size,
        source: Some(source),
    })
}

/// Guest physical start and length of each region.
fn ranges(size: MemorySize) -> impl Iterator<Item = (u64, u64)> {
    let low = size.0.min(layout::MMIO_START);
    let high = size.0 - low;
    [(0, low), (layout::HIGH_RAM_START, high)]
        .into_iter()
        .filter(|(_, len)| *len > 0)
}

/// An owned anonymous mapping that starts on a 2 MiB boundary where the address space allows.
fn map_aligned(len: usize) -> Result<vm_memory::MmapRegion<()>, vm_memory::mmap::MmapRegionError> {
    let padding = Padding::below_which_aligned(len);
    let region = MmapRegionBuilder::new(len)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        .build()?;
    drop(padding);
    // SAFETY: the range is the mapping that was just made and nobody else knows; madvise of
    // these kinds changes how pages are provided, not what they hold. A child that the process
    // forks has no use for a guest, and would make each of its pages copy on write.
    let advised = unsafe {
        let start = region.as_ptr().cast();
        libc::madvise(start, len, libc::MADV_DONTDUMP);
        libc::madvise(start, len, libc::MADV_DONTFORK);
        libc::madvise(start, len, libc::MADV_HUGEPAGE)
    };
    if advised != 0 {
        // Without huge pages in the kernel everything works, only slower.
        tracing::debug!(error = %io::Error::last_os_error(), "no transparent huge pages");
    }
    Ok(region)
}

/// A reservation that takes the top of a free range of addresses, so that the next mapping of
/// a given length, which the kernel puts right below, starts on a 2 MiB boundary. (Kernels
/// before 6.7 do not align by themselves.) If another thread maps something in between,
/// the mapping ends up elsewhere and is merely slower.
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
        // SAFETY: exactly the mapping that `map` made, of which no copy of the address is used.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vm_memory::{GuestMemory, GuestMemoryRegion};

    #[test]
    fn sizes_are_read_as_docker_reads_them() {
        let parse = |text: &str| text.parse::<MemorySize>().map(MemorySize::as_bytes).ok();
        assert_eq!(parse("512M"), Some(512 * MIB));
        assert_eq!(parse("512m"), Some(512 * MIB));
        assert_eq!(parse("512MiB"), Some(512 * MIB));
        assert_eq!(parse("2gb"), Some(2048 * MIB));
        assert_eq!(parse("1048576"), Some(MIB));
        assert_eq!(parse("64 MiB"), Some(64 * MIB));
        for bad in [
            "",
            "M",
            "-1",
            "1.5G",
            "12X",
            "1e3",
            "18446744073709551616",
            "99999999999T",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn memory_beyond_3_gib_goes_behind_the_hole() {
        let spans = |size: MemorySize| ranges(size).collect::<Vec<_>>();
        assert_eq!(spans(MemorySize::mib(256)), [(0, 256 * MIB)]);
        assert_eq!(spans(MemorySize::gib(3)), [(0, 3 << 30)]);
        assert_eq!(
            spans(MemorySize::gib(5)),
            [(0, 3 << 30), (4 << 30, 2 << 30)]
        );
    }

    #[test]
    fn mappings_start_on_huge_page_boundaries() {
        // Nothing else maps in this process right now but other tests: one of a few tries is
        // undisturbed.
        let aligned = (0..20).any(|_| {
            let memory = allocate(MemorySize::mib(64)).unwrap();
            memory
                .iter()
                .all(|region| region.as_ptr().addr().is_multiple_of(2 << 20))
        });
        assert!(aligned);
    }

    proptest! {
        #[test]
        fn regions_add_up_and_stay_out_of_the_hole(pages in 1u64..(64 << 18)) {
            let size = MemorySize::bytes(pages * PAGE_SIZE);
            let mut total = 0;
            for (start, len) in ranges(size) {
                total += len;
                prop_assert!(start + len <= layout::MMIO_START || start >= layout::HIGH_RAM_START);
            }
            prop_assert_eq!(total, size.as_bytes());
        }
    }

    #[test]
    fn regions_cover_their_length() {
        let memory = allocate(MemorySize::bytes(17 * MIB)).unwrap();
        assert_eq!(
            memory.iter().map(GuestMemoryRegion::len).sum::<u64>(),
            17 * MIB
        );
    }
}
