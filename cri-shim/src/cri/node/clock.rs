//! The node's time.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970. It goes backwards when the node's clock is set back.
pub(in crate::cri) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

/// The time of statuses and events, of which a kubelet keeps the newest: it stands still while the
/// node's clock, which was set back, is behind it.
#[derive(Debug, Default)]
pub(in crate::cri) struct ReportClock(AtomicI64);

impl ReportClock {
    /// Nanoseconds since 1970.
    pub(in crate::cri) fn now(&self) -> i64 {
        self.at(now())
    }

    /// Returns the time of a report when the node's clock shows `now`.
    pub(in crate::cri) fn at(&self, now: i64) -> i64 {
        self.0.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_reports_does_not_go_backwards() {
        let clock = ReportClock::default();
        let times = [5, 7, 3, 6, 8].map(|now| clock.at(now));
        assert_eq!(times, [5, 7, 7, 7, 8]);
        assert!(clock.now() <= now());
    }
}
