//! Rate limits for bytes, frames and operations per second, with a burst.

use std::time::{Duration, Instant};

const NANOS: u128 = 1_000_000_000;

/// A rate that a device is limited to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units (bytes, frames or operations) per second; 0 counts as 1.
    pub per_second: u64,
    /// Units that may pass without a delay after an idle time; 0 counts as 1.
    pub burst: u64,
}

/// A token bucket. One request may take more than the bucket holds: the debt is waited for
/// afterwards, so that requests larger than the burst pass too.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    level: i128,
    at: Instant,
}

impl Bucket {
    fn new(rate: Rate, now: Instant) -> Self {
        let rate = Rate {
            per_second: rate.per_second.max(1),
            burst: rate.burst.max(1),
        };
        Self {
            rate,
            level: rate.burst.into(),
            at: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let per_second = u128::from(self.rate.per_second);
        let elapsed = now.saturating_duration_since(self.at).as_nanos();
        let units = elapsed
            .saturating_mul(per_second)
            .checked_div(NANOS)
            .unwrap_or(0);
        if units == 0 {
            return;
        }
        // Consumes only the time of whole units.
        let used = units
            .saturating_mul(NANOS)
            .checked_div(per_second)
            .unwrap_or(0);
        self.at = u64::try_from(used)
            .ok()
            .and_then(|nanos| self.at.checked_add(Duration::from_nanos(nanos)))
            .unwrap_or(now);
        self.level = i128::try_from(units)
            .unwrap_or(i128::MAX)
            .saturating_add(self.level)
            .min(self.rate.burst.into());
    }

    /// How long until something may be taken; `None` if it may be taken now.
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.refill(now);
        if self.level > 0 {
            return None;
        }
        let missing = self.level.unsigned_abs().saturating_add(1);
        let nanos = missing
            .saturating_mul(NANOS)
            .div_ceil(u128::from(self.rate.per_second));
        let due = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let since = now.saturating_duration_since(self.at);
        Some(due.saturating_sub(since).max(Duration::from_micros(1)))
    }

    fn take(&mut self, units: u64) {
        self.level = self.level.saturating_sub(units.into());
    }

    fn give(&mut self, units: u64) {
        let level = self.level.saturating_add(units.into());
        self.level = level.min(self.rate.burst.into());
    }
}

/// The limits of a disk, or of one direction of a network: of bytes, and of the frames or
/// operations that carry them.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    bytes: Option<Bucket>,
    pieces: Option<Bucket>,
}

impl Limiter {
    pub(crate) fn new(bytes: Option<Rate>, pieces: Option<Rate>) -> Self {
        let now = Instant::now();
        Self {
            bytes: bytes.map(|rate| Bucket::new(rate, now)),
            pieces: pieces.map(|rate| Bucket::new(rate, now)),
        }
    }

    /// How long the next frame or operation has to wait; `None` if it need not.
    pub(crate) fn wait(&mut self) -> Option<Duration> {
        if self.bytes.is_none() && self.pieces.is_none() {
            return None;
        }
        self.wait_at(Instant::now())
    }

    fn wait_at(&mut self, now: Instant) -> Option<Duration> {
        let bytes = self.bytes.as_mut().and_then(|bucket| bucket.wait(now));
        let pieces = self.pieces.as_mut().and_then(|bucket| bucket.wait(now));
        bytes.max(pieces)
    }

    /// Refunds the charge of a frame or operation of `len` bytes that was not done after all.
    pub(crate) fn refund(&mut self, len: usize) {
        if let Some(bytes) = &mut self.bytes {
            bytes.give(len as u64);
        }
        if let Some(pieces) = &mut self.pieces {
            pieces.give(1);
        }
    }

    /// Charges a frame or operation of `len` bytes.
    pub(crate) fn charge(&mut self, len: usize) {
        if let Some(bytes) = &mut self.bytes {
            bytes.take(len as u64);
        }
        if let Some(pieces) = &mut self.pieces {
            pieces.take(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bucket(per_second: u64, burst: u64) -> (Bucket, Instant) {
        let now = Instant::now();
        (Bucket::new(Rate { per_second, burst }, now), now)
    }

    #[test]
    fn a_burst_goes_at_once_and_then_the_rate_holds() {
        let (mut bucket, start) = bucket(10, 3);
        for _ in 0..3 {
            assert_eq!(bucket.wait(start), None);
            bucket.take(1);
        }
        assert_eq!(bucket.wait(start), Some(Duration::from_millis(100)));
        let later = start + Duration::from_millis(60);
        assert_eq!(bucket.wait(later), Some(Duration::from_millis(40)));
        assert_eq!(bucket.wait(start + Duration::from_millis(100)), None);
    }

    #[test]
    fn a_frame_longer_than_the_burst_passes_and_is_waited_for_afterwards() {
        let (mut bucket, start) = bucket(1000, 100);
        assert_eq!(bucket.wait(start), None);
        bucket.take(1100);
        let wait = bucket.wait(start).unwrap();
        assert_eq!(wait, Duration::from_millis(1001));
        assert_eq!(bucket.wait(start + wait), None);
    }

    #[test]
    fn silence_saves_no_more_than_the_burst() {
        let (mut bucket, start) = bucket(1_000_000, 5);
        let later = start + Duration::from_secs(3600);
        assert_eq!(bucket.wait(later), None);
        bucket.take(5);
        assert!(bucket.wait(later).is_some());
    }

    #[test]
    fn what_did_not_go_is_given_back_up_to_the_burst() {
        let (mut bucket, start) = bucket(10, 3);
        bucket.take(100);
        bucket.give(99);
        assert_eq!(bucket.wait(start), None);
        bucket.give(50);
        bucket.take(3);
        assert_eq!(bucket.wait(start), Some(Duration::from_millis(100)));
    }

    #[test]
    fn both_limits_hold_and_none_is_no_limit() {
        let rate = |per_second| {
            Some(Rate {
                per_second,
                burst: 1,
            })
        };
        let mut limiter = Limiter::new(rate(1_000_000), rate(1));
        let begin = Instant::now();
        assert_eq!(limiter.wait(), None);
        limiter.charge(60);
        // However late the limiter is asked.
        let wait = limiter.wait().unwrap_or_default();
        assert!(wait + begin.elapsed() > Duration::from_millis(500));
        let mut limiter = Limiter::default();
        limiter.charge(usize::MAX);
        assert_eq!(limiter.wait(), None);
    }

    proptest! {
        #[test]
        fn no_sequence_exceeds_rate_and_burst(
            per_second in 1u64..5000,
            burst in 1u64..100,
            steps in proptest::collection::vec(0u64..400, 1..100),
        ) {
            let (mut bucket, start) = bucket(per_second, burst);
            let (mut now, mut taken) = (start, 0u64);
            for step in steps {
                now += Duration::from_micros(step * 37);
                if bucket.wait(now).is_none() {
                    bucket.take(1);
                    taken += 1;
                }
            }
            let elapsed = now.duration_since(start).as_nanos();
            let most = u128::from(burst) + elapsed * u128::from(per_second) / NANOS + 1;
            prop_assert!(u128::from(taken) <= most);
        }
    }
}
