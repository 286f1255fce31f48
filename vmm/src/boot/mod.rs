//! Loads a Linux kernel, its initramfs and its boot parameters into guest memory, and sets the boot
//! CPU's registers to start it.
//!
//! # How data enters and leaves
//!
//! A [`Kernel`] and an [`Initramfs`] are opened and identified while the VM is configured, so that
//! a wrong file is a configuration error. [`load`] reads them into guest memory; it needs nothing
//! of KVM and runs on its own thread in parallel to KVM's set-up. [`write_boot_params`] adds the
//! command line, the memory map and the tables that describe the machine ([`Platform`]), and
//! returns where and how the kernel is entered ([`Entry`]); [`boot_registers`] sets a vCPU up for
//! that.
//!
//! Two protocols are supported: Linux's 64-bit entry for its `vmlinux` and bzImages, and PVH for
//! other ELF kernels with Xen's `PHYS32_ENTRY` note.
//!
//! # What it must not know
//!
//! What devices do, pods, and where files come from. Kernel files are untrusted input: every number
//! in them is checked before it is used, and nothing is read to an address outside of guest memory.

mod acpi;
mod bzimage;
mod cpio;
mod elf;
mod error;
mod firmware;
mod identify;
mod initramfs;
mod kernel;
mod memory_map;
mod mptable;
mod pvh;
mod registers;
mod reset_vector;
mod smbios;
mod source;
mod zero_page;

pub use cpio::InitramfsBuilder;
pub use error::{BootError, KernelFault};
pub use firmware::Firmware;
pub use initramfs::Initramfs;
pub use kernel::Kernel;
pub(crate) use registers::boot_registers;
pub use smbios::Smbios;

use podvisor_devices::GuestRam;
use podvisor_devices::legacy::events::{Event, Events};
use vm_memory::{Bytes, GuestAddress};

use crate::layout;
use memory_map::MemoryMap;

/// What a kernel is told about the machine besides its memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Platform {
    /// The number of CPUs, including those that may be added.
    pub(crate) cpus: u8,
    /// The number of CPUs at boot.
    pub(crate) boot_cpus: u8,
    /// The virtio-mmio devices.
    pub(crate) windows: Vec<MmioWindow>,
    /// Whether there is a PCI bus.
    pub(crate) has_pci: bool,
    /// Whether there is a COM1.
    pub(crate) has_serial: bool,
    /// The events that the guest is told of.
    pub(crate) events: Events,
    /// What the machine is called; `None` if it has no SMBIOS tables.
    pub(crate) smbios: Option<Smbios>,
    /// Whether a firmware is booted, which describes the machine to what it boots.
    pub(crate) has_firmware: bool,
}

impl Platform {
    /// Returns the number of CPUs that firmware tables say are there: those at boot, if the guest
    /// is told of the others when they are there.
    fn enabled_cpus(&self) -> u8 {
        match self.events.has(Event::Cpus) {
            true => self.boot_cpus.min(self.cpus),
            false => self.cpus,
        }
    }

    /// Returns the end of the tables, below 1 MiB.
    fn tables_end(&self) -> u64 {
        match self.events.has(Event::NewGeneration) {
            true => layout::GENERATION_ID,
            false => layout::RESET_VECTOR,
        }
    }
}

/// The registers of a virtio-mmio device, and its interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmioWindow {
    pub(crate) address: u32,
    pub(crate) size: u32,
    /// The interrupt line.
    pub(crate) gsi: u32,
}

/// The number of boot CPUs that the MP table can list: APIC ids have 8 bits, 255 is broadcast and
/// one is the I/O APIC's.
pub(crate) const MAX_CPUS: u8 = 254;

/// How a kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// 32-bit protected mode without paging, EBX points at `hvm_start_info` (Xen's PVH).
    Pvh,
    /// 64-bit mode with an identity map, RSI points at `boot_params` (Linux's 64-bit entry).
    Linux64,
}

/// Where and how the boot CPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Physical address of the first instruction.
    pub(crate) address: u64,
    /// The state that the kernel expects there.
    pub(crate) protocol: Protocol,
}

/// Where the initramfs lies in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Module {
    address: u64,
    size: u64,
}

/// What the protocols pass to the kernel besides the memory map.
#[derive(Debug, Clone, Copy)]
struct BootParams {
    initramfs: Option<Module>,
    /// Length of the command line without its NUL.
    cmdline_len: usize,
    /// Where the ACPI tables start.
    rsdp: u64,
}

/// A kernel and an initramfs in guest memory, as [`write_boot_params`] needs them.
#[derive(Debug)]
pub(crate) struct Loaded {
    entry: Entry,
    map: MemoryMap,
    module: Option<Module>,
}

