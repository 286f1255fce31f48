//! ACPI's power management timer (ACPI 6.5 §4.8.3.3): a counter of 24 bits, by which firmware
//! measures time before it knows any other clock.

use std::time::Duration;

/// Hertz.
const FREQUENCY: u128 = 3_579_545;
const NANOS: u128 = 1_000_000_000;
const BITS: u32 = 24;

/// Where the counter stood when its clock began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmTimer {
    first: u32,
}

impl PmTimer {
    /// Creates a timer that stands at `count` when its clock begins.
    #[must_use]
    pub const fn starting_at(count: u32) -> Self {
        Self { first: count }
    }

    /// Returns the counter, `elapsed` after its clock began.
    #[must_use]
    pub fn count(self, elapsed: Duration) -> u32 {
        // The longest duration times the frequency has 116 bits.
        let ticks = elapsed.as_nanos().wrapping_mul(FREQUENCY) / NANOS;
        let [a, b, c, d, ..] = ticks.to_le_bytes();
        let count = u32::from_le_bytes([a, b, c, d]).wrapping_add(self.first);
        count & ((1 << BITS) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_3579545_times_in_a_second_and_wraps_at_24_bits() {
        let timer = PmTimer::default();
        assert_eq!(timer.count(Duration::ZERO), 0);
        assert_eq!(timer.count(Duration::from_secs(1)), 3_579_545);
        assert_eq!(timer.count(Duration::from_micros(1)), 3);
        let ten = 35_795_450 % (1 << 24);
        assert_eq!(timer.count(Duration::from_secs(10)), ten);
        assert!(timer.count(Duration::MAX) < 1 << 24);
    }

    #[test]
    fn it_goes_on_where_it_stood() {
        let timer = PmTimer::starting_at((1 << 24) - 1);
        assert_eq!(timer.count(Duration::ZERO), (1 << 24) - 1);
        assert_eq!(timer.count(Duration::from_nanos(280)), 0);
        assert_eq!(
            PmTimer::starting_at(u32::MAX).count(Duration::ZERO),
            (1 << 24) - 1
        );
    }
}
