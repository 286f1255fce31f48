//! The slots of bus 0 whose devices come and go while the guest runs: their code in the host
//! bridge's scope of the DSDT. The registers are those of `podvisor_devices::legacy::events`.
//!
//! Each slot is a device that can be ejected (ACPI 6.5 §6.3.3), which is how a guest knows that it
//! may change. One method reads which slots have changed, and notifies each of them (§5.6.6).

use acpi_tables::aml::{
    And, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local,
    Method, Notify, OpRegion, OpRegionSpace, Path, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use podvisor_devices::legacy::events;
use podvisor_devices::pci::SLOTS;

use super::aml::{Code, DEVICE_CHECK, name};

/// The method that tells the guest of slots, from anywhere.
pub(super) const METHOD: &str = "\\_SB_.PCI0.PCNT";

/// The notification (§5.6.6) by which a device is to be released.
const EJECT_REQUEST: u8 = 3;

/// The parts of the host bridge's scope.
pub(super) struct Slots;

impl Aml for Slots {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let port = events::PORT + u16::from(events::INSERTED);
        let len = events::PORTS_WITH_SLOTS - u16::from(events::INSERTED);
        OpRegion::new(Path::new("SREG"), OpRegionSpace::SystemIO, &port, &len).to_aml_bytes(sink);
        // In the order of the registers.
        let registers = [*b"SINS", *b"SASK", *b"SREL"];
        Field::new(
            Path::new("SREG"),
            FieldAccessType::DWord,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            registers
                .map(|register| FieldEntry::Named(register, 32))
                .to_vec(),
        )
        .to_aml_bytes(sink);
        // The host bridge itself is in slot 0.
        for slot in 1..SLOTS {
            device(slot, sink);
        }
        changes(sink);
    }
}

fn path(slot: u8) -> Path {
    Path::new(&format!("S{slot:03}"))
}

fn bit(slot: u8) -> u32 {
    1 << slot
}

fn device(slot: u8, sink: &mut dyn AmlSink) {
    let (released, bit) = (Path::new("SREL"), bit(slot));
    let release = Store::new(&released, &bit);
    Device::new(
        path(slot),
        vec![
            &name("_ADR", &(u32::from(slot) << 16)),
            &name("_SUN", &slot),
            &Method::new(Path::new("_EJ0"), 1, true, vec![&release]),
        ],
    )
    .to_aml_bytes(sink);
}

/// The method reads both registers once, which clears them.
fn changes(sink: &mut dyn AmlSink) {
    let mut body = Vec::new();
    for (local, register, notification) in [(0, "SINS", DEVICE_CHECK), (1, "SASK", EJECT_REQUEST)] {
        Store::new(&Local(local), &Path::new(register)).to_aml_bytes(&mut body);
        for slot in 1..SLOTS {
            let (local, bit, path) = (Local(local), bit(slot), path(slot));
            let has_changed = And::new(&ZERO, &local, &bit);
            let notify = Notify::new(&path, &notification);
            If::new(&has_changed, vec![&notify]).to_aml_bytes(&mut body);
        }
    }
    let body = Code(body);
    Method::new(Path::new("PCNT"), 0, true, vec![&body]).to_aml_bytes(sink);
}
