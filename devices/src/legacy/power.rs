//! The ports by which a guest ends its VM.
//!
//! * Port 0x64, the command port of the 8042 keyboard controller: command 0xfe pulses the CPU's
//!   reset line. It is what Linux does with `reboot=k`, and what it falls back to.
//! * Port 0x600: ACPI's hardware-reduced sleep control register (ACPI 6.5 §4.8.3.7), where
//!   `SLP_EN` with sleep type 5 is "soft off". A guest without ACPI writes 0x34 there itself.

/// The 8042's command and status port.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// The sleep control register.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;

/// System control port B, which says what is behind an NMI: nothing, as it reads as zero.
pub const SYSTEM_CONTROL_PORT: u16 = 0x61;

/// Pulse output line 0, which is reset.
const I8042_RESET: u8 = 0xfe;
/// `SLP_EN` (bit 5) with `SLP_TYP` 5 (bits 2 to 4): S5, soft off.
pub const SOFT_OFF: u8 = 1 << 5 | 5 << 2;

/// What a guest asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Start again from the reset vector.
    Reset,
    /// Power off.
    Shutdown,
}

/// What a byte that was written to a port asks for, if anything.
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
}
