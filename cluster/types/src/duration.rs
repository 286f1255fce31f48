//! Durations as Go writes them: `5m0s`, `1h30m`, `1.5s`.

use std::time::Duration;

/// Reads a duration; `None` if it is none, is negative, or is longer than a `Duration` holds.
#[must_use]
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at_checked(end)?;
        let end = tail
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at_checked(end)?;
        total = total.checked_add(part(number, unit)?)?;
        rest = tail;
    }
    Some(total)
}

/// One number with its unit.
fn part(number: &str, unit: &str) -> Option<Duration> {
    let nanoseconds: u64 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut total = match whole {
        "" => 0,
        whole => whole.parse::<u64>().ok()?.checked_mul(nanoseconds)?,
    };
    let mut place = nanoseconds;
    for digit in fraction.chars() {
        place /= 10;
        total = total.checked_add(u64::from(digit.to_digit(10)?).checked_mul(place)?)?;
    }
    Some(Duration::from_nanos(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, milliseconds) in [
            ("0", 0),
            ("0s", 0),
            ("5m0s", 300_000),
            ("1h1m1s", 3_661_000),
            ("1.5s", 1_500),
            (".5s", 500),
            ("300ms", 300),
            ("+2s", 2_000),
        ] {
            assert_eq!(
                parse(text),
                Some(Duration::from_millis(milliseconds)),
                "{text}"
            );
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "+",
            "5",
            "s",
            "-1s",
            "1x",
            "1s2",
            "1..2s",
            ".s",
            "1d",
            "é",
            "9".repeat(40).as_str(),
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse(&format!("{}h", u64::MAX)), None);
    }
}
