//! Power-off of the guest.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use rustix::system::{RebootCommand, reboot};

/// The I/O port that podvisor's VMM watches for the guest's request to power off.
const POWER_OFF_PORT: u64 = 0x600;
/// The value to write there: sleep type 5 (soft off) and sleep enable, in the layout of ACPI's PM1
/// control register shifted right by eight.
const POWER_OFF_VALUE: u8 = 0x34;

/// Writes dirty data out and powers the guest off.
///
/// Where the port does nothing (another VMM), the guest resets instead, which ends a VM too.
/// Returns only if neither works: then the kernel panics because PID 1 exits, and its `panic=`
/// setting applies.
pub fn off() -> ExitCode {
    rustix::fs::sync();
    // After an error, the next method is tried.
    let _ = OpenOptions::new()
        .write(true)
        .open("/dev/port")
        .and_then(|port| port.write_all_at(&[POWER_OFF_VALUE], POWER_OFF_PORT));
    let error = reboot(RebootCommand::Restart);
    crate::log::emergency(&format!("cannot power off: {error:?}"));
    ExitCode::FAILURE
}
