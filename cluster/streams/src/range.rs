//! Which bytes of a disk a request asks for: the header `Range` (RFC 9110, 14.2).
//!
//! A server may ignore what it does not understand, and answers with the whole then. So does this
//! for other units, several ranges, and what is malformed.

use std::ops::Range;

/// Which bytes are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// All.
    All,
    /// These, which exist; at least one.
    Part(Range<u64>),
    /// None that exist.
    Outside,
}

impl Asked {
    /// Reads the value of a header, for something that has `length` bytes.
    #[must_use]
    pub fn of(value: &[u8], length: u64) -> Self {
        match spec(value) {
            None => Self::All,
            Some(Spec::From(first)) if first < length => Self::Part(first..length),
            Some(Spec::Between(first, last)) if first < length => {
                Self::Part(first..last.saturating_add(1).min(length))
            }
            Some(Spec::Last(count)) if count > 0 && length > 0 => {
                Self::Part(length.saturating_sub(count)..length)
            }
            Some(_) => Self::Outside,
        }
    }
}

/// One range as it is asked for.
enum Spec {
    From(u64),
    Between(u64, u64),
    Last(u64),
}

fn spec(value: &[u8]) -> Option<Spec> {
    let (unit, range) = value.split_at_checked(6)?;
    if !unit.eq_ignore_ascii_case(b"bytes=") {
        return None;
    }
    let dash = range.iter().position(|byte| *byte == b'-')?;
    let (first, last) = (range.get(..dash)?, range.get(dash.checked_add(1)?..)?);
    match (first.trim_ascii_start(), last.trim_ascii_end()) {
        (b"", last) => Some(Spec::Last(number(last)?)),
        (first, b"") => Some(Spec::From(number(first)?)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(Spec::Between(first, last))
        }
    }
}

/// A number of digits; one that is too large stands for the largest: no disk has so many bytes.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| digit.saturating_sub(b'0'))?;
        Some(number.saturating_mul(10).saturating_add(digit.into()))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asked(value: &str, length: u64) -> Asked {
        Asked::of(value.as_bytes(), length)
    }

    #[test]
    fn a_range_is_cut_to_what_there_is() {
        for (value, part) in [
            ("bytes=0-0", 0..1),
            ("bytes=0-", 0..10),
            ("Bytes= 3-4 ", 3..5),
            ("bytes=9-99999999999999999999999", 9..10),
            ("bytes=-1", 9..10),
            ("bytes=-11", 0..10),
        ] {
            assert_eq!(asked(value, 10), Asked::Part(part), "{value}");
        }
    }

    #[test]
    fn what_lies_outside_is_told_apart_from_what_is_not_understood() {
        for value in [
            "bytes=10-",
            "bytes=10-12",
            "bytes=99999999999999999999999-",
            "bytes=-0",
        ] {
            assert_eq!(asked(value, 10), Asked::Outside, "{value}");
        }
        assert_eq!(asked("bytes=0-", 0), Asked::Outside);
        assert_eq!(asked("bytes=-5", 0), Asked::Outside);
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=5",
            "bytes=5-4",
            "bytes=0-1,3-4",
            "bytes=+1-2",
            "bytes=1-0x2",
            "bytes=--1",
            "lines=0-1",
            "b\u{e9}tes=0-1",
        ] {
            assert_eq!(asked(value, 10), Asked::All, "{value}");
        }
    }

    proptest! {
        #[test]
        fn a_part_has_bytes_and_they_exist(value: Vec<u8>, length: u64) {
            if let Asked::Part(part) = Asked::of(&value, length) {
                prop_assert!(part.start < part.end && part.end <= length);
            }
        }

        #[test]
        fn both_ends_are_in_a_range(first: u64, more in 0_u64..1 << 40, length: u64) {
            let last = first.saturating_add(more);
            let expected = match first < length {
                true => Asked::Part(first..last.saturating_add(1).min(length)),
                false => Asked::Outside,
            };
            prop_assert_eq!(asked(&format!("bytes={first}-{last}"), length), expected);
        }
    }
}
