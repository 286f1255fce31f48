//! Exponential backoff for operations that fail for a temporary lack of something: room
//! on a disk, descriptors, memory.

use std::time::Duration;

/// Before the second attempt.
const INITIAL_DELAY: Duration = Duration::from_millis(100);

/// Longest time between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Times to wait, each twice as long as the one before.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(INITIAL_DELAY)
    }
}

impl Backoff {
    /// How long to wait now.
    fn next(&mut self) -> Duration {
        let next = self.0;
        self.0 = next.saturating_mul(2).min(MAX_DELAY);
        next
    }

    /// Waits until it is time for another attempt, and says how long that is.
    pub(super) async fn wait(&mut self) -> Duration {
        let next = self.next();
        tokio::time::sleep(next).await;
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_grow_up_to_a_bound() {
        let mut backoff = Backoff::default();
        let times: Vec<_> = (0..20).map(|_| backoff.next()).collect();
        assert_eq!(
            times[..3],
            [INITIAL_DELAY, INITIAL_DELAY * 2, INITIAL_DELAY * 4]
        );
        assert_eq!(times[19], MAX_DELAY);
    }
}
