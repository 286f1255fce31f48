//! The boot parameters of a PVH kernel: `hvm_start_info` and what it points at (Xen,
//! public/arch-x86/hvm/start_info.h).

use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use podvisor_devices::GuestRam;
use vm_memory::ByteValued;

use super::memory_map::{MemoryMap, RAM};
use super::{BootError, BootParams, write as put};
use crate::layout;

/// `XEN_HVM_START_MAGIC_VALUE`.
const MAGIC: u32 = 0x336e_c578;
/// The first version with a memory map.
const VERSION: u32 = 1;

/// Writes the start info, its module list and its memory map.
pub(super) fn write(mem: &GuestRam, map: &MemoryMap, params: BootParams) -> Result<(), BootError> {
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        cmdline_paddr: layout::CMDLINE,
        memmap_paddr: layout::PVH_MEMORY_MAP,
        rsdp_paddr: params.rsdp,
        ..Default::default()
    };
    if let Some(module) = params.initramfs {
        let entry = hvm_modlist_entry {
            paddr: module.address,
            size: module.size,
            ..Default::default()
        };
        put(
            mem,
            "the PVH module list",
            layout::PVH_MODULES,
            entry.as_slice(),
        )?;
        info.nr_modules = 1;
        info.modlist_paddr = layout::PVH_MODULES;
    }

    let mut table = Vec::new();
    for range in map.ranges() {
        let entry = hvm_memmap_table_entry {
            addr: range.start,
            size: range.size,
            type_: RAM,
            reserved: 0,
        };
        table.extend_from_slice(entry.as_slice());
        info.memmap_entries += 1;
    }
    let room = layout::ZERO_PAGE - layout::PVH_MEMORY_MAP;
    if table.len() as u64 > room {
        return Err(BootError::MemoryLayout);
    }
    put(mem, "the PVH memory map", layout::PVH_MEMORY_MAP, &table)?;
    put(
        mem,
        "the PVH start info",
        layout::PVH_START_INFO,
        info.as_slice(),
    )
}
