//! Walks the tables as a kernel does.

use podvisor_devices::legacy::events::{Event, Events};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::MAX_CPUS;
use crate::boot::mptable;

/// The number of lines of the I/O APIC for windows.
const MAX_WINDOWS: u32 = layout::GSI_END - layout::FIRST_GSI;

fn platform(cpus: u8, windows: u32) -> Platform {
    let window = |number| MmioWindow {
        address: 0xc000_0000 + number * 4096,
        size: 4096,
        gsi: layout::FIRST_GSI + number,
    };
    Platform {
        cpus,
        windows: (0..windows).map(window).collect(),
        ..Platform::default()
    }
}

fn quad(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
}

/// The tables of a machine in guest memory, as a kernel reads them.
struct Walk {
    mem: GuestRam,
    /// The start and end of each table and the RSDP.
    ranges: Vec<(u64, u64)>,
}

impl Walk {
    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = GuestAddress(address);
        self.mem.read_slice(&mut bytes, at).unwrap();
        bytes
    }

    fn table(&mut self, address: u64, signature: &[u8; 4]) -> Vec<u8> {
        let len = word(&self.read(address, 8), 4);
        let bytes = self.read(address, len as usize);
        assert_eq!(&bytes[..4], signature);
        assert_eq!(sum(&bytes), 0, "{signature:?}");
        assert_eq!(&bytes[10..16], &OEM);
        self.ranges.push((address, address + u64::from(len)));
        bytes
    }
}

/// Returns FADT, MADT and DSDT, all of which must be complete and in the right place.
fn walk(platform: &Platform) -> [Vec<u8>; 3] {
    let mem = GuestRam::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
    let start = mptable::write(&mem, platform.enabled_cpus(), platform.cpus).unwrap();
    let rsdp = write(&mem, start, layout::HIMEM_START, platform)
        .unwrap()
        .rsdp;
    let mut walk = Walk {
        mem,
        ranges: vec![(layout::MP_TABLE, start), (rsdp, rsdp + 36)],
    };

    assert_eq!(rsdp % 16, 0);
    let bytes = walk.read(rsdp, 36);
    assert_eq!(&bytes[..8], b"RSD PTR ");
    assert_eq!((sum(&bytes[..20]), sum(&bytes)), (0, 0));
    assert_eq!((bytes[15], word(&bytes, 20)), (2, 36), "revision, length");
    let xsdt = walk.table(quad(&bytes, 24), b"XSDT");
    assert_eq!(xsdt.len(), 36 + 2 * 8);
    let fadt = walk.table(quad(&xsdt, 36), b"FACP");
    let madt = walk.table(quad(&xsdt, 44), b"APIC");
    let dsdt = walk.table(quad(&fadt, 140), b"DSDT");

    let mut ranges = walk.ranges;
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "{ranges:x?}");
    }
    // None of it is memory in the memory map.
    let last = ranges.last().unwrap();
    assert!(ranges[0].0 >= layout::EBDA_START && last.1 <= layout::HIMEM_START);
    [fadt, madt, dsdt]
}

/// Parses a MADT: APIC ids of enabled CPUs, and I/O APICs by id, address and first interrupt.
fn controllers(madt: &[u8]) -> (Vec<u8>, Vec<(u8, u32, u32)>) {
    assert_eq!(word(madt, 36), 0xfee0_0000);
    let (mut cpus, mut io_apics) = (Vec::new(), Vec::new());
    let mut rest = &madt[44..];
    while let [kind, length, ..] = *rest {
        match kind {
            0 => {
                assert_eq!((rest[2], word(rest, 4)), (rest[3], 1), "uid, enabled");
                cpus.push(rest[3]);
            }
            1 => io_apics.push((rest[2], word(rest, 4), word(rest, 8))),
            other => panic!("entry of type {other}"),
        }
        rest = &rest[usize::from(length)..];
    }
    assert!(rest.is_empty());
    (cpus, io_apics)
}

fn count(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).filter(|w| *w == what).count()
}

#[test]
fn the_hardware_is_reduced_and_none_of_a_pcs() {
    let [fadt, ..] = walk(&platform(1, 0));
    assert_eq!(fadt.len(), 276, "of ACPI 6.5");
    let flags = word(&fadt, 112);
    assert_ne!(flags & 1 << 20, 0, "HW_REDUCED_ACPI");
    let boot_arch = u16::from_le_bytes([fadt[109], fadt[110]]);
    // Bits: devices of ISA, 8042, no VGA, no MSI, no ASPM, no CMOS clock.
    assert_eq!(boot_arch & 0b10_1111, 0b10_0100);
}

