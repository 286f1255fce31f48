//! The MP table: CPUs, I/O APIC and interrupt lines (Intel MultiProcessor Specification 1.4).
//!
//! It is for kernels without ACPI, such as our own: with neither, Linux knows only one CPU and
//! falls back to virtual wire mode, without x2APIC and the TSC deadline timer.

use podvisor_devices::GuestRam;

use super::{BootError, MAX_CPUS, write as put};
use crate::layout;

const SPEC_1_4: u8 = 4;
/// Version registers of KVM's emulated APICs.
const LOCAL_APIC_VERSION: u8 = 0x14;
const IO_APIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;

/// Entry types (§4.3).
const ENTRY_PROCESSOR: u8 = 0;
const ENTRY_BUS: u8 = 1;
const ENTRY_IO_APIC: u8 = 2;
const ENTRY_IO_INTERRUPT: u8 = 3;
const ENTRY_LOCAL_INTERRUPT: u8 = 4;

/// Interrupt types (§4.3.4).
const INT: u8 = 0;
const NMI: u8 = 1;
const EXT_INT: u8 = 3;
/// Polarity and trigger mode as on the bus: active high and edge for ISA.
const CONFORMING: u16 = 0;

const CPU_ENABLED: u8 = 1;
const CPU_BOOT: u8 = 2;
const ALL_LOCAL_APICS: u8 = 0xff;

/// Writes the floating pointer and the configuration table for `cpus` CPUs with the APIC ids 0, 1,
/// 2, … The I/O APIC's is `io_apic`, after those of all CPUs that there may be. Returns where the
/// table ends.
pub(super) fn write(mem: &GuestRam, cpus: u8, io_apic: u8) -> Result<u64, BootError> {
    if cpus == 0 || cpus > MAX_CPUS {
        return Err(BootError::CpuCount { cpus });
    }
    put(
        mem,
        "the MP floating pointer",
        layout::EBDA_START,
        &floating_pointer(layout::MP_TABLE),
    )?;
    let table = configuration(cpus, io_apic);
    put(mem, "the MP table", layout::MP_TABLE, &table)?;
    Ok(layout::MP_TABLE + table.len() as u64)
}

/// The structure by which a kernel finds the table (§4.1).
fn floating_pointer(table: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..4].copy_from_slice(b"_MP_");
    bytes[4..8].copy_from_slice(&(table as u32).to_le_bytes());
    bytes[8] = 1; // in paragraphs of 16 bytes
    bytes[9] = SPEC_1_4;
    bytes[10] = checksum(&bytes);
    bytes
}

/// The configuration table: header (§4.2) and base entries (§4.3), in ascending order of type.
fn configuration(cpus: u8, io_apic_id: u8) -> Vec<u8> {
    const HEADER: usize = 44;
    let mut entries: u16 = 0;
    let mut body: Vec<u8> = Vec::new();
    let mut add = |bytes: &[u8]| {
        body.extend_from_slice(bytes);
        entries += 1;
    };

    for id in 0..cpus {
        let flags = CPU_ENABLED | if id == 0 { CPU_BOOT } else { 0 };
        let mut entry = [0; 20];
        entry[..4].copy_from_slice(&[ENTRY_PROCESSOR, id, LOCAL_APIC_VERSION, flags]);
        // Signature: family 6. Features: APIC and FPU. A kernel gets the real values from CPUID.
        entry[4..8].copy_from_slice(&0x600u32.to_le_bytes());
        entry[8..12].copy_from_slice(&0x201u32.to_le_bytes());
        add(&entry);
    }
    let [i, s, a, space, ..] = *b"ISA   ";
    add(&[ENTRY_BUS, ISA_BUS, i, s, a, space, space, space]);
    let [a, b, c, d] = layout::IOAPIC.to_le_bytes();
    let enabled = 1;
    add(&[
        ENTRY_IO_APIC,
        io_apic_id,
        IO_APIC_VERSION,
        enabled,
        a,
        b,
        c,
        d,
    ]);
    // Lines above 15 do not exist on an ISA bus; Linux accepts them nevertheless, and without an
    // entry a line stays unknown.
    for line in 0..layout::GSI_END as u8 {
        add(&interrupt(ENTRY_IO_INTERRUPT, INT, line, io_apic_id, line));
    }
    add(&interrupt(ENTRY_LOCAL_INTERRUPT, EXT_INT, 0, 0, 0));
    add(&interrupt(
        ENTRY_LOCAL_INTERRUPT,
        NMI,
        0,
        ALL_LOCAL_APICS,
        1,
    ));

    let length = (HEADER + body.len()) as u16;
    let mut table = Vec::with_capacity(usize::from(length));
    table.extend_from_slice(b"PCMP");
    table.extend_from_slice(&length.to_le_bytes());
    table.push(SPEC_1_4);
    table.push(0); // checksum, below
    table.extend_from_slice(b"PODVISOR"); // OEM id, 8 bytes
    table.extend_from_slice(b"MICROVM     "); // product id, 12 bytes
    table.extend_from_slice(&[0; 6]); // no OEM table
    table.extend_from_slice(&entries.to_le_bytes());
    table.extend_from_slice(&layout::LOCAL_APIC.to_le_bytes());
    table.extend_from_slice(&[0; 4]); // no extended table
    table.extend_from_slice(&body);
    table[7] = checksum(&table);
    table
}

/// An interrupt assignment entry (§4.3.4, §4.3.5).
fn interrupt(entry: u8, kind: u8, bus_line: u8, apic: u8, pin: u8) -> [u8; 8] {
    let [flags_low, flags_high] = CONFORMING.to_le_bytes();
    [
        entry, kind, flags_low, flags_high, ISA_BUS, bus_line, apic, pin,
    ]
}

/// Returns the byte that makes the sum of the bytes 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0u8, |sum, b| sum.wrapping_add(*b))
        .wrapping_neg()
}
