//! Guest physical address space and interrupt lines: the only place that defines what lies where.
//!
//! ```text
//! 0                 low memory: boot structures, below 640 KiB
//! 0x9fc00           MP floating pointer, in the last KiB below 640 KiB
//! 0xf0000           MP configuration table, ACPI and SMBIOS tables, where a PC has its ROM
//! 0xff000           VM generation ID
//! 0xffff0           reset vector of real mode
//! 1 MiB             kernel, initramfs
//! 3 GiB  MMIO_START windows of MMIO devices, or BARs of PCI devices
//! 4 GiB  HIGH_RAM   memory beyond the first 3 GiB
//! ```

/// Where the hole for devices starts: memory below it is contiguous from 0.
pub(crate) const MMIO_START: u64 = 0xc000_0000;
/// Where memory continues after the hole.
pub(crate) const HIGH_RAM_START: u64 = 1 << 32;

/// First window of a virtio-mmio device; windows follow each other.
pub(crate) const VIRTIO_MMIO_START: u64 = MMIO_START;
/// First BAR of a PCI device, until the guest moves it.
pub(crate) const PCI_BARS_START: u32 = MMIO_START as u32;

/// Global descriptor table of the boot CPU.
pub(crate) const GDT: u64 = 0x500;
/// PVH start info structure.
pub(crate) const PVH_START_INFO: u64 = 0x6000;
/// PVH module list.
pub(crate) const PVH_MODULES: u64 = 0x6040;
/// PVH memory map.
pub(crate) const PVH_MEMORY_MAP: u64 = 0x6100;
/// Linux's `struct boot_params` ("zero page").
pub(crate) const ZERO_PAGE: u64 = 0x7000;
/// Top of the boot stack, for entries that want one.
pub(crate) const BOOT_STACK: u64 = 0x8ff0;
/// Identity-mapping page tables for the 64-bit entry: PML4, PDPT, and four page directories.
pub(crate) const PAGE_TABLES: u64 = 0x9000;
/// The command line, NUL-terminated.
pub(crate) const CMDLINE: u64 = 0x2_0000;
/// Its maximum size, including the NUL: what Linux on x86-64 accepts (`COMMAND_LINE_SIZE`).
pub(crate) const CMDLINE_MAX: usize = 2048;
/// End of low memory as the firmware would report it; the MP floating pointer lies after it.
pub(crate) const EBDA_START: u64 = 0x9_fc00;
/// The MP configuration table, followed by the ACPI tables: in the same page for few CPUs and
/// devices. They are reserved together with everything from `EBDA_START` to 1 MiB.
pub(crate) const MP_TABLE: u64 = 0xf_0000;
/// The VM generation ID, on a page of its own behind all tables.
pub(crate) const GENERATION_ID: u64 = 0xf_f000;
/// Where real mode begins after a reset, behind all tables.
pub(crate) const RESET_VECTOR: u64 = 0xf_fff0;

/// Where kernels are loaded unless they say otherwise.
pub(crate) const HIMEM_START: u64 = 0x10_0000;

/// Three pages that Intel's KVM needs for real mode, and the page of the identity map.
pub(crate) const KVM_TSS: u64 = 0xfffb_d000;
pub(crate) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// I/O APIC and local APICs, where the hardware has them.
pub(crate) const IOAPIC: u32 = 0xfec0_0000;
pub(crate) const LOCAL_APIC: u32 = 0xfee0_0000;

/// First interrupt line (GSI) for virtio devices: lower ones belong to the legacy devices.
pub(crate) const FIRST_GSI: u32 = 5;
/// One past the last line of the I/O APIC that KVM emulates.
pub(crate) const GSI_END: u32 = 24;
