//! The times that users give: `--since` and `--until` of `logs` and `events`, `--filter until=` of
//! `prune`.

use std::time::{Duration, SystemTime};

/// Length of a date and a time to the second, without a fraction and a zone.
const TO_THE_SECOND: usize = "2026-01-31T12:00:00".len();

/// What users are told to write.
const USAGE: &str = "write an age (10m, 1h30m), a time (2026-01-31T12:00:00Z, \
                     2026-01-31T14:00:00+02:00; UTC without a zone), or seconds since 1970";

const OUT_OF_RANGE: &str = "the time is out of range";

/// Parses a time as [`parse_at`] does, with ages before the present.
pub(in crate::cli) fn parse_time(text: &str) -> Result<SystemTime, String> {
    parse_at(text, SystemTime::now())
}

/// Parses an age before `now`, a date and time as in RFC 3339, or seconds since 1970. Without a
/// zone a time is UTC, as all times are that podvisor prints.
pub(in crate::cli) fn parse_at(text: &str, now: SystemTime) -> Result<SystemTime, String> {
    if text.starts_with(|first: char| first.is_ascii_digit())
        && text.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    {
        return parse_seconds(text);
    }
    if let Ok(age) = humantime::parse_duration(text) {
        // All that is shown or removed is younger than that.
        return Ok(now.checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH));
    }
    parse_rfc3339(text).ok_or_else(|| USAGE.to_owned())
}

/// Parses `SECONDS[.FRACTION]` since 1970.
fn parse_seconds(text: &str) -> Result<SystemTime, String> {
    let (seconds, nanos) = match text.split_once('.') {
        Some((seconds, fraction)) => (seconds, parse_fraction(fraction).ok_or(USAGE)?),
        None => (text, 0),
    };
    // Only digits, of which there may be too many.
    let seconds = seconds.parse().map_err(|_| OUT_OF_RANGE)?;
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos));
    time.ok_or_else(|| OUT_OF_RANGE.to_owned())
}

/// Parses `DATE(T| )TIME[.FRACTION][ZONE]`.
fn parse_rfc3339(text: &str) -> Option<SystemTime> {
    let (to_the_second, rest) = text.split_at_checked(TO_THE_SECOND)?;
    let time = humantime::parse_rfc3339_weak(to_the_second).ok()?;
    let (nanos, zone) = match rest.strip_prefix('.') {
        Some(rest) => {
            let end = rest.find(|c: char| !c.is_ascii_digit());
            let (fraction, zone) = rest.split_at_checked(end.unwrap_or(rest.len()))?;
            (parse_fraction(fraction)?, zone)
        }
        None => (0, rest),
    };
    let time = time.checked_add(Duration::from_nanos(nanos.into()))?;
    let (is_east, offset) = parse_zone(zone)?;
    match is_east {
        true => time.checked_sub(offset),
        false => time.checked_add(offset),
    }
}

/// Parses the digits after the point, and returns nanoseconds; further digits do not count.
fn parse_fraction(digits: &str) -> Option<u32> {
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let nanos = digits.bytes().chain(std::iter::repeat(b'0')).take(9);
    Some(nanos.fold(0, |nanos, digit| nanos * 10 + u32::from(digit - b'0')))
}

/// Parses `Z`, `+02:00`, `-0500`, or nothing, which is UTC; returns whether the zone is east of it,
/// and how far.
fn parse_zone(zone: &str) -> Option<(bool, Duration)> {
    let (is_east, offset) = match zone.split_at_checked(1) {
        None if zone.is_empty() => return Some((true, Duration::ZERO)),
        Some(("Z" | "z", "")) => return Some((true, Duration::ZERO)),
        Some(("+", offset)) => (true, offset),
        Some(("-", offset)) => (false, offset),
        _ => return None,
    };
    let (hours, minutes) = match *offset.as_bytes() {
        [a, b, b':', c, d] | [a, b, c, d] => (two_digits(a, b)?, two_digits(c, d)?),
        _ => return None,
    };
    let is_offset = hours < 24 && minutes < 60;
    is_offset.then(|| (is_east, Duration::from_secs(hours * 3600 + minutes * 60)))
}