#[test]
fn a_guest_ends_its_vm_by_the_registers_that_are_named() {
    let [fadt, _, dsdt] = walk(&platform(1, 0));
    let port = |at: usize| {
        assert_eq!(fadt[at..at + 4], [1, 8, 0, 1], "a port of a byte");
        u16::try_from(quad(&fadt, at + 4)).unwrap()
    };
    assert_ne!(word(&fadt, 112) & 1 << 10, 0, "RESET_REG_SUP");
    let (reset, value) = (port(116), fadt[128]);
    assert_eq!(
        power::request(reset, value),
        Some(power::PowerRequest::Reset)
    );

    let s5 = dsdt.windows(4).position(|w| w == b"_S5_").unwrap() + 4;
    // A package of 4 bytes with one element, a byte.
    let [0x12, 4, 1, 0x0a, kind] = dsdt[s5..s5 + 5] else {
        panic!("{:x?}", &dsdt[s5..s5 + 5]);
    };
    let (control, status) = (port(244), port(256));
    let value = 1 << 5 | kind << 2;
    assert_eq!(
        power::request(control, value),
        Some(power::PowerRequest::Shutdown)
    );
    assert_ne!(status, control);
    assert_eq!(power::request(status, 0x80), None, "clears WAK_STS");
}

#[test]
fn devices_are_there_if_the_machine_has_them() {
    let [_, _, none] = walk(&platform(1, 0));
    let mut all = platform(1, 2);
    (all.has_pci, all.has_serial) = (true, true);
    let [_, _, all] = walk(&all);
    for (what, times) in [(&b"LNRO0005"[..], 2), (b"PCI0", 1), (b"COM1", 1)] {
        assert_eq!((count(&none, what), count(&all, what)), (0, times));
    }
    // Small descriptor of ports: 16 bits, first, last, alignment, length.
    assert_eq!(count(&all, &[0x47, 1, 0xf8, 0x03, 0xf8, 0x03, 1, 8]), 1);
    assert_eq!(count(&all, &[0x47, 1, 0xf8, 0x0c, 0xf8, 0x0c, 1, 8]), 1);
}

#[test]
fn events_have_a_device_only_if_the_guest_is_told_of_any() {
    let [_, _, none] = walk(&platform(1, 0));
    let with = |events| {
        let [_, _, dsdt] = walk(&Platform {
            events,
            ..platform(1, 0)
        });
        dsdt
    };
    let button = with(Events::default().with(Event::PowerButton));
    let id = with(Events::default().with(Event::NewGeneration));
    for (what, times) in [
        (&b"ACPI0013"[..], [0, 1, 1]),
        // The device and its notification; PNP0C0C as an EISA ID.
        (b"PWRB", [0, 2, 0]),
        (&[0x41, 0xd0, 0x0c, 0x0c], [0, 1, 0]),
        (b"VGEN", [0, 0, 2]),
        (b"VM_Gen_Counter", [0, 0, 2]),
        // Where the ID lies: a package of two double words.
        (&[2, 0x0c, 0, 0xf0, 0x0f, 0, 0], [0, 0, 1]),
        // An extended interrupt descriptor: a consumer's, level, high, exclusive; line 1.
        (&[0x89, 6, 0, 0b0001, 1, 1, 0, 0, 0], [0, 1, 1]),
        // The region of one byte at the register's port.
        (&[b'E', b'R', b'E', b'G', 1, 0x0b, 0x10, 6], [0, 1, 1]),
        // The bits that the method checks, each against the register's copy.
        (&[0x7b, 0x60, 1, 0], [0, 1, 0]),
        (&[0x7b, 0x60, 0x0a, 2, 0], [0, 0, 1]),
        (&[0x86, b'P', b'W', b'R', b'B', 0x0a, 0x80], [0, 1, 0]),
    ] {
        let found = [&none, &button, &id].map(|dsdt| count(dsdt, what));
        assert_eq!(found, times, "{what:x?}");
    }
}

