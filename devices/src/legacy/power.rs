//! The ports that a guest uses to reset or power off its VM, and those of a PC that a kernel polls
//! without checking whether the device exists.
//!
//! * Port 0x64, the command port of the 8042 keyboard controller: command 0xfe pulses the CPU's
//!   reset line. Linux does this with `reboot=k`, and as its last resort.
//! * Port 0x600: ACPI's hardware-reduced sleep control register (ACPI 6.5 §4.8.3.7), where
//!   `SLP_EN` with sleep type 5 is "soft off". A guest without ACPI writes 0x34 there itself.
//! * Port 0x61, system control port B; 0x70 and 0x71, index and data of the CMOS clock. These
//!   devices do not exist: reads return the values that end Linux's probe soonest.

/// The 8042's command and status port.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// The sleep control register.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// The sleep status register (§4.8.3.7), which ACPI requires in addition. It is not implemented: a
/// guest that sleeps does not wake.
pub const SLEEP_STATUS_PORT: u16 = 0x601;

/// System control port B.
const SYSTEM_CONTROL_PORT: u16 = 0x61;
/// Index and data port of the CMOS clock.
const CMOS_INDEX_PORT: u16 = 0x70;
const CMOS_DATA_PORT: u16 = 0x71;

/// The ports of this module, each a register of one byte.
pub const PORTS: [u16; 5] = [
    SYSTEM_CONTROL_PORT,
    I8042_COMMAND_PORT,
    CMOS_INDEX_PORT,
    CMOS_DATA_PORT,
    SLEEP_CONTROL_PORT,
];

/// Pulse output line 0, which is the reset line.
pub const I8042_RESET: u8 = 0xfe;
/// The sleep type of S5, soft off.
pub const SLEEP_TYPE_SOFT_OFF: u8 = 5;
/// `SLP_EN` (bit 5) with `SLP_TYP` 5 (bits 2 to 4).
pub const SOFT_OFF: u8 = 1 << 5 | SLEEP_TYPE_SOFT_OFF << 2;

/// A guest's request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Restart from the reset vector.
    Reset,
    /// Power off.
    Shutdown,
}

/// Returns the value that the guest reads at a port.
#[must_use]
pub const fn read(port: u16) -> u8 {
    match port {
        // Timer 2 has expired: Linux waits for it, without a timeout, if it must calibrate its
        // clock. The bits above are NMI sources, and there are none.
        SYSTEM_CONTROL_PORT => 1 << 5,
        // All ones, as without a device: an output buffer that is never empty immediately tells
        // Linux that there is no keyboard controller. Only "input buffer full" is clear, which
        // Linux waits for before it pulses the reset line.
        I8042_COMMAND_PORT => !(1 << 1),
        // No update in progress, which Linux waits for up to a second; and a 12-hour clock, which
        // it rejects.
        CMOS_INDEX_PORT | CMOS_DATA_PORT => 0,
        _ => 0xff,
    }
}

/// Returns the request that a write to a port makes, if any.
#[must_use]
pub fn request(port: u16, value: u8) -> Option<PowerRequest> {
    match (port, value) {
        (I8042_COMMAND_PORT, I8042_RESET) => Some(PowerRequest::Reset),
        (SLEEP_CONTROL_PORT, SOFT_OFF) => Some(PowerRequest::Shutdown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_two_commands_end_a_vm() {
        assert_eq!(request(0x64, 0xfe), Some(PowerRequest::Reset));
        assert_eq!(request(0x600, 0x34), Some(PowerRequest::Shutdown));
        let others = (0..=u16::MAX)
            .flat_map(|port| [0u8, 0x20, 0x34, 0xfe, 0xff].map(|value| (port, value)))
            .filter(|&(port, value)| request(port, value).is_some())
            .count();
        assert_eq!(others, 2);
    }

    #[test]
    fn no_probe_of_a_device_that_is_not_there_waits() {
        const TIMER_2_OUT: u8 = 1 << 5;
        const NMI_REASONS: u8 = 0b11 << 6;
        assert_eq!(read(0x61) & (TIMER_2_OUT | NMI_REASONS), TIMER_2_OUT);
        const OUTPUT_FULL: u8 = 1 << 0;
        const INPUT_FULL: u8 = 1 << 1;
        assert_eq!(read(0x64) & (OUTPUT_FULL | INPUT_FULL), OUTPUT_FULL);
        const UPDATE_IN_PROGRESS: u8 = 1 << 7;
        assert_eq!(read(0x71) & UPDATE_IN_PROGRESS, 0);
    }
}
