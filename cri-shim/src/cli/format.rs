//! Formatting of ids and times.

use std::time::{Duration, SystemTime};

/// Hexadecimal digits of an id that are shown, as in docker.
pub(super) const SHORT_ID: usize = 12;

/// Shown in place of a missing image name.
pub(super) const NONE: &str = "<none>";

/// Formats a time for scripts.
pub(super) fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Formats a time for people: `3 weeks ago`.
pub(super) fn ago(time: Option<SystemTime>, now: SystemTime) -> String {
    let Some(age) = time.and_then(|time| now.duration_since(time).ok()) else {
        return "N/A".to_owned();
    };
    format!("{} ago", rough(age))
}

fn rough(age: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let seconds = age.as_secs();
    let (count, unit) = match seconds {
        0 => return "less than a second".to_owned(),
        s if s < 2 * MINUTE => (s, "second"),
        s if s < 2 * HOUR => (s / MINUTE, "minute"),
        s if s < 2 * DAY => (s / HOUR, "hour"),
        s if s < 14 * DAY => (s / DAY, "day"),
        s if s < 60 * DAY => (s / (7 * DAY), "week"),
        s if s < 730 * DAY => (s / (30 * DAY), "month"),
        s => (s / (365 * DAY), "year"),
    };
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {unit}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_rough() {
        let is = |seconds, text: &str| assert_eq!(rough(Duration::from_secs(seconds)), text);
        is(0, "less than a second");
        is(1, "1 second");
        is(119, "119 seconds");
        is(120, "2 minutes");
        is(3 * 3600, "3 hours");
        is(5 * 86400, "5 days");
        is(20 * 86400, "2 weeks");
        is(90 * 86400, "3 months");
        is(800 * 86400, "2 years");
        assert_eq!(ago(None, SystemTime::now()), "N/A");
        let future = SystemTime::now() + Duration::from_secs(1000);
        assert_eq!(ago(Some(future), SystemTime::now()), "N/A");
    }
}
