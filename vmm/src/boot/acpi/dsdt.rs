//! The devices of the DSDT, in ACPI's machine language (AML).
//!
//! * virtio-mmio devices, which are also on the command line. A kernel that reads both takes them
//!   from here: these are found first, and a window is claimed only once.
//! * The host bridge of PCI, without which a kernel with ACPI scans no bus. It accesses
//!   configuration space by mechanism 1, like one without ACPI.
//!   Where devices come and go, it has its slots (`slots.rs`).
//! * COM1, whose interrupt a kernel would not know otherwise.
//! * CPUs, where they may become more (`cpus.rs`).
//! * The generic event device, with the power button and the generation ID (`events.rs`).

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, ONE,
    Package, Path, Scope, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use podvisor_devices::legacy::events::Event;
use podvisor_devices::legacy::{power, serial};
use podvisor_devices::pci;

use super::aml::{name, resources};
use super::{MmioWindow, Platform, cpus, events, slots};
use crate::layout;

/// Returns the code after the table's header.
pub(super) fn code(platform: &Platform) -> Vec<u8> {
    let mut devices = Vec::new();
    for (number, window) in (0u8..).zip(&platform.windows) {
        virtio(number, *window, &mut devices);
    }
    if platform.has_pci {
        host_bridge(platform.events.has(Event::PciSlots), &mut devices);
    }
    if platform.has_serial {
        com1(&mut devices);
    }
    if platform.events.has(Event::Cpus) {
        cpus::devices(platform.cpus, platform.enabled_cpus(), &mut devices);
    }
    if !platform.events.is_empty() {
        events::devices(platform.events, platform.has_pci, &mut devices);
    }
    let mut code = Vec::new();
    let soft_off = power::SLEEP_TYPE_SOFT_OFF;
    name("_S5_", &Package::new(vec![&soft_off])).to_aml_bytes(&mut code);
    code.extend(Scope::raw(Path::new("_SB_"), devices));
    code
}

/// A window of registers and an interrupt line.
fn virtio(number: u8, window: MmioWindow, sink: &mut dyn AmlSink) {
    let registers = Memory32Fixed::new(true, window.address, window.size);
    Device::new(
        Path::new(&format!("V{number:03}")),
        vec![
            &name("_HID", &"LNRO0005"),
            &name("_UID", &number),
            // Its memory accesses are coherent with those of CPUs.
            &name("_CCA", &ONE),
            &resources(vec![&registers, &edge(window.gsi)]),
        ],
    )
    .to_aml_bytes(sink);
}

/// A conventional PCI host bridge with only bus 0. Its devices interrupt by MSI-X: there is no
/// `_PRT`.
fn host_bridge(has_slots: bool, sink: &mut dyn AmlSink) {
    let bus = AddressSpace::new_bus_number(0u16, 0);
    let ports = pci::ADDRESS_PORT;
    let config = IO::new(ports, ports, 1, pci::PORTS as u8);
    let (first, last) = (layout::PCI_BARS_START, layout::IOAPIC - 1);
    let bars =
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None);
    let (id, resources) = (
        EISAName::new("PNP0A03"),
        resources(vec![&bus, &config, &bars]),
    );
    let names = ["_UID", "_SEG", "_BBN"].map(|of| name(of, &ZERO));
    let id = name("_HID", &id);
    let mut parts: Vec<&dyn Aml> = vec![&id];
    parts.extend(names.iter().map(|name| name as &dyn Aml));
    parts.push(&resources);
    if has_slots {
        parts.push(&slots::Slots);
    }
    Device::new(Path::new("PCI0"), parts).to_aml_bytes(sink);
}

fn com1(sink: &mut dyn AmlSink) {
    let ports = IO::new(serial::PORT, serial::PORT, 1, serial::PORTS as u8);
    Device::new(
        Path::new("COM1"),
        vec![
            &name("_HID", &EISAName::new("PNP0501")),
            &name("_UID", &ZERO),
            &resources(vec![&ports, &edge(serial::IRQ)]),
        ],
    )
    .to_aml_bytes(sink);
}

/// An exclusive, edge-triggered interrupt line of a device, like those of ISA in the MP table.
fn edge(gsi: u32) -> Interrupt {
    let (is_consumer, is_edge, is_low, is_shared) = (true, true, false, false);
    Interrupt::new(is_consumer, is_edge, is_low, is_shared, gsi)
}
