//! CPUs that come while the guest runs: their code in the DSDT. The register with their number is
//! that of `podvisor_devices::legacy::events`.
//!
//! Each CPU that there may be is a processor device (ACPI 6.5 §8.4), which says whether it is there
//! (§6.3.7), and which entry of the MADT it has then (§6.2.10). One method finds the CPUs that are
//! new, and notifies each of them (§5.6.6). Which ones the guest was told of is a name of its own:
//! it lies in guest memory, and so moves with it.

use acpi_tables::aml::{
    BufferData, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule,
    GreaterEqual, If, LessThan, Local, Method, Notify, OpRegion, OpRegionSpace, Path, Return,
    Store, ZERO,
};
use acpi_tables::madt::{EnabledStatus, ProcessorLocalApic};
use acpi_tables::{Aml, AmlSink};
use podvisor_devices::legacy::events;

use super::aml::{Code, DEVICE_CHECK, name};

/// The method that tells the guest of CPUs, from anywhere.
pub(super) const METHOD: &str = "\\_SB_.CCNT";

/// `_STA` of a device that is present, enabled, shown and functioning (§6.3.7).
const PRESENT: u8 = 0xf;

/// Adds a device for each CPU, of which the first ones are there at boot.
pub(super) fn devices(cpus: u8, at_boot: u8, sink: &mut dyn AmlSink) {
    let port = events::PORT + u16::from(events::CPUS);
    OpRegion::new(Path::new("CREG"), OpRegionSpace::SystemIO, &port, &1u8).to_aml_bytes(sink);
    Field::new(
        Path::new("CREG"),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"CPUS", 8)],
    )
    .to_aml_bytes(sink);
    name("CTLD", &at_boot).to_aml_bytes(sink);
    for id in 0..cpus {
        device(id, sink);
    }
    changes(cpus, at_boot, sink);
}

fn path(id: u8) -> Path {
    Path::new(&format!("C{id:03}"))
}

fn device(id: u8, sink: &mut dyn AmlSink) {
    let count = Path::new("CPUS");
    let is_there = LessThan::new(&id, &count);
    let (present, absent) = (Return::new(&PRESENT), Return::new(&ZERO));
    let if_there = If::new(&is_there, vec![&present]);
    let mut entry = Vec::new();
    ProcessorLocalApic::new(id, id, EnabledStatus::Enabled).to_aml_bytes(&mut entry);
    Device::new(
        path(id),
        vec![
            &name("_HID", &"ACPI0007"),
            &name("_UID", &id),
            &Method::new(Path::new("_STA"), 0, false, vec![&if_there, &absent]),
            &name("_MAT", &BufferData::new(entry)),
        ],
    )
    .to_aml_bytes(sink);
}

fn changes(cpus: u8, at_boot: u8, sink: &mut dyn AmlSink) {
    let mut body = Vec::new();
    let (count, told) = (Local(0), Path::new("CTLD"));
    Store::new(&count, &Path::new("CPUS")).to_aml_bytes(&mut body);
    for id in at_boot..cpus {
        let path = path(id);
        let is_there = LessThan::new(&id, &count);
        let is_new = GreaterEqual::new(&id, &told);
        let notify = Notify::new(&path, &DEVICE_CHECK);
        let if_new = If::new(&is_new, vec![&notify]);
        If::new(&is_there, vec![&if_new]).to_aml_bytes(&mut body);
    }
    Store::new(&told, &count).to_aml_bytes(&mut body);
    let body = Code(body);
    Method::new(Path::new("CCNT"), 0, true, vec![&body]).to_aml_bytes(sink);
}
