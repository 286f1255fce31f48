//! Exponential backoff for operations that fail because of a temporary shortage of disk space,
//! descriptors or memory.

use std::time::Duration;

/// Delay before the second attempt.
const INITIAL_DELAY: Duration = Duration::from_millis(100);

/// Maximum delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Delays, each twice as long as the previous one.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(INITIAL_DELAY)
    }
}

impl Backoff {
    /// Returns the next delay.
    fn next(&mut self) -> Duration {
        let next = self.0;
        self.0 = next.saturating_mul(2).min(MAX_DELAY);
        next
    }

    /// Waits for the next delay, and returns its length.
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
