//! Parsing and formatting of sizes.

use podvisor_vmm::{MemorySize, ParseMemorySizeError};

/// Parses a size such as `512M` or `1.5g`; see [`MemorySize`].
pub(super) fn parse(text: &str) -> Result<u64, ParseMemorySizeError> {
    text.parse().map(MemorySize::as_bytes)
}

/// Formats a size in bytes with three digits and a suitable decimal unit, as docker does.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let mut unit = 0;
    // Three digits are shown, far fewer than a double has.
    #[allow(clippy::cast_precision_loss)]
    let mut value = bytes as f64;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let name = UNITS.get(unit).copied().unwrap_or_default();
    format!("{value:.decimals$}{name}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_shown_with_three_digits() {
        for (bytes, text) in [
            (0, "0B"),
            (999, "999B"),
            (1000, "1.00kB"),
            (4_260_000, "4.26MB"),
            (77_900_000, "77.9MB"),
            (999_949, "1.00MB"),
            (1_234_000_000, "1.23GB"),
            (u64::MAX, "18.4EB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,30}") {
            let _ = parse(&text);
        }

        #[test]
        fn a_number_with_a_unit_is_that_many_bytes(number in 0u64..1 << 24, unit in 0usize..5) {
            let text = format!("{number}{}", ["", "k", "M", "g", "T"][unit]);
            prop_assert_eq!(parse(&text), Ok(number << (10 * unit)));
        }
    }
}
