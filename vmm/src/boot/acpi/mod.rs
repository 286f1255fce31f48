//! ACPI tables (ACPI 6.5), for kernels that find CPUs and devices only by them, or power off by
//! them.
//!
//! [`write()`] puts them after the MP table, which describes the CPUs and interrupt lines to
//! kernels without ACPI. They describe a machine of the "hardware-reduced" kind (§4.1): no PIT, no
//! 8259s, no power management hardware except the sleep control register, by which a guest powers
//! off. `dsdt.rs` describes the devices; `aml.rs` is what their code has in common.

mod aml;
mod cpus;
mod dsdt;
mod events;
mod slots;

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use podvisor_devices::GuestRam;
use podvisor_devices::legacy::power;

use super::{BootError, MmioWindow, Platform, write as put};
use crate::layout;

const OEM: [u8; 6] = *b"PODVSR";
const OEM_TABLE: [u8; 8] = *b"PODVISOR";
const REVISION: u32 = 1;

/// The alignment at which a kernel without a pointer to the RSDP looks for it (§5.2.5.1).
const ALIGNMENT: u64 = 16;

/// `IAPC_BOOT_ARCH` (§5.2.9.3): neither video memory nor a CMOS clock; and, by bit 1, no 8042.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// Where the tables lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    /// The address of the RSDP.
    pub(super) rsdp: u64,
    /// The end of the last table.
    pub(super) end: u64,
}

/// Writes the tables from `start` on and below `limit`. A kernel that is started by another one
/// finds the RSDP only by its search of the last 128 KiB below 1 MiB (§5.2.5.1).
pub(super) fn write(
    mem: &GuestRam,
    start: u64,
    limit: u64,
    platform: &Platform,
) -> Result<Written, BootError> {
    let rsdp = start.next_multiple_of(ALIGNMENT);
    let bytes = tables(rsdp, platform);
    let end = rsdp.saturating_add(bytes.len() as u64);
    if end > limit {
        return Err(BootError::MemoryLayout);
    }
    put(mem, "the ACPI tables", rsdp, &bytes)?;
    Ok(Written { rsdp, end })
}

/// Returns the RSDP and all tables after it, as they lie at `address`.
fn tables(address: u64, platform: &Platform) -> Vec<u8> {
    let mut bytes = vec![0; Rsdp::len()];
    let mut add = |table: &dyn Aml| {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let at = address + bytes.len() as u64;
        table.to_aml_bytes(&mut bytes);
        at
    };
    let dsdt = add(&Dsdt(platform));
    let fadt = add(&fadt(dsdt));
    let madt = add(&madt(platform));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    // ACPI requires the FADT to be the first.
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = add(&xsdt);

    let mut rsdp = Vec::with_capacity(Rsdp::len());
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    bytes.splice(..rsdp.len(), rsdp);
    bytes
}

/// The table of devices (§5.2.11.1).
struct Dsdt<'a>(&'a Platform);

impl Aml for Dsdt<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const HEADER: u32 = 36;
        // From revision 2 on, integers have 64 bits.
        let mut table = Sdt::new(*b"DSDT", HEADER, 2, OEM, OEM_TABLE, REVISION);
        table.append_slice(&dsdt::code(self.0));
        sink.vec(table.as_slice());
    }
}

/// The fixed hardware (§5.2.9).
fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            port.into(),
        )
    };
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::Wbinvd)
        // Buttons are devices of the DSDT, if there are any.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    fadt.reset_reg = port(power::I8042_COMMAND_PORT);
    fadt.reset_value = power::I8042_RESET;
    fadt.sleep_control_reg = port(power::SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(power::SLEEP_STATUS_PORT);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"PODVISOR").into();
    fadt.finalize()
}

/// The interrupt controllers (§5.2.12): CPUs have the APIC ids 0, 1, 2, …, and lines of the I/O
/// APIC are interrupts of the same number, since nothing overrides it.
///
/// CPUs that are not added yet can be brought online if the guest is told of them when they are
/// there. Otherwise they are enabled: `maxcpus` makes Linux leave them offline.
fn madt(platform: &Platform) -> impl Aml {
    let address = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, address);
    let enabled = platform.enabled_cpus();
    for id in 0..platform.cpus {
        let status = match id < enabled {
            true => EnabledStatus::Enabled,
            false => EnabledStatus::DisabledOnlineCapable,
        };
        madt.add_structure(ProcessorLocalApic::new(id, id, status));
    }
    madt.add_structure(IoApic::new(platform.cpus, layout::IOAPIC, 0));
    madt
}

#[cfg(test)]
mod tests;
