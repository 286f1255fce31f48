//! CPU time per second, from samples that are taken irregularly, by several clients that do not
//! know of each other: a client that asks right after another gets the same rate, not that of the
//! short time in between.

/// The shortest time that a rate is taken over, in nanoseconds.
const MIN_WINDOW_NS: u64 = 1_000_000_000;

/// The rate of a container.
#[derive(Debug, Default)]
pub(in crate::cri) struct CpuRate(Option<Last>);

#[derive(Debug, Clone, Copy)]
struct Last {
    at_ns: u64,
    used_ns: u64,
    /// The rate until then, in nanoseconds of CPU time per second.
    rate: Option<u64>,
}

impl CpuRate {
    /// Returns the rate after a sample of time and CPU time used, both in nanoseconds; `None`
    /// before there are two. The values come from the guest and are not trusted.
    pub(in crate::cri) fn at(&mut self, at_ns: u64, used_ns: u64) -> Option<u64> {
        let since = self.0.and_then(|last| rate(last, at_ns, used_ns));
        match self.0 {
            Some(last) if at_ns >= last.at_ns && at_ns - last.at_ns < MIN_WINDOW_NS => {
                last.rate.or(since)
            }
            _ => {
                let rate = since;
                self.0 = Some(Last {
                    at_ns,
                    used_ns,
                    rate,
                });
                rate
            }
        }
    }
}

fn rate(last: Last, at_ns: u64, used_ns: u64) -> Option<u64> {
    let elapsed = at_ns
        .checked_sub(last.at_ns)
        .filter(|&elapsed| elapsed > 0)?;
    let used = used_ns.checked_sub(last.used_ns)?;
    u64::try_from(u128::from(used) * 1_000_000_000 / u128::from(elapsed)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn who_asks_right_after_another_gets_the_same_rate() {
        let mut cpu = CpuRate::default();
        assert_eq!(cpu.at(1000 * MS, 0), None);
        // Half a CPU for ten seconds, then nothing.
        assert_eq!(cpu.at(11_000 * MS, 5000 * MS), Some(500 * MS));
        assert_eq!(cpu.at(11_000 * MS, 5000 * MS), Some(500 * MS));
        assert_eq!(cpu.at(11_003 * MS, 5000 * MS), Some(500 * MS));
        assert_eq!(cpu.at(13_000 * MS, 5000 * MS), Some(0));
    }

    #[test]
    fn the_first_two_may_be_close_together() {
        let mut cpu = CpuRate::default();
        cpu.at(0, 0);
        assert_eq!(cpu.at(100 * MS, 100 * MS), Some(1000 * MS));
        assert_eq!(cpu.at(2000 * MS, 1000 * MS), Some(500 * MS));
    }

    #[test]
    fn figures_that_go_backwards_have_no_rate() {
        let mut cpu = CpuRate::default();
        cpu.at(5000 * MS, 5000 * MS);
        assert_eq!(cpu.at(4000 * MS, 6000 * MS), None);
        assert_eq!(cpu.at(9000 * MS, 1), None);
        assert_eq!(cpu.at(u64::MAX, u64::MAX), Some(1_000_000_000));
    }
}
