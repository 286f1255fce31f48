//! A rate limit for log lines that a guest can provoke.

use std::time::{Duration, Instant};

/// Lets one event pass per interval and counts the suppressed ones.
#[derive(Debug)]
pub struct RateLimit {
    interval: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl RateLimit {
    /// Creates a limit of at most one event per `interval`.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            last: None,
            suppressed: 0,
        }
    }

    /// `Some(n)` if the caller may log, where `n` events were suppressed since the last one.
    pub fn permit(&mut self) -> Option<u64> {
        self.permit_at(Instant::now())
    }

    /// Whether no event has passed or was suppressed.
    #[cfg(test)]
    pub(crate) fn is_unused(&self) -> bool {
        self.last.is_none() && self.suppressed == 0
    }

    fn permit_at(&mut self, now: Instant) -> Option<u64> {
        let due = self
            .last
            .is_none_or(|last| now.duration_since(last) >= self.interval);
        if due {
            self.last = Some(now);
            Some(std::mem::take(&mut self.suppressed))
        } else {
            self.suppressed = self.suppressed.saturating_add(1);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_per_interval_and_the_rest_are_counted() {
        let mut limit = RateLimit::new(Duration::from_secs(10));
        let start = Instant::now();
        assert_eq!(limit.permit_at(start), Some(0));
        assert_eq!(limit.permit_at(start + Duration::from_secs(1)), None);
        assert_eq!(limit.permit_at(start + Duration::from_secs(9)), None);
        assert_eq!(limit.permit_at(start + Duration::from_secs(10)), Some(2));
        assert_eq!(limit.permit_at(start + Duration::from_secs(20)), Some(0));
    }
}
