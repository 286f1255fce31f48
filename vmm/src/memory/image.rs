//! Files that are mapped into the guest's address space: read-only, and not counted as its memory.
//!
//! An image is two adjacent mappings, and two memslots: the file, whose pages are the host's page
//! cache, shared by all guests that have it; and zeroes up to the unit of the guest's kernel, which
//! are the host's single zero page. Neither can be written, by this process or by the guest: KVM
//! turns a guest's write into an MMIO access.

use std::fs::File;
use std::sync::Arc;

use podvisor_devices::pmem::PmemRegion;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use super::{GuestMemory, HOTPLUG_UNIT, MemoryError, MemoryShape, MemorySize, PAGE_SIZE, mapping};
use crate::layout;

impl MemoryShape {
    /// Returns the end of all memory, and of the hole for devices; saturates.
    pub(crate) fn end(self) -> u64 {
        let high = self.boot.as_bytes().saturating_sub(layout::MMIO_START);
        match self.hotplug_region() {
            Some(region) => region.start.saturating_add(region.len),
            None => layout::HIGH_RAM_START.saturating_add(high),
        }
    }

    /// Returns where images may lie: after all memory, and after the hole for devices.
    pub(crate) fn images_start(self) -> u64 {
        next_image(self.end())
    }
}

/// Returns where the next image may lie if all addresses below `end` are taken. Linux adds memory
/// by sections, which two images must not share.
pub(crate) fn next_image(end: u64) -> u64 {
    end.checked_next_multiple_of(HOTPLUG_UNIT)
        .unwrap_or(u64::MAX)
}

impl GuestMemory {
    /// Lets the guest, and devices on its behalf, read the `len` bytes of `file` at `region`.
    pub(crate) fn add_image(
        &mut self,
        region: PmemRegion,
        file: &Arc<File>,
        len: u64,
    ) -> Result<(), MemoryError> {
        let mapped = len.next_multiple_of(PAGE_SIZE);
        let padding = region.len.saturating_sub(mapped);
        self.add_part(region.start, mapped, |len| {
            mapping::shared(file.clone(), 0, len)
        })?;
        if padding > 0 {
            let start = region.start.saturating_add(mapped);
            self.add_part(start, padding, mapping::zeroes)?;
        }
        Ok(())
    }

    fn add_part(
        &mut self,
        start: u64,
        len: u64,
        map: impl FnOnce(usize) -> Result<MmapRegion<()>, MmapRegionError>,
    ) -> Result<(), MemoryError> {
        let size = MemorySize::bytes(len);
        let layout_error = || MemoryError::Layout { size, source: None };
        let len = usize::try_from(len).map_err(|_| layout_error())?;
        let mapping = map(len).map_err(|source| MemoryError::Map { size, source })?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or_else(layout_error)?;
        self.all =
            self.all
                .insert_region(Arc::new(region))
                .map_err(|source| MemoryError::Layout {
                    size,
                    source: Some(source),
                })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::{Bytes, GuestMemory as _};

    const MIB: u64 = 1 << 20;
    const REGION: PmemRegion = PmemRegion {
        start: 1 << 32,
        len: 2 * MIB,
    };

    fn with_image(content: &[u8]) -> GuestMemory {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let reader = Arc::new(file.reopen().unwrap());
        let shape = MemoryShape::fixed(MemorySize::mib(16));
        let mut memory = GuestMemory::anonymous(shape).unwrap();
        memory
            .add_image(REGION, &reader, content.len() as u64)
            .unwrap();
        memory
    }

    #[test]
    fn an_image_is_read_as_the_file_and_zeroes_behind_it() {
        for len in [1, 4096, 5000, 2 << 20] {
            let memory = with_image(&vec![7; len]);
            let mut bytes = vec![1; 2 << 20];
            let at = GuestAddress(REGION.start);
            memory.all().read_slice(&mut bytes, at).unwrap();
            assert!(bytes[..len].iter().all(|byte| *byte == 7), "{len}");
            assert!(bytes[len..].iter().all(|byte| *byte == 0), "{len}");
            let end = GuestAddress(REGION.start + REGION.len);
            assert!(!memory.all().address_in_range(end));
            assert!(!memory.ram().address_in_range(at), "it is no memory");
            assert_eq!(memory.boot_ram().num_regions(), 1);
        }
    }

    #[test]
    fn no_mapping_of_an_image_may_be_written() {
        let memory = with_image(&[7; 5000]);
        let images = memory.all().iter().skip(1);
        let protections: Vec<i32> = images.map(|region| region.prot()).collect();
        assert_eq!(protections, [libc::PROT_READ; 2]);
    }

    #[test]
    fn images_that_overlap_memory_or_each_other_are_refused() {
        let mut memory = with_image(&[7; 5000]);
        let file = Arc::new(File::open("/proc/self/exe").unwrap());
        for start in [0, REGION.start, REGION.start + 4096] {
            let region = PmemRegion { start, ..REGION };
            let error = memory.add_image(region, &file, 4096).unwrap_err();
            assert!(matches!(error, MemoryError::Layout { .. }), "{error}");
        }
    }

    #[test]
    fn images_lie_behind_all_memory() {
        let start = |boot, hotplug| {
            MemoryShape {
                boot: MemorySize::mib(boot),
                hotplug: MemorySize::mib(hotplug),
            }
            .images_start()
        };
        assert_eq!(start(128, 0), 4 << 30);
        assert_eq!(start(3 << 10, 0), 4 << 30);
        assert_eq!(start((3 << 10) + 1, 0), (4 << 30) + (128 << 20));
        assert_eq!(start(128, 128), (4 << 30) + (128 << 20));
        assert_eq!(next_image(u64::MAX), u64::MAX);
    }
}
