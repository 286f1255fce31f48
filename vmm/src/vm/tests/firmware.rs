//! What a guest finds that is booted as a firmware.

use podvisor_devices::legacy::cmos;
use podvisor_devices::legacy::firmware::TIMER_PORT;

use super::*;
use crate::boot::Smbios;
use crate::vm::BuildError;
use crate::{ConfigError, Firmware, Transport};

/// A VM whose firmware is the guest that executes orders.
fn by_firmware() -> VmBuilder {
    let elf = Elf::new(OBEY, 0).with_pvh(u32::try_from(LOAD).unwrap());
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&elf.bytes()).unwrap();
    Vm::builder()
        .firmware(Firmware::from_file(file).unwrap())
        .transport(Transport::Pci)
        .memory(MemorySize::mib(32))
}

/// Reads a register of the clock, or a byte of its memory.
fn clock(guest: &Guest, register: u8) -> u8 {
    guest.output(cmos::PORT, register);
    guest.input(cmos::PORT + 1)
}

fn timer(guest: &Guest) -> u32 {
    guest.carry_out(Order::In32, TIMER_PORT.into(), 0)
}

fn bridge(guest: &Guest) -> u32 {
    guest.carry_out(Order::Out32, 0xcf8, 1 << 31);
    guest.carry_out(Order::In32, 0xcfc, 0)
}

#[test]
fn a_firmware_finds_its_host_bridge_a_timer_and_a_clock() {
    let guest = Guest::of(by_firmware());
    assert_eq!(bridge(&guest), 0x0d57_8086);
    let first = timer(&guest);
    assert!(first < 1 << 24);
    wait_for("another count of the timer", || timer(&guest) != first);
    assert!(guest.input(TIMER_PORT + 3) == 0, "24 bits");
    guest.output(TIMER_PORT, 0);
    assert_eq!(clock(&guest, 0x0d), 0x80, "the time is valid");
    let month = clock(&guest, 8);
    assert!((1..=0x12).contains(&month), "{month:#x}");
    guest.output(cmos::PORT, 0x40);
    guest.output(cmos::PORT + 1, 7);
    assert_eq!(clock(&guest, 0x40), 7);
    assert_eq!(guest.input(0x64), 0xfd, "other ports are as they were");
}

#[test]
fn other_guests_find_none_of_it() {
    let guest = Guest::start(|vm| vm.transport(Transport::Pci));
    assert_eq!(bridge(&guest), 0x0008_1b36);
    assert_eq!(timer(&guest), u32::MAX);
    assert_eq!((clock(&guest, 0x0d), clock(&guest, 0x40)), (0, 0));
}

#[test]
fn a_machine_that_booted_by_a_firmware_is_saved_and_restored() {
    let (_dir, place) = place();
    let guest = Guest::of(by_firmware());
    guest.output(cmos::PORT, 0x40);
    guest.output(cmos::PORT + 1, 7);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let again = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
    assert_eq!((clock(&again, 0x40), bridge(&again)), (7, 0x0d57_8086));
    assert!(timer(&again) < 1 << 24);
}

#[test]
fn smbios_tables_are_where_a_firmware_looks_for_them() {
    let vm = by_firmware().smbios(Smbios::new().serial("one"));
    let vm = vm.build().unwrap();
    let mut all = vec![0; 0x1_0000];
    assert_eq!(vm.read_memory(layout::MP_TABLE, &mut all), all.len());
    assert!(all.starts_with(b"_SM3_"));
    let mut paragraphs = all.chunks(16);
    assert!(paragraphs.any(|bytes| bytes.starts_with(b"RSD PTR ")));
    assert!(!all.chunks(4).any(|bytes| bytes == b"PCMP"), "no MP table");
}

#[test]
fn what_a_firmware_cannot_use_is_refused() {
    let mistake = |vm: VmBuilder| match vm.build().unwrap_err() {
        BuildError::Config(mut errors) => errors.0.remove(0),
        other => panic!("{other}"),
    };
    let transport = mistake(by_firmware().transport(Transport::Mmio));
    assert!(matches!(transport, ConfigError::FirmwareTransport));
    let initramfs = crate::InitramfsBuilder::new().build().unwrap();
    for vm in [
        by_firmware().kernel(kernel(OBEY)),
        by_firmware().cmdline("quiet"),
        by_firmware().initramfs(initramfs),
    ] {
        let error = mistake(vm);
        assert!(
            matches!(error, ConfigError::FirmwareAndKernel { .. }),
            "{error}"
        );
    }
}
