//! Guest memory: how much, where in the guest's physical address space, what backs it on the host,
//! and which pages of it were written.
//!
//! * [`GuestMemory`] is all of a guest's memory, over anonymous mappings or over a file that is
//!   mapped privately (a clone of a snapshot). Devices get its [`GuestRam`]. Its [`MemoryShape`]
//!   says how much the guest boots with, and how much a memory device may add.
//! * `image.rs` adds files that the guest may read (virtio-pmem), which are not part of its memory.
//! * [`add_memslots`] registers mappings with KVM, before the guest runs.
//! * `pages.rs` finds the pages of which this process has its own copies, and `save.rs` writes them
//!   to a file. `huge.rs` gives that file huge pages.
//! * `dump.rs` writes memory to a file for debuggers.
//! * `written.rs` logs what is written from now on, for a migration.
//!
//! # How written pages are found
//!
//! By the host's page tables. Every writer to guest memory (a vCPU, a device by `vm-memory`, a raw
//! `preadv`, `io_uring`, vhost) goes through this process's page tables. In anonymous memory a page
//! that was never touched does not exist, and is zero. In a private mapping of a file a page that
//! was written is anonymous from then on, and one that was not is the file's. `/proc/self/pagemap`
//! distinguishes them, so that a snapshot needs neither KVM's dirty log, which splits huge pages
//! and costs a fault for each page, nor a bitmap that a writer may fail to update.
//!
//! # Huge pages
//!
//! Anonymous mappings start on a 2 MiB boundary and ask for transparent huge pages: with them a
//! booting guest takes a few nested page faults instead of thousands. Private mappings of a file
//! are aligned, too, in case the page cache has huge pages of it.

mod dump;
mod host;
mod huge;
mod image;
mod mapping;
mod pages;
mod save;
mod size;
mod slots;
mod written;

use std::fs::File;
use std::io;
use std::sync::Arc;

use podvisor_devices::mem::MemRegion;
use podvisor_devices::{GuestRam, WriteLog};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

pub(crate) use host::host_memory;
pub(crate) use huge::gather as gather_huge_pages;
pub(crate) use image::next_image;
pub(crate) use save::{CHUNK, SaveScope, runs_of_data};
pub(crate) use slots::add_memslots;
pub(crate) use written::{MemoryLog, PageSet};

pub use pages::PageMap;
pub use size::{MemorySize, ParseMemorySizeError};

use crate::layout;

/// The unit of mappings and of snapshots.
pub(crate) const PAGE_SIZE: u64 = 4096;

/// The unit of memory hotplug: Linux's memory block on x86.
pub(crate) const HOTPLUG_UNIT: u64 = 128 << 20;

/// Why guest memory could not be allocated or examined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// `mmap` failed.
    #[error("failed to map {size} of guest memory")]
    Map {
        /// The size.
        size: MemorySize,
        /// The operating system's answer.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The file of a snapshot is smaller than the memory that it backs.
    #[error("the memory file has {len} bytes, but {size} of guest memory are to come from it")]
    FileTooShort {
        /// The size of the memory.
        size: MemorySize,
        /// The file's length.
        len: u64,
    },
    /// The regions do not fit together: more memory than the address space holds.
    #[error("failed to create guest memory regions of {size}")]
    Layout {
        /// The size.
        size: MemorySize,
        /// `None` if the size itself is beyond the address space.
        #[source]
        source: Option<vm_memory::GuestRegionCollectionError>,
    },
    /// The kernel does not report which pages were written.
    #[error("failed to read /proc/self/pagemap, which tells written pages from others")]
    PageMap(#[source] io::Error),
    /// A page cannot be written to a snapshot's file, or read from it.
    #[error("failed to {what} guest memory at {address:#x}")]
    Transfer {
        /// The operation.
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
    /// Memory, and the images after it.
    all: GuestRam,
    shape: MemoryShape,
    /// The content of pages that were not written; `None` for zeroes.
    file: Option<Arc<File>>,
    /// What devices write, while a migration asks.
    writes: WriteLog,
    /// Opened when it is needed, unless the owner has opened it.
    page_map: Option<PageMap>,
}

/// How much memory a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryShape {
    /// The memory at boot.
    pub(crate) boot: MemorySize,
    /// The memory that may be plugged in later; zero if there is no memory device.
    pub(crate) hotplug: MemorySize,
}

impl MemoryShape {
    /// Memory whose size never changes.
    #[cfg(any(test, feature = "test-utils"))]
    pub(crate) const fn fixed(boot: MemorySize) -> Self {
        let hotplug = MemorySize::bytes(0);
        Self { boot, hotplug }
    }

    /// Returns all memory that the guest may ever have; saturates.
    pub(crate) fn total(self) -> MemorySize {
        MemorySize::bytes(self.boot.as_bytes().saturating_add(self.hotplug.as_bytes()))
    }

    /// Returns where memory is plugged in: after all other memory, and after the hole for devices.
    pub(crate) fn hotplug_region(self) -> Option<MemRegion> {
        let boot = self.boot.as_bytes();
        let high = boot.saturating_sub(layout::MMIO_START);
        let start = layout::HIGH_RAM_START.saturating_add(high);
        (self.hotplug.as_bytes() > 0).then(|| MemRegion {
            start: start
                .checked_next_multiple_of(HOTPLUG_UNIT)
                .unwrap_or(u64::MAX),
            len: self.hotplug.as_bytes(),
        })
    }
}

/// A part of guest memory without a hole, and its place in a snapshot's file, where spans follow
/// each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Guest physical address.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The offset in the file.
    pub(crate) offset: u64,
}

