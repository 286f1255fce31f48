//! The generic event device (ACPI 6.5 §5.6.9) and the devices that it notifies: their code in the
//! DSDT. The register is `podvisor_devices::legacy::events`.

use acpi_tables::aml::{
    And, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If,
    Interrupt, Local, Method, MethodCall, Notify, OpRegion, OpRegionSpace, Package, Path, Store,
    ZERO,
};
use acpi_tables::{Aml, AmlSink};
use podvisor_devices::legacy::events::{self, Event, Events};

use super::aml::{name, resources};
use crate::layout;

/// The notification of a button that was pressed (§4.8.2.2.1.3), and of a new generation ID.
const CHANGED: u8 = 0x80;

/// Adds the devices for these events, of which there is at least one.
pub(super) fn devices(known: Events, has_pci: bool, sink: &mut dyn AmlSink) {
    if known.has(Event::PowerButton) {
        Device::new(
            Path::new("PWRB"),
            vec![
                &name("_HID", &EISAName::new("PNP0C0C")),
                &name("_UID", &ZERO),
            ],
        )
        .to_aml_bytes(sink);
    }
    if known.has(Event::NewGeneration) {
        generation_id(sink);
    }
    event_device(known, has_pci, sink);
}

/// The VM generation ID (Microsoft, "Virtual Machine Generation ID"): where the 16 bytes lie.
fn generation_id(sink: &mut dyn AmlSink) {
    let (low, high) = (layout::GENERATION_ID as u32, 0u32);
    Device::new(
        Path::new("VGEN"),
        vec![
            &name("_HID", &"QEMUVGID"),
            &name("_CID", &"VM_Gen_Counter"),
            &name("_DDN", &"VM_Gen_Counter"),
            &name("ADDR", &Package::new(vec![&low, &high])),
        ],
    )
    .to_aml_bytes(sink);
}

/// Its interrupt's method reads the register once, which clears it, and notifies each device whose
/// event it has.
fn event_device(known: Events, has_pci: bool, sink: &mut dyn AmlSink) {
    let register = OpRegion::new(
        Path::new("EREG"),
        OpRegionSpace::SystemIO,
        &events::PORT,
        &1u8,
    );
    let bits = Field::new(
        Path::new("EREG"),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"EVTS", 8)],
    );
    let (pending, changed) = (Local(0), CHANGED);
    let (evts, button, generation) = (Path::new("EVTS"), Path::new("PWRB"), Path::new("VGEN"));
    let read = Store::new(&pending, &evts);
    let (button_bit, generation_bit) = (Event::PowerButton.bit(), Event::NewGeneration.bit());
    let has_button = And::new(&ZERO, &pending, &button_bit);
    let has_generation = And::new(&ZERO, &pending, &generation_bit);
    let (tell_button, tell_generation) = (
        Notify::new(&button, &changed),
        Notify::new(&generation, &changed),
    );
    let if_button = If::new(&has_button, vec![&tell_button]);
    let if_generation = If::new(&has_generation, vec![&tell_generation]);
    let slots_bit = Event::PciSlots.bit();
    let has_slots = And::new(&ZERO, &pending, &slots_bit);
    let tell_slots = MethodCall::new(Path::new(super::slots::METHOD), vec![]);
    let if_slots = If::new(&has_slots, vec![&tell_slots]);
    let cpus_bit = Event::Cpus.bit();
    let has_cpus = And::new(&ZERO, &pending, &cpus_bit);
    let tell_cpus = MethodCall::new(Path::new(super::cpus::METHOD), vec![]);
    let if_cpus = If::new(&has_cpus, vec![&tell_cpus]);
    let mut body: Vec<&dyn Aml> = vec![&read];
    if known.has(Event::PowerButton) {
        body.push(&if_button);
    }
    if known.has(Event::NewGeneration) {
        body.push(&if_generation);
    }
    if known.has(Event::PciSlots) && has_pci {
        body.push(&if_slots);
    }
    if known.has(Event::Cpus) {
        body.push(&if_cpus);
    }
    let (is_consumer, is_edge, is_low, is_shared) = (true, false, false, false);
    let line = Interrupt::new(is_consumer, is_edge, is_low, is_shared, events::IRQ);
    Device::new(
        Path::new("GED_"),
        vec![
            &name("_HID", &"ACPI0013"),
            &name("_UID", &ZERO),
            &resources(vec![&line]),
            &register,
            &bits,
            &Method::new(Path::new("_EVT"), 1, true, body),
        ],
    )
    .to_aml_bytes(sink);
}
