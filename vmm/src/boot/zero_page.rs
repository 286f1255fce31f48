//! The boot parameters of the 64-bit entry: `boot_params` (the "zero page") and an identity map
//! (Linux, Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use podvisor_devices::GuestRam;
use vm_memory::ByteValued;

use super::memory_map::{MemoryMap, RAM};
use super::{BootError, BootParams, write as put};
use crate::layout;

/// "HdrS".
const HEADER_MAGIC: u32 = 0x5372_6448;
const BOOT_FLAG: u16 = 0xaa55;
/// Our protocol version, for kernels (ELF) that do not state theirs.
const BOOT_PROTOCOL_VERSION: u16 = 0x20c;
/// `type_of_loader`: not a registered one.
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;

const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;
const PAGE: u64 = 4096;
const ENTRIES: u64 = 512;

/// Writes the zero page. `header` is the bzImage's own, which an ELF kernel does not have.
pub(super) fn write(
    mem: &GuestRam,
    map: &MemoryMap,
    boot: BootParams,
    header: Option<&setup_header>,
) -> Result<(), BootError> {
    let mut params = boot_params {
        acpi_rsdp_addr: boot.rsdp,
        hdr: header.copied().unwrap_or(setup_header {
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            version: BOOT_PROTOCOL_VERSION,
            loadflags: LOADED_HIGH,
            ..Default::default()
        }),
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    // Lists that only a boot loader can fill in.
    params.hdr.setup_data = 0;
    // All our addresses are below 4 GiB: low memory ends below the hole for devices.
    params.hdr.cmd_line_ptr = below_4g(layout::CMDLINE)?;
    params.hdr.cmdline_size = u32::try_from(boot.cmdline_len).unwrap_or(u32::MAX);
    if let Some(module) = boot.initramfs {
        params.hdr.ramdisk_image = below_4g(module.address)?;
        params.hdr.ramdisk_size = below_4g(module.size)?;
    }

    let mut table = [boot_e820_entry::default(); 128];
    let ranges = map.ranges();
    if ranges.len() > table.len() {
        return Err(BootError::MemoryLayout);
    }
    for (entry, range) in table.iter_mut().zip(ranges) {
        *entry = boot_e820_entry {
            addr: range.start,
            size: range.size,
            type_: RAM,
        };
        params.e820_entries += 1;
    }
    params.e820_table = table;
    put(mem, "the zero page", layout::ZERO_PAGE, params.as_slice())
}

/// Maps the memory below the hole one to one, by 2 MiB pages: one directory per GiB.
pub(super) fn write_page_tables(mem: &GuestRam, map: &MemoryMap) -> Result<(), BootError> {
    let directories = map.low_end().div_ceil(1 << 30);
    let table = |index: u64| layout::PAGE_TABLES + index * PAGE;
    let entries = |what, address, values: &mut dyn Iterator<Item = u64>| {
        let bytes: Vec<u8> = values.flat_map(u64::to_le_bytes).collect();
        put(mem, what, address, &bytes)
    };

    let mut root = std::iter::once(table(1) | PRESENT_WRITABLE);
    entries("the root page table", table(0), &mut root)?;
    let mut pointers = (0..directories).map(|i| table(2 + i) | PRESENT_WRITABLE);
    entries("the page directory pointers", table(1), &mut pointers)?;
    let mut pages = (0..directories * ENTRIES).map(|i| i << 21 | LARGE_PAGE | PRESENT_WRITABLE);
    entries("the page directories", table(2), &mut pages)
}

fn below_4g(value: u64) -> Result<u32, BootError> {
    u32::try_from(value).map_err(|_| BootError::MemoryLayout)
}
