//! A file system that never ends a read must not keep a machine for ever: each step has its time.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::console::say;
use crate::machine;

#[derive(Debug)]
struct Step {
    what: String,
    end: Instant,
    limit: Duration,
}

/// Powers the machine off when a step takes too long: from a thread, because the one that waits
/// for a disk cannot be interrupted.
#[derive(Debug)]
pub(crate) struct Watchdog {
    limit: Duration,
    step: Arc<(Mutex<Option<Step>>, Condvar)>,
}

impl Watchdog {
    /// Starts the thread; there is no step yet.
    pub(crate) fn start(limit: Duration) -> Self {
        let step = Arc::new((Mutex::new(None), Condvar::new()));
        let watched = Arc::clone(&step);
        let watch = move || {
            let late = expired(&watched);
            let limit = late.limit.as_secs();
            say(&format!(
                "error: {} did not end within {limit} s: is the disk readable?",
                late.what
            ));
            machine::power_off();
        };
        // Without the thread, all but a hanging disk works.
        let thread = std::thread::Builder::new().name("watchdog".to_owned());
        let _ = thread.spawn(watch);
        Self { limit, step }
    }

    /// Begins a step, which ends the one before.
    pub(crate) fn step(&self, what: impl Into<String>) {
        self.step_of(1, what);
    }

    /// Begins a step that may take several times as long as others.
    pub(crate) fn step_of(&self, factor: u32, what: impl Into<String>) {
        let limit = self.limit.saturating_mul(factor);
        let step = Step {
            what: what.into(),
            end: Instant::now() + limit,
            limit,
        };
        *self.step.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(step);
        self.step.1.notify_one();
    }
}

/// Waits until a step is late.
fn expired((step, changed): &(Mutex<Option<Step>>, Condvar)) -> Step {
    let mut step = step.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let left = step
            .as_ref()
            .map(|step| step.end.saturating_duration_since(Instant::now()));
        step = match left {
            None => changed.wait(step).unwrap_or_else(PoisonError::into_inner),
            Some(Duration::ZERO) => match step.take() {
                Some(late) => return late,
                None => continue,
            },
            Some(left) => {
                let waited = changed.wait_timeout(step, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_that_is_late_is_told_and_no_other() {
        let watchdog = Watchdog {
            limit: Duration::from_secs(1000),
            step: Arc::default(),
        };
        watchdog.step("first");
        let watched = Arc::clone(&watchdog.step);
        let late = std::thread::spawn(move || expired(&watched));
        watchdog.step("second");
        watchdog.step_of(0, "third");
        assert_eq!(late.join().unwrap().what, "third");
    }
}
