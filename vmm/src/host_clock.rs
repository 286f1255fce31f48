//! The clock of the host's kernel, which decides whether guests trust their time stamp counter.

use std::fs;
use std::sync::OnceLock;

/// The clock that the host's kernel uses.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// Whether the host's kernel uses another clock than the time stamp counter, once looked up.
static OTHER_CLOCK: OnceLock<bool> = OnceLock::new();

/// Looks up the host's clock, for VMs that are built when files can no longer be opened.
pub(crate) fn remember() {
    OTHER_CLOCK.get_or_init(read_clock);
}

/// Whether the host's kernel uses another clock than the time stamp counter.
pub(crate) fn is_other() -> bool {
    OTHER_CLOCK.get().copied().unwrap_or_else(read_clock)
}

fn read_clock() -> bool {
    fs::read_to_string(CLOCK_SOURCE).is_ok_and(|clock| !counts_by_tsc(&clock))
}

/// Whether the host's kernel uses the time stamp counter as its clock, by the clock's name: it does
/// where the counter is invariant, unless it has found the counter unstable.
fn counts_by_tsc(clock: &str) -> bool {
    matches!(
        clock.trim(),
        // The second one soon after the boot.
        "tsc" | "tsc-early" | "hyperv_clocksource_tsc_page"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_counts_by_the_time_stamp_counter_is_known_by_its_clocks_name() {
        for clock in ["tsc\n", "tsc-early\n", "hyperv_clocksource_tsc_page\n"] {
            assert!(counts_by_tsc(clock), "{clock}");
        }
        for clock in ["hpet\n", "acpi_pm\n", "kvm-clock\n", ""] {
            assert!(!counts_by_tsc(clock), "{clock}");
        }
    }
}
