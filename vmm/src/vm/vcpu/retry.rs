//! `KVM_RUN` that failed with `EAGAIN`.
//!
//! A vCPU that waits for INIT and SIPI returns it each time that something wakes it. Linux 6.12
//! and later also create a thread at a machine's first `KVM_RUN`, and return `EAGAIN` for as long
//! as the process may have no more threads.

use std::time::Duration;

/// How many failures in a row are tried again at once: more than a vCPU that waits for INIT has.
const AT_ONCE: u32 = 16;

/// The pause before each further one.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// How many failures in a row there are at most, unless the vCPU waits for INIT.
const MOST: u32 = AT_ONCE + 500;

/// For how long they were, in the text of the error: [`MOST`] pauses.
pub(crate) const PATIENCE: Duration = PAUSE.saturating_mul(MOST - AT_ONCE);

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Run again.
    AtOnce,
    /// Run again after [`PAUSE`].
    Later,
    /// End the VM.
    GiveUp,
}

/// The failures of a vCPU since the last `KVM_RUN` that ended otherwise.
#[derive(Debug, Default)]
pub(crate) struct Refusals(u32);

impl Refusals {
    /// Counts a failure. A vCPU that waits for INIT is never given up: the guest may wake it as
    /// often as it wants.
    pub(crate) fn add(&mut self, waits_for_init: impl FnOnce() -> bool) -> Retry {
        self.0 = self.0.saturating_add(1).min(MOST);
        match self.0 {
            ..=AT_ONCE => Retry::AtOnce,
            MOST if !waits_for_init() => Retry::GiveUp,
            _ => Retry::Later,
        }
    }

    /// Forgets them.
    pub(crate) fn clear(&mut self) {
        self.0 = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next `count` answers.
    fn answers(refusals: &mut Refusals, waits: bool, count: u32) -> Vec<Retry> {
        (0..count).map(|_| refusals.add(|| waits)).collect()
    }

    #[test]
    fn a_vcpu_that_never_runs_is_given_up_after_pauses() {
        let mut refusals = Refusals::default();
        let first = answers(&mut refusals, false, AT_ONCE);
        assert!(first.iter().all(|retry| *retry == Retry::AtOnce));
        let then = answers(&mut refusals, false, MOST - AT_ONCE);
        let (last, pauses) = then.split_last().unwrap();
        assert!(pauses.iter().all(|retry| *retry == Retry::Later));
        assert_eq!(*last, Retry::GiveUp);
        assert_eq!(PATIENCE.as_secs(), 5);
    }

    #[test]
    fn one_that_waits_for_init_is_not_given_up() {
        let mut refusals = Refusals::default();
        let all = answers(&mut refusals, true, 2 * MOST);
        assert_eq!(all[0], Retry::AtOnce);
        assert!(!all.contains(&Retry::GiveUp));
        assert_eq!(all.last(), Some(&Retry::Later));
    }

    #[test]
    fn one_that_has_run_begins_anew() {
        let mut refusals = Refusals::default();
        answers(&mut refusals, false, MOST - 1);
        refusals.clear();
        assert_eq!(refusals.add(|| false), Retry::AtOnce);
    }
}