impl GuestMemory {
    /// Creates memory of zeroes.
    pub(crate) fn anonymous(shape: MemoryShape) -> Result<Self, MemoryError> {
        let ram = lay_out(shape, |_, len| mapping::anonymous(len))?;
        Ok(Self {
            all: ram.clone(),
            ram,
            shape,
            file: None,
            writes: WriteLog::default(),
            page_map: None,
        })
    }

    /// Creates memory with the content of `file`, which must have at least as many bytes as `shape`
    /// in total. The guest's writes stay in this process, and the file's large holes stay holes
    /// (up to [`mapping::MAX_REPLACED`] of each mapping). Memory
    /// to plug in of which the file is all hole is like [`Self::anonymous`] memory.
    pub(crate) fn private(shape: MemoryShape, file: Arc<File>) -> Result<Self, MemoryError> {
        let size = shape.total();
        let len = file.metadata().map_or(0, |meta| meta.len());
        if len < size.as_bytes() {
            return Err(MemoryError::FileTooShort { size, len });
        }
        let hotplug = shape.hotplug_region().map(|region| region.start);
        let ram = lay_out(shape, |span, len| {
            let holes = save::holes_of(&file, span);
            let is_hole = matches!(&*holes, [hole] if *hole == (0..span.len));
            match Some(span.start) == hotplug && is_hole {
                true => mapping::anonymous(len),
                false => mapping::private(file.clone(), span.offset, len, holes),
            }
        })?;
        Ok(Self {
            all: ram.clone(),
            ram,
            shape,
            file: Some(file),
            writes: WriteLog::default(),
            page_map: None,
        })
    }

    /// Uses this open `/proc/self/pagemap`.
    pub(crate) fn set_page_map(&mut self, page_map: Option<PageMap>) {
        self.page_map = page_map;
    }

    /// Returns the memory that the guest may write, and that a snapshot contains.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the memory as devices and KVM see it: the same, and images, whose mappings are
    /// read-only.
    pub(crate) fn all(&self) -> &GuestRam {
        &self.all
    }

    /// Returns the part that the guest boots with.
    pub(crate) fn boot_ram(&self) -> GuestRam {
        let Some(region) = self.shape.hotplug_region() else {
            return self.ram.clone();
        };
        // The region exists: `lay_out` added it.
        self.ram
            .remove_region(GuestAddress(region.start), region.len)
            .map_or_else(|_| self.ram.clone(), |(ram, _)| ram)
    }

    pub(crate) fn shape(&self) -> MemoryShape {
        self.shape
    }

    /// Returns the log that all devices tell of what they write here.
    pub(crate) fn writes(&self) -> &WriteLog {
        &self.writes
    }
}

