//! Delays before a machine that resets itself at once again and again is built anew.

use std::time::Duration;

/// A machine that resets itself sooner than this after its start is said to do so at once.
const QUICK: Duration = Duration::from_secs(10);

/// Delays before a machine that resets itself at once again and again is built anew: each is twice
/// the one before, up to the longest. Some reboots are part of an installation.
#[derive(Debug, Default)]
pub(super) struct RebootDelays {
    quick: u32,
}

impl RebootDelays {
    const WITHOUT_DELAY: u32 = 3;
    const LONGEST: Duration = Duration::from_secs(60);

    /// Returns the delay after a machine that ran for so long.
    pub(super) fn next(&mut self, ran: Duration) -> Duration {
        if ran >= QUICK {
            self.quick = 0;
            return Duration::ZERO;
        }
        self.quick = self.quick.saturating_add(1);
        match self.quick.checked_sub(Self::WITHOUT_DELAY + 1) {
            Some(doubled) => Duration::from_secs(1 << doubled.min(6)).min(Self::LONGEST),
            None => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_resets_itself_at_once_waits_longer_each_time() {
        let mut delays = RebootDelays::default();
        let mut seconds = |ran| delays.next(Duration::from_secs(ran)).as_secs();
        assert_eq!([1, 0, 9].map(&mut seconds), [0; 3]);
        assert_eq!([1; 8].map(&mut seconds), [1, 2, 4, 8, 16, 32, 60, 60]);
        // One that ran for a while begins anew.
        assert_eq!([11, 1, 1, 1, 1].map(&mut seconds), [0, 0, 0, 0, 1]);
    }
}
