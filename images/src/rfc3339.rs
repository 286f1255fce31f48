//! Dates as image configurations have them (RFC 3339, section 5.6).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Parses a time since 1970; `None` if the text is not a date, or an earlier one.
pub(crate) fn parse(text: &str) -> Option<SystemTime> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let mut date = date.splitn(3, '-').map(digits);
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let zone_at = time.find(['Z', 'z', '+', '-'])?;
    let (clock, zone) = time.split_at(zone_at);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let mut clock = clock.splitn(3, ':').map(digits);
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    let in_range = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !in_range || year > 9999 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let local = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    let seconds = u64::try_from(local - offset(zone)?).ok()?;
    let nanos = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanos = nanos.fold(0, |nanos, digit| nanos * 10 + u32::from(digit - b'0'));
    UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
}

fn digits(text: &str) -> Option<i64> {
    (text.len() <= 4 && text.bytes().all(|digit| digit.is_ascii_digit()))
        .then(|| text.parse().ok())?
}

/// Parses an offset from UTC, in seconds east.
fn offset(zone: &str) -> Option<i64> {
    let (sign, rest) = match zone.split_at_checked(1)? {
        ("Z" | "z", "") => return Some(0),
        ("+", rest) => (1, rest),
        ("-", rest) => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = rest.split_once(':')?;
    Some(sign * (digits(hours)? * 3600 + digits(minutes)? * 60))
}

/// Days from 1970-01-01 in the Gregorian calendar, with years that start in March so that leap days
/// come last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(text: &str) -> Option<u64> {
        Some(parse(text)?.duration_since(UNIX_EPOCH).unwrap().as_secs())
    }

    #[test]
    fn dates_are_read() {
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("2024-02-29T12:34:56.789Z"), Some(1_709_210_096));
        assert_eq!(seconds("2024-02-29T14:34:56+02:00"), Some(1_709_210_096));
        assert_eq!(seconds("2000-01-01T00:00:00-00:30"), Some(946_686_600));
        let nanos = parse("1970-01-01T00:00:00.000000001Z").unwrap();
        assert_eq!(nanos, UNIX_EPOCH + Duration::from_nanos(1));
    }

    #[test]
    fn what_is_no_date_is_none() {
        for bad in [
            "",
            "yesterday",
            "2024-13-01T00:00:00Z",
            "1969-01-01T00:00:00Z",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00.éZ",
            "99999-01-01T00:00:00Z",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