/// Maps each span by `map` and adds it at the guest's address.
fn lay_out(
    shape: MemoryShape,
    mut map: impl FnMut(Span, usize) -> Result<MmapRegion<()>, MmapRegionError>,
) -> Result<GuestRam, MemoryError> {
    let size = shape.total();
    let mut regions = Vec::with_capacity(3);
    for span in spans(shape) {
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

/// Returns where memory lies: around the hole for devices, followed by the memory to plug in.
pub(crate) fn spans(shape: MemoryShape) -> impl Iterator<Item = Span> {
    let boot = shape.boot.as_bytes();
    let low = boot.min(layout::MMIO_START);
    let high = boot - low;
    let hotplug = shape.hotplug_region();
    let (start, len) = hotplug.map_or((0, 0), |region| (region.start, region.len));
    [
        (0, low, 0),
        (layout::HIGH_RAM_START, high, low),
        (start, len, boot),
    ]
    .into_iter()
    .filter(|(_, len, _)| *len > 0)
    .map(|(start, len, offset)| Span { start, len, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;
    use std::num::ParseIntError;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use vm_memory::{Bytes, GuestMemory as _, GuestMemoryRegion};

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_beyond_3_gib_goes_behind_the_hole() {
        let spans = |size: MemorySize| {
            let spans =
                spans(MemoryShape::fixed(size)).map(|span| (span.start, span.len, span.offset));
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
        // Only other tests map memory in this process right now: one of a few tries is undisturbed.
        let aligned = (0..20).any(|_| {
            let memory = GuestMemory::anonymous(MemoryShape::fixed(MemorySize::mib(64))).unwrap();
            memory
                .ram()
                .iter()
                .all(|region| region.as_ptr().addr().is_multiple_of(2 << 20))
        });
        assert!(aligned);
    }

    proptest! {
        #[test]
        fn spans_add_up_and_stay_out_of_the_hole(
            pages in 1u64..(64 << 18),
            units in 0u64..100,
        ) {
            let shape = MemoryShape {
                boot: MemorySize::bytes(pages * PAGE_SIZE),
                hotplug: MemorySize::bytes(units * HOTPLUG_UNIT),
            };
            let (mut total, mut last) = (0, 0);
            for span in spans(shape) {
                prop_assert!(span.start >= last);
                last = span.start + span.len;
                prop_assert_eq!(span.offset, total);
                total += span.len;
                let end = span.start + span.len;
                prop_assert!(end <= layout::MMIO_START || span.start >= layout::HIGH_RAM_START);
            }
            prop_assert_eq!(total, shape.total().as_bytes());
            if let Some(region) = shape.hotplug_region() {
                prop_assert!(region.start.is_multiple_of(HOTPLUG_UNIT));
                prop_assert_eq!(region.start + region.len, last);
            }
        }
    }

    #[test]
    fn regions_cover_their_length() {
        let memory =
            GuestMemory::anonymous(MemoryShape::fixed(MemorySize::bytes(17 * MIB))).unwrap();
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
        let size = MemoryShape::fixed(MemorySize::mib(16));
        let one = GuestMemory::private(size, file.clone()).unwrap();
        let two = GuestMemory::private(size, file).unwrap();
        one.ram().write_obj(9u8, GuestAddress(MIB)).unwrap();
        let read = |memory: &GuestMemory| memory.ram().read_obj::<u8>(GuestAddress(MIB)).unwrap();
        assert_eq!((read(&one), read(&two)), (9, 7));
    }

    /// The kernel's flags of the mapping at an address of this process.
    fn flags(address: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16);
            let covers = |(start, end)| Ok(number(start)? <= address && address < number(end)?);
            !matches!(range.map(covers), Some(Ok::<_, ParseIntError>(true)))
        });
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        flags.split(' ').map(str::to_owned).collect()
    }

    /// Whether the mapping at an address of this process has `MADV_HUGEPAGE`.
    fn asks_for_huge_pages(address: usize) -> bool {
        flags(address).contains(&"hg".to_owned())
    }

    #[test]
    fn memory_is_neither_in_children_nor_in_core_dumps() {
        let size = MemoryShape::fixed(MemorySize::mib(16));
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * MIB).unwrap();
        let all = [
            GuestMemory::anonymous(size).unwrap(),
            GuestMemory::private(size, Arc::new(file)).unwrap(),
        ];
        for memory in &all {
            let start = memory.ram().iter().next().unwrap().as_ptr().addr();
            for place in [start, start + (16 << 20) - 1] {
                let flags = flags(place);
                for wanted in ["dc", "dd"] {
                    assert!(flags.contains(&wanted.to_owned()), "{wanted}: {flags:?}");
                }
            }
        }
    }

    #[test]
    fn holes_of_a_file_stay_holes_and_are_zeroes() {
        // On tmpfs, where a mapping could fill them.
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let size = MemoryShape::fixed(MemorySize::mib(32));
        file.set_len(32 * MIB).unwrap();
        file.write_all_at(&[7; 4096], 9 * MIB).unwrap();
        let blocks = || file.metadata().unwrap().blocks();
        let before = blocks();
        let memory = GuestMemory::private(size, Arc::new(file.try_clone().unwrap())).unwrap();
        let read = |at: u64| memory.ram().read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([read(9 * MIB), read(12 * MIB), read(MIB)], [7, 0, 0]);
        for at in [0, 2 * MIB, 7 * MIB, 11 * MIB, 32 * MIB - 1] {
            memory.ram().write_obj(5u8, GuestAddress(at)).unwrap();
            assert_eq!(read(at), 5);
        }
        assert_eq!(read(9 * MIB), 7);
        assert_eq!(blocks(), before);
        if std::fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
            let start = memory.ram().iter().next().unwrap().as_ptr().addr();
            let has = |at: u64| asks_for_huge_pages(start + at as usize);
            assert_eq!(
                [has(2 * MIB), has(9 * MIB), has(12 * MIB)],
                [true, false, true]
            );
        }
        // Neither does anything come back of what was written before.
        let next = GuestMemory::private(size, Arc::new(file)).unwrap();
        assert_eq!(next.ram().read_obj::<u8>(GuestAddress(0)).unwrap(), 0);
    }

    #[test]
    fn a_file_of_many_holes_is_not_as_many_mappings() {
        const STEP: u64 = 4 * MIB;
        const HOLES: u64 = 2000;
        let file = tempfile::tempfile().unwrap();
        // Memory above the device hole, which is one mapping: a page of data in each second block.
        let below = layout::MMIO_START;
        let size = MemorySize::bytes(below + HOLES * STEP);
        file.set_len(size.as_bytes()).unwrap();
        // The last hole is the largest one.
        for number in 0..HOLES - 4 {
            file.write_all_at(&[7], below + number * STEP).unwrap();
        }
        let memory = GuestMemory::private(MemoryShape::fixed(size), Arc::new(file)).unwrap();
        let region = memory.ram().iter().last().unwrap();
        let start = region.as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let maps: Vec<(usize, bool)> = maps
            .lines()
            .map(|line| {
                let address = line.split('-').next().unwrap();
                let is_anonymous = line.split_whitespace().nth(4) == Some("0");
                (usize::from_str_radix(address, 16).unwrap(), is_anonymous)
            })
            .filter(|(address, _)| (start..start + region.len() as usize).contains(address))
            .collect();
        assert!(
            maps.len() <= 2 * mapping::MAX_REPLACED + 1,
            "{}",
            maps.len()
        );
        assert!(maps.last().unwrap().1, "the largest hole is replaced");
        for number in [0, 1, HOLES / 2, HOLES - 5] {
            let at = GuestAddress(layout::HIGH_RAM_START + number * STEP);
            let hole = GuestAddress(at.0 + 3 * MIB);
            let read = |at| memory.ram().read_obj::<u8>(at).unwrap();
            assert_eq!((read(at), read(hole)), (7, 0));
            memory.ram().write_obj(5u8, hole).unwrap();
            assert_eq!(read(hole), 5);
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * MIB - 1).unwrap();
        let error = GuestMemory::private(MemoryShape::fixed(MemorySize::mib(16)), Arc::new(file))
            .unwrap_err();
        assert!(
            matches!(error, MemoryError::FileTooShort { .. }),
            "{error:?}"
        );
    }
}
