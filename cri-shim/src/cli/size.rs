//! Parsing and formatting of sizes.

/// Error of an invalid size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SizeError {
    /// Not a number with a known unit.
    #[error("`{0}` is no size; write a number and a unit, such as 512M or 2G")]
    Malformed(String),
    /// More bytes than fit 64 bits.
    #[error("`{0}` is more than any machine has")]
    TooLarge(String),
}

/// Parses a size such as `512M` or `1.5g`: units b, k, m, g and t in either case, powers of 1024,
/// optionally followed by `B` or `iB`. Without a unit the number is bytes, as in docker. Parts of a
/// byte are left out.
pub(super) fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let (number, rest) = digits(text);
    let (fraction, unit) = match rest.strip_prefix('.') {
        Some(rest) => digits(rest),
        None => ("0", rest),
    };
    if number.is_empty() || fraction.is_empty() {
        return Err(malformed());
    }
    let too_large = || SizeError::TooLarge(text.to_owned());
    let number: u64 = number.parse().map_err(|_| too_large())?;
    let unit = unit.to_ascii_lowercase();
    let shift = match unit.as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(malformed()),
    };
    let whole = number.checked_mul(1 << shift).ok_or_else(too_large)?;
    whole
        .checked_add(part(fraction, shift))
        .ok_or_else(too_large)
}

/// Splits a text after its first digits.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Returns the decimal fraction with these digits of `1 << shift`, rounded down. Digits beyond the
/// eighteenth are less than a byte of any unit.
fn part(fraction: &str, shift: u32) -> u64 {
    let (mut number, mut of) = (0_u128, 1_u128);
    for digit in fraction.bytes().take(18) {
        number = number * 10 + u128::from(digit - b'0');
        of *= 10;
    }
    u64::try_from((number << shift) / of).unwrap_or_default()
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
    fn units_are_powers_of_1024_in_either_case() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("2g", 2 << 30),
            ("1GiB", 1 << 30),
            ("1kb", 1 << 10),
            ("3T", 3 << 40),
            ("65536", 65536),
            ("65536b", 65536),
            ("1.5g", 3 << 29),
            ("0.25KiB", 256),
            ("1.99", 1),
            ("0.9999999999999999999999999t", (1 << 40) - 1),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", "M", "-1M", ".5G", "1.G", "1.2.3G", "1 G", "1X", "1MM", "0x10", "١M",
        ] {
            assert!(
                matches!(parse(text), Err(SizeError::Malformed(_))),
                "{text}"
            );
        }
        for text in ["99999999999999999999", "18446744073709551615k"] {
            assert!(matches!(parse(text), Err(SizeError::TooLarge(_))), "{text}");
        }
    }

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
