//! The code at a PC's reset vector, `F000:FFF0` in real mode, where a firmware would begin.
//!
//! An operating system jumps there to restart the machine when it believes that nothing else would:
//! Linux with support for EFI does, where ACPI is hardware-reduced and there is no EFI.

use podvisor_devices::GuestRam;
use podvisor_devices::legacy::power::{I8042_COMMAND_PORT, I8042_RESET};

use super::BootError;
use crate::layout;

/// Pulses the reset line; halts for ever if that does not help.
const CODE: [u8; 7] = [
    0xb0,
    I8042_RESET, // mov al, 0xfe
    0xe6,
    I8042_COMMAND_PORT.to_le_bytes()[0], // out 0x64, al
    0xf4,                                // hlt
    0xeb,
    0xfd, // jmp to the hlt
];

/// Writes the code.
pub(super) fn write(mem: &GuestRam) -> Result<(), BootError> {
    super::write(mem, "the reset vector", layout::RESET_VECTOR, &CODE)
}
