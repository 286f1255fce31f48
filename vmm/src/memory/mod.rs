//! The room for guest memory: how much, where in the guest's physical address space, what lies
//! behind it on the host, and which pages of it were written.
//!
//! * [`GuestMemory`] is all of a guest's memory, over anonymous mappings or over a file that is
//!   mapped privately (a clone of a snapshot). Devices get its [`GuestRam`].
//! * [`Memslots`] tells KVM of mappings, before the guest runs or while it does.
//! * `pages.rs` finds the pages that this process has copies of its own of, and `save.rs` writes
//!   them to a file.
//!
//! # Who marks what was written
//!
//! Nobody: the host's page tables do. Whoever writes to guest memory (a vCPU, a device by
//! `vm-memory`, a raw `preadv`, `io_uring`, vhost) goes through this process's page tables. Behind
//! anonymous memory a page that was never touched is not there, and is zero. Behind a private
//! mapping of a file a page that was written is anonymous from then on, and one that was not is
//! the file's. `/proc/self/pagemap` tells them apart, so that a snapshot needs neither KVM's dirty
//! log, which splits huge pages and costs a fault for each page, nor a bitmap that a writer may
//! forget.
//!
//! # Huge pages
//!
//! Anonymous mappings start on a 2 MiB boundary and ask for transparent huge pages: with them a
//! booting guest takes a few nested page faults instead of thousands.

mod host;
mod mapping;
mod pages;
mod save;
mod size;
mod slots;

use std::fs::File;
use std::io;
use std::sync::Arc;

use podvisor_devices::GuestRam;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

pub(crate) use host::host_memory;
pub(crate) use save::Which;
pub(crate) use slots::Memslots;

pub use size::{MemorySize, ParseMemorySizeError};

use crate::layout;

/// The unit of mappings and of snapshots.
pub(crate) const PAGE_SIZE: u64 = 4096;

/// Why guest memory could not be had, or not be looked at.
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
    /// The file of a snapshot holds less than the memory that it is for.
    #[error("the memory file has {len} bytes, but {size} of guest memory are to come from it")]
    FileTooShort {
        /// How much memory.
        size: MemorySize,
        /// The file's length.
        len: u64,
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
    /// It cannot be found which pages were written.
    #[error("failed to read /proc/self/pagemap, which tells written pages from others")]
    PageMap(#[source] io::Error),
    /// A page cannot be written to a snapshot's file, or not be read from one.
    #[error("failed to {what} guest memory at {address:#x}")]
    Transfer {
        /// What was tried.
        what: &'static str,
        /// Guest physical address.
        address: u64,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

/// All memory of a guest.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    ram: GuestRam,
    size: MemorySize,
    /// What is behind pages that were not written; `None` is zeroes.
    file: Option<Arc<File>>,
}

/// A part of guest memory without a hole, and where it lies in a snapshot's file: one behind the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Guest physical address.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// In the file.
    pub(crate) offset: u64,
}

impl GuestMemory {
    /// Memory of zeroes.
    pub(crate) fn anonymous(size: MemorySize) -> Result<Self, MemoryError> {
        let ram = lay_out(size, |_, len| mapping::anonymous(len))?;
        Ok(Self {
            ram,
            size,
            file: None,
        })
    }

    /// Memory that holds what `file` holds, which must have at least `size` bytes. What the guest
    /// writes stays in this process.
    pub(crate) fn private(size: MemorySize, file: Arc<File>) -> Result<Self, MemoryError> {
        let len = file.metadata().map_or(0, |meta| meta.len());
        if len < size.as_bytes() {
            return Err(MemoryError::FileTooShort { size, len });
        }
        let ram = lay_out(size, |span, len| {
            mapping::private(file.clone(), span.offset, len)
        })?;
        Ok(Self {
            ram,
            size,
            file: Some(file),
        })
    }

    /// As devices see it.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    pub(crate) fn size(&self) -> MemorySize {
        self.size
    }
}