/// Reads the kernel and the initramfs into guest memory, which takes most of the time of building a
/// VM.
///
/// `mem` must be fresh: zeroes in the kernel's image (most importantly its BSS) are not written.
///
/// # Errors
///
/// Fails if a file cannot be read, is damaged, or does not fit into the guest's memory.
pub(crate) fn load(
    mem: &GuestRam,
    kernel: &Kernel,
    initramfs: Option<&Initramfs>,
) -> Result<Loaded, BootError> {
    let map = MemoryMap::of(mem)?;
    let footprint = kernel.footprint(map.low_end())?;
    let module = initramfs
        .map(|i| place_initramfs(i, &map, &footprint))
        .transpose()?;
    let entry = kernel.load(mem)?;
    if let (Some(initramfs), Some(module)) = (initramfs, module) {
        initramfs.load(mem, module.address)?;
    }
    Ok(Loaded { entry, map, module })
}

/// Writes the data that a loaded kernel finds in memory when it is entered, and returns the entry.
///
/// # Errors
///
/// Fails if the command line is too long or has control characters.
pub(crate) fn write_boot_params(
    mem: &GuestRam,
    kernel: &Kernel,
    loaded: &Loaded,
    cmdline: &str,
    platform: &Platform,
) -> Result<Entry, BootError> {
    let Loaded { entry, map, module } = loaded;
    check_cmdline(cmdline, Some(kernel))?;
    write(mem, "the command line", layout::CMDLINE, cmdline.as_bytes())?;
    let rsdp = write_tables(mem, platform)?;
    reset_vector::write(mem)?;
    registers::write_gdt(mem, entry.protocol)?;
    let params = BootParams {
        initramfs: *module,
        cmdline_len: cmdline.len(),
        rsdp,
    };
    match entry.protocol {
        Protocol::Pvh => pvh::write(mem, map, params)?,
        Protocol::Linux64 => {
            zero_page::write(mem, map, params, kernel.setup_header())?;
            zero_page::write_page_tables(mem, map)?;
        }
    }
    Ok(*entry)
}

/// Writes what describes the machine below 1 MiB; returns the address of the RSDP.
fn write_tables(mem: &GuestRam, platform: &Platform) -> Result<u64, BootError> {
    let limit = platform.tables_end();
    let smbios = |start| match &platform.smbios {
        Some(identity) => smbios::write(mem, start, limit, identity),
        None => Ok(start),
    };
    if platform.has_firmware {
        // EDK2 looks for the SMBIOS tables at this address alone, and for no MP table.
        let end = smbios(layout::MP_TABLE)?;
        return Ok(acpi::write(mem, end, limit, platform)?.rsdp);
    }
    let mp_table_end = mptable::write(mem, platform.enabled_cpus(), platform.cpus)?;
    let acpi = acpi::write(mem, mp_table_end, limit, platform)?;
    smbios(acpi.end)?;
    Ok(acpi.rsdp)
}

/// The memory that a kernel uses until it manages memory itself, and its constraints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Footprint {
    /// One past its last byte, BSS and room for decompression included.
    end: u64,
    /// One past the highest address that the initramfs may have.
    initramfs_end_max: u64,
}

fn place_initramfs(
    initramfs: &Initramfs,
    map: &MemoryMap,
    kernel: &Footprint,
) -> Result<Module, BootError> {
    const PAGE: u64 = 4096;
    let size = initramfs.size();
    let top = map.low_end().min(kernel.initramfs_end_max);
    // As high as possible: the kernel's own first allocations lie there anyway.
    let address = top.checked_sub(size).map(|a| a & !(PAGE - 1));
    match address {
        Some(address) if address >= kernel.end => Ok(Module { address, size }),
        _ => Err(BootError::MemoryTooSmall {
            needed: kernel.end.saturating_add(size).saturating_add(PAGE),
            available: top,
        }),
    }
}

/// Checks that the command line can be passed to this kernel, or to any if there is none.
///
/// # Errors
///
/// Fails if it is too long or has control characters.
pub(crate) fn check_cmdline(cmdline: &str, kernel: Option<&Kernel>) -> Result<(), BootError> {
    let max = kernel.map_or(layout::CMDLINE_MAX - 1, Kernel::cmdline_max);
    if cmdline.len() > max {
        return Err(BootError::CmdlineTooLong {
            len: cmdline.len(),
            max,
        });
    }
    if let Some(bad) = cmdline.chars().find(|c| c.is_control()) {
        return Err(BootError::CmdlineCharacter { character: bad });
    }
    Ok(())
}

/// Writes `bytes` at `address`; `what` is named in errors.
fn write(mem: &GuestRam, what: &'static str, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    mem.write_slice(bytes, GuestAddress(address))
        .map_err(|source| BootError::GuestMemory {
            what,
            address,
            source,
        })
}

#[cfg(any(test, feature = "test-utils"))]
pub mod testing;

#[cfg(test)]
mod tests;