fn two_digits(tens: u8, ones: u8) -> Option<u64> {
    let digit = |byte: u8| byte.is_ascii_digit().then(|| u64::from(byte - b'0'));
    Some(digit(tens)? * 10 + digit(ones)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 2026-01-31T12:00:00Z.
    const NOON: u64 = 1_769_860_800;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn an_age_is_before_now() {
        let now = at(NOON);
        assert_eq!(parse_at("1m", now), Ok(at(NOON - 60)));
        assert_eq!(parse_at("1h30m", now), Ok(at(NOON - 5400)));
        assert_eq!(parse_at("0s", now), Ok(now));
        assert!(parse_at("9000y", now).unwrap() < SystemTime::UNIX_EPOCH);
        let then = parse_time("1m").unwrap();
        let minute = SystemTime::now().duration_since(then).unwrap();
        assert!((60..120).contains(&minute.as_secs()));
    }

    #[test]
    fn a_time_has_the_zone_that_it_says_and_is_utc_without_one() {
        for (zone, seconds) in [
            ("", NOON),
            ("Z", NOON),
            ("z", NOON),
            ("+00:00", NOON),
            ("-00:00", NOON),
            ("+02:00", NOON - 7200),
            ("+0200", NOON - 7200),
            ("-05:00", NOON + 18_000),
            ("-0500", NOON + 18_000),
            ("+05:45", NOON - 20_700),
        ] {
            for (fraction, nanos) in [
                ("", 0),
                (".5", 500_000_000),
                (".000000001", 1),
                (".0000000019", 1),
            ] {
                for separator in ["T", " "] {
                    let text = format!("2026-01-31{separator}12:00:00{fraction}{zone}");
                    let expected = at(seconds) + Duration::from_nanos(nanos);
                    assert_eq!(parse_time(&text), Ok(expected), "{text}");
                }
            }
        }
    }

    #[test]
    fn seconds_since_1970_may_have_a_fraction() {
        assert_eq!(parse_time("0"), Ok(SystemTime::UNIX_EPOCH));
        assert_eq!(parse_time("1769860800"), Ok(at(NOON)));
        let nanos = Duration::from_nanos(123_456_789);
        assert_eq!(parse_time("1769860800.123456789"), Ok(at(NOON) + nanos));
        let half = Duration::from_millis(500);
        assert_eq!(parse_time("1769860800.5"), Ok(at(NOON) + half));
        for huge in [u64::MAX.to_string(), "9".repeat(100), "9".repeat(30) + ".5"] {
            assert_eq!(parse_time(&huge), Err(OUT_OF_RANGE.to_owned()), "{huge}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused_with_what_to_write() {
        for bad in [
            "",
            "yesterday",
            "-5",
            "+5",
            "1.",
            ".5",
            "1.2.3",
            "2026-01-31",
            "2026-02-30T12:00:00Z",
            "2026-01-31T24:00:00Z",
            "2026-01-31T12:00:00.Z",
            "2026-01-31T12:00:00.+02:00",
            "2026-01-31T12:00:00+2:00",
            "2026-01-31T12:00:00+02",
            "2026-01-31T12:00:00+24:00",
            "2026-01-31T12:00:00+02:60",
            "2026-01-31T12:00:00+02:00Z",
            "2026-01-31T12:00:00.5+02:00x",
            "2026-01-31T12:00:00ZZ",
            "2026-01-31T12:00:0é",
        ] {
            assert_eq!(parse_time(bad), Err(USAGE.to_owned()), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(
            text in prop_oneof![".*", "[0-9TZ:.+ -]{0,40}"],
            tail in ".{0,12}",
        ) {
            let _ = parse_time(&text);
            let _ = parse_time(&format!("2026-01-31T12:00:00{tail}"));
        }

        #[test]
        fn a_zone_changes_how_a_time_is_written_and_not_which_it_is(
            seconds in 86_400_u64..253_402_000_000,
            nanos in 0_u32..1_000_000_000,
            minutes in -1439_i64..=1439,
            has_colon: bool,
        ) {
            let time = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
            let away = Duration::from_secs(minutes.unsigned_abs() * 60);
            let (local, sign) = match minutes < 0 {
                true => (time - away, '-'),
                false => (time + away, '+'),
            };
            let local = humantime::format_rfc3339_nanos(local).to_string();
            let (hours, minutes) = (minutes.abs() / 60, minutes.abs() % 60);
            let colon = if has_colon { ":" } else { "" };
            let local = local.trim_end_matches('Z');
            let text = format!("{local}{sign}{hours:02}{colon}{minutes:02}");
            prop_assert_eq!(parse_time(&text), Ok(time), "{}", text);
            prop_assert_eq!(parse_time(&format!("{seconds}.{nanos:09}")), Ok(time));
        }
    }
}
