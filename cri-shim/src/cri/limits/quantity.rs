//! Quantities as Kubernetes writes them: `10M`, `1.5Gi`, `2e6`.

/// Maximum number of digits that are represented exactly.
const DIGITS: usize = 18;

/// Parses a quantity into whole units, rounded up; `None` if it is invalid, negative or too large.
pub(in crate::cri) fn parse(text: &str) -> Option<u64> {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = text.find(|c| !is_number(c)).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = [whole, fraction].concat();
    if digits.is_empty() || digits.len() > DIGITS {
        return None;
    }
    let digits: u128 = digits.parse().ok()?;
    let (factor, divisor) = factor(suffix)?;
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let units = digits
        .checked_mul(factor)?
        .div_ceil(scale.checked_mul(divisor)?);
    u64::try_from(units).ok()
}

/// Returns the multiplier and the divisor of a suffix.
fn factor(suffix: &str) -> Option<(u128, u128)> {
    let thousands = |power: u32| Some((1000_u128.pow(power), 1));
    match suffix {
        "" => thousands(0),
        "k" => thousands(1),
        "M" => thousands(2),
        "G" => thousands(3),
        "T" => thousands(4),
        "P" => thousands(5),
        "E" => thousands(6),
        "m" => Some((1, 1000)),
        "u" => Some((1, 1_000_000)),
        "n" => Some((1, 1_000_000_000)),
        _ => match suffix.strip_suffix('i') {
            Some(binary) => {
                let power = ["K", "M", "G", "T", "P", "E"]
                    .iter()
                    .position(|b| *b == binary)?;
                Some((1 << (10 * (power + 1)), 1))
            }
            None => {
                let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
                let power = 10_u128.checked_pow(exponent.unsigned_abs())?;
                Some(if exponent < 0 { (1, power) } else { (power, 1) })
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_kubernetes_own() {
        for (text, units) in [
            ("5000", 5000),
            ("1Gi", 1 << 30),
            ("2Ei", 2 << 60),
            ("10M", 10_000_000),
            ("1.5M", 1_500_000),
            (".5k", 500),
            ("1T", 1_000_000_000_000),
            ("10e6", 10_000_000),
            ("1E3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("1500m", 2),
            ("2e-1", 1),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Some(units), "{text}");
        }
        for bad in [
            "",
            "M",
            ".",
            "10X",
            "1.5.5",
            "-1",
            "+1",
            "1e",
            "e6",
            "1ki",
            "i",
            "100E",
            "1e99",
            "9999999999999999999",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text: String, number: u64, suffix in "[kMGTPEimune0-9.-]{0,4}") {
            let _ = parse(&text);
            let _ = parse(&format!("{number}{suffix}"));
        }
    }
}
