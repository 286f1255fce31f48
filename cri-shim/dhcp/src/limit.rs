//! How often the server works for its guest.

use std::time::{Duration, Instant};

/// Most frames in one burst: a boot with several DHCP clients, one after the other, has about ten.
const BURST: u32 = 32;
/// Time until one more frame is looked at.
const REFILL: Duration = Duration::from_millis(100);

/// A token bucket.
#[derive(Debug)]
pub(crate) struct Limiter {
    tokens: u32,
    /// When the next token comes in, unless there are all of them.
    next: Option<Instant>,
}

impl Limiter {
    pub(crate) fn new() -> Self {
        Self {
            tokens: BURST,
            next: None,
        }
    }

    /// Takes a token; without one the caller does nothing.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        self.refill(now);
        let Some(left) = self.tokens.checked_sub(1) else {
            return false;
        };
        self.tokens = left;
        if self.next.is_none() {
            self.next = now.checked_add(REFILL);
        }
        true
    }

    /// Returns the time until there is a token; `None` if there is one.
    pub(crate) fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.refill(now);
        match (self.tokens, self.next) {
            (0, Some(next)) => Some(next.saturating_duration_since(now)),
            _ => None,
        }
    }

    fn refill(&mut self, now: Instant) {
        while let Some(next) = self.next
            && next <= now
        {
            self.tokens = self.tokens.saturating_add(1).min(BURST);
            self.next = match self.tokens {
                BURST => None,
                _ => next.checked_add(REFILL),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_gets_a_burst_and_then_one_in_each_interval() {
        let mut limiter = Limiter::new();
        let start = Instant::now();
        let taken = (0..1000).filter(|_| limiter.take(start)).count();
        assert_eq!(taken, BURST as usize);
        assert_eq!(limiter.wait(start), Some(REFILL));
        let later = start + REFILL * 3;
        assert_eq!(limiter.wait(later), None);
        assert_eq!((0..1000).filter(|_| limiter.take(later)).count(), 3);
    }

    #[test]
    fn a_quiet_guest_has_its_whole_burst_again() {
        let mut limiter = Limiter::new();
        let start = Instant::now();
        while limiter.take(start) {}
        let later = start + Duration::from_secs(86_400);
        let taken = (0..1000).filter(|_| limiter.take(later)).count();
        assert_eq!(taken, BURST as usize);
    }
}