/// Maps each span by `map` and puts it where the guest has it.
fn lay_out(
    size: MemorySize,
    mut map: impl FnMut(Span, usize) -> Result<MmapRegion<()>, MmapRegionError>,
) -> Result<GuestRam, MemoryError> {
    let mut regions = Vec::with_capacity(2);
    for span in spans(size) {
        let layout_error = || MemoryError::Layout { size, source: None };
        let len = usize::try_from(span.len).map_err(|_| layout_error())?;
        let region = map(span, len).map_err(|source| MemoryError::Map { size, source })?;
        let start = GuestAddress(span.start);
        regions.push(GuestRegionMmap::new(region, start).ok_or_else(layout_error)?);
    }
    GuestRam::from_regions(regions).map_err(|source| MemoryError::Layout {
        size,
        source: Some(source),
    })
}

/// Where memory of this size lies: around the hole for devices.
pub(crate) fn spans(size: MemorySize) -> impl Iterator<Item = Span> {
    let low = size.as_bytes().min(layout::MMIO_START);
    let high = size.as_bytes() - low;
    [(0, low, 0), (layout::HIGH_RAM_START, high, low)]
        .into_iter()
        .filter(|(_, len, _)| *len > 0)
        .map(|(start, len, offset)| Span { start, len, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;
    use vm_memory::{Bytes, GuestMemory as _, GuestMemoryRegion};

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_beyond_3_gib_goes_behind_the_hole() {
        let spans = |size: MemorySize| {
            let spans = spans(size).map(|span| (span.start, span.len, span.offset));
            spans.collect::<Vec<_>>()
        };
        assert_eq!(spans(MemorySize::mib(256)), [(0, 256 * MIB, 0)]);
        assert_eq!(spans(MemorySize::gib(3)), [(0, 3 << 30, 0)]);
        assert_eq!(
            spans(MemorySize::gib(5)),
            [(0, 3 << 30, 0), (4 << 30, 2 << 30, 3 << 30)]
        );
    }

    #[test]
    fn mappings_start_on_huge_page_boundaries() {
        // Nothing else maps in this process right now but other tests: one of a few tries is
        // undisturbed.
        let aligned = (0..20).any(|_| {
            let memory = GuestMemory::anonymous(MemorySize::mib(64)).unwrap();
            memory
                .ram()
                .iter()
                .all(|region| region.as_ptr().addr().is_multiple_of(2 << 20))
        });
        assert!(aligned);
    }

    proptest! {
        #[test]
        fn spans_add_up_and_stay_out_of_the_hole(pages in 1u64..(64 << 18)) {
            let size = MemorySize::bytes(pages * PAGE_SIZE);
            let mut total = 0;
            for span in spans(size) {
                prop_assert_eq!(span.offset, total);
                total += span.len;
                let end = span.start + span.len;
                prop_assert!(end <= layout::MMIO_START || span.start >= layout::HIGH_RAM_START);
            }
            prop_assert_eq!(total, size.as_bytes());
        }
    }

    #[test]
    fn regions_cover_their_length() {
        let memory = GuestMemory::anonymous(MemorySize::bytes(17 * MIB)).unwrap();
        assert_eq!(
            memory.ram().iter().map(GuestMemoryRegion::len).sum::<u64>(),
            17 * MIB
        );
    }

    #[test]
    fn what_is_written_to_private_memory_stays_out_of_its_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 16 << 20]).unwrap();
        let file = Arc::new(file);
        let size = MemorySize::mib(16);
        let one = GuestMemory::private(size, file.clone()).unwrap();
        let two = GuestMemory::private(size, file).unwrap();
        one.ram().write_obj(9u8, GuestAddress(MIB)).unwrap();
        let read = |memory: &GuestMemory| memory.ram().read_obj::<u8>(GuestAddress(MIB)).unwrap();
        assert_eq!((read(&one), read(&two)), (9, 7));
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * MIB - 1).unwrap();
        let error = GuestMemory::private(MemorySize::mib(16), Arc::new(file)).unwrap_err();
        assert!(
            matches!(error, MemoryError::FileTooShort { .. }),
            "{error:?}"
        );
    }
}
