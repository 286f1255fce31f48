//! Difference between two clocks.

/// A reading of another clock between two readings of the own one, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockBracket {
    /// The own clock, before.
    pub before: i128,
    /// The other clock.
    pub other: i128,
    /// The own clock, afterwards.
    pub after: i128,
}

impl ClockBracket {
    /// Returns how long the reading took, which is the uncertainty of the difference.
    #[must_use]
    pub const fn width(&self) -> i128 {
        self.after.saturating_sub(self.before)
    }

    /// Returns the narrower one of the `best` so far and `next`. A reading during which the own
    /// clock went back is ignored.
    #[must_use]
    pub fn narrower(best: Option<Self>, next: Self) -> Option<Self> {
        let is_better = best.is_none_or(|best| next.width() < best.width());
        match next.width() >= 0 && is_better {
            true => Some(next),
            false => best,
        }
    }

    /// Returns by how much the own clock is certainly behind the other; negative if it is ahead,
    /// and 0 if the duration of the reading explains the difference.
    #[must_use]
    pub const fn behind(&self) -> i128 {
        if self.other > self.after {
            self.other.saturating_sub(self.after)
        } else if self.other < self.before {
            self.other.saturating_sub(self.before)
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bracket(before: i128, other: i128, after: i128) -> ClockBracket {
        ClockBracket {
            before,
            other,
            after,
        }
    }

    #[test]
    fn what_the_time_of_a_reading_explains_is_no_difference() {
        for other in [100, 130, 150] {
            assert_eq!(bracket(100, other, 150).behind(), 0);
        }
        assert_eq!(bracket(100, 151, 150).behind(), 1);
        assert_eq!(bracket(100, 99, 150).behind(), -1);
        assert_eq!(bracket(100, 2_000, 150).behind(), 1850);
        assert_eq!(bracket(100, 0, 150).behind(), -100);
    }

    #[test]
    fn the_quickest_reading_is_the_best() {
        let slow = bracket(0, 50, 100);
        let quick = bracket(200, 205, 210);
        let set_back = bracket(300, 305, 200);
        let best = [slow, quick, slow, set_back]
            .into_iter()
            .fold(None, ClockBracket::narrower);
        assert_eq!(best, Some(quick));
        assert_eq!(ClockBracket::narrower(None, set_back), None);
        assert_eq!(
            ClockBracket::narrower(None, bracket(1, 1, 1))
                .unwrap()
                .width(),
            0
        );
    }
}
