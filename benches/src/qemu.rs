//! QEMU, to which podvisor is compared: its arguments, for every guest.

use std::path::Path;

/// `microvm` without anything that the guests do not need: no PIT, PIC, RTC, option ROMs or ACPI.
/// Its devices are on MMIO.
pub(crate) const MICROVM: &str =
    "microvm,accel=kvm,acpi=off,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on";

/// A machine with PCI.
pub(crate) const Q35: &str = "q35,accel=kvm,usb=off,vmport=off";

/// What a guest boots. One vCPU.
#[derive(Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) memory_mib: u64,
    pub(crate) command_line: &'a str,
}

/// Returns the arguments that start `machine` with a guest and a serial console, and no other
/// device.
pub(crate) fn arguments(machine: &str, boot: &Boot<'_>) -> Vec<String> {
    let fixed = [
        "-cpu",
        "host",
        "-smp",
        "1",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        // Thread names distinguish the vCPU from the rest.
        "-name",
        "bench,debug-threads=on",
        "-serial",
        "stdio",
    ];
    let mut arguments: Vec<String> = fixed.map(str::to_owned).into();
    for (option, value) in [
        ("-machine", machine.to_owned()),
        ("-m", format!("{}M", boot.memory_mib)),
        ("-kernel", boot.kernel.display().to_string()),
        ("-initrd", boot.initramfs.display().to_string()),
        ("-append", boot.command_line.to_owned()),
    ] {
        arguments.extend([option.to_owned(), value]);
    }
    arguments
}