#[test]
fn slots_can_be_ejected_only_where_devices_come_and_go() {
    let with = |events, has_pci| {
        let platform = Platform {
            events,
            has_pci,
            ..platform(MAX_CPUS, 0)
        };
        let [_, _, dsdt] = walk(&platform);
        dsdt
    };
    let fixed = with(Events::default().with(Event::PowerButton), true);
    let slots = with(Events::default().with(Event::PciSlots), true);
    let no_bus = with(Events::default().with(Event::PciSlots), false);
    assert_eq!(count(&no_bus, b"PCNT"), 0);
    for (what, times) in [
        (&b"_EJ0"[..], [0, 31]),
        (b"_ADR", [0, 31]),
        // The device and its two notifications.
        (b"S001", [0, 3]),
        (b"S031", [0, 3]),
        (b"S032", [0, 0]),
        // Slot 31's address.
        (&[0x0c, 0, 0, 31, 0], [0, 1]),
        // Twelve ports after the register of events, in double words.
        (
            &[b'S', b'R', b'E', b'G', 1, 0x0b, 0x14, 6, 0x0a, 12],
            [0, 1],
        ),
        (&[b'S', b'R', b'E', b'G', 0x43], [0, 1]),
        // The method and its call by the event device, which compares its bit as the method does
        // that of slot 2.
        (b"PCNT", [0, 2]),
        (&[0x7b, 0x60, 0x0a, 4, 0], [0, 2]),
    ] {
        let found = [&fixed, &slots].map(|dsdt| count(dsdt, what));
        assert_eq!(found, times, "{what:x?}");
    }
}

#[test]
fn cpus_that_may_come_are_processors_that_say_whether_they_are_there() {
    let with = |events| {
        let platform = Platform {
            events,
            has_pci: true,
            boot_cpus: 2,
            ..platform(MAX_CPUS, 0)
        };
        let [_, madt, dsdt] = walk(&platform);
        (madt, dsdt)
    };
    let others = Events::default()
        .with(Event::PowerButton)
        .with(Event::PciSlots);
    let (all, fixed) = with(others);
    let (two, more) = with(others.with(Event::Cpus));
    // Enabled ones, and those that are not but can be brought online.
    let status = |madt: &[u8]| -> Vec<u32> {
        let entries = madt[44..].chunks_exact(8);
        let entries = entries.take(usize::from(MAX_CPUS));
        entries.map(|entry| word(entry, 4)).collect()
    };
    assert_eq!(status(&all), [1; MAX_CPUS as usize]);
    let expected: Vec<u32> = (0..MAX_CPUS).map(|id| if id < 2 { 1 } else { 2 }).collect();
    assert_eq!(status(&two), expected);
    for (what, times) in [
        (&b"ACPI0007\0"[..], [0, 254]),
        (b"_MAT", [0, 254]),
        // Two are there at boot, and need no notification.
        (b"C001", [0, 1]),
        (b"C002", [0, 2]),
        (b"C253", [0, 2]),
        // The entry of the MADT of CPU 253: enabled.
        (&[0, 8, 253, 253, 1, 0, 0, 0], [0, 1]),
        // The register after that of events, of one byte.
        (&[b'C', b'R', b'E', b'G', 1, 0x0b, 0x11, 6, 1], [0, 1]),
        (&[b'C', b'T', b'L', b'D', 0x0a, 2], [0, 1]),
        // The method and its call by the event device, which compares its bit as another method
        // does that of slot 3.
        (b"CCNT", [0, 2]),
        (&[0x7b, 0x60, 0x0a, 8, 0], [1, 2]),
    ] {
        let found = [&fixed, &more].map(|dsdt| count(dsdt, what));
        assert_eq!(found, times, "{what:x?}");
    }
}

#[test]
fn tables_that_would_reach_memory_are_refused() {
    let mem = GuestRam::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
    let limit = layout::HIMEM_START;
    let error = write(&mem, limit - 256, limit, &platform(1, 0)).unwrap_err();
    assert!(matches!(error, BootError::MemoryLayout), "{error}");
}

proptest! {
    #[test]
    fn all_cpus_and_windows_are_named(
        cpus in 1..=MAX_CPUS,
        windows in 0..=MAX_WINDOWS,
        has_pci in any::<bool>(),
        has_serial in any::<bool>(),
    ) {
        let platform = Platform { has_pci, has_serial, ..platform(cpus, windows) };
        let [_, madt, dsdt] = walk(&platform);
        let (ids, io_apics) = controllers(&madt);
        prop_assert_eq!(ids, (0..cpus).collect::<Vec<_>>());
        prop_assert_eq!(io_apics, vec![(cpus, 0xfec0_0000, 0)]);
        for window in &platform.windows {
            // Writable memory, and an exclusive edge interrupt, active high.
            let mut memory = vec![0x86, 9, 0, 1];
            memory.extend(window.address.to_le_bytes());
            memory.extend(window.size.to_le_bytes());
            memory.extend([0x89, 6, 0, 0b0011, 1]);
            memory.extend(window.gsi.to_le_bytes());
            prop_assert_eq!(count(&dsdt, &memory), 1);
        }
        prop_assert_eq!(count(&dsdt, b"LNRO0005\0"), platform.windows.len());
    }
}
