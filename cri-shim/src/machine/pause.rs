//! Pauses of machines on busy hosts.

use podvisor_vmm::VmError;
use tracing::debug;

/// Attempts to pause a machine before it counts as unable to pause. On a busy host its threads may
/// not be scheduled within the time that a VM gives them.
const PAUSE_ATTEMPTS: usize = 5;

/// Retries while a VM is busy, a limited number of times.
pub(super) fn while_busy(mut pause: impl FnMut() -> Result<(), VmError>) -> Result<(), VmError> {
    for _ in 1..PAUSE_ATTEMPTS {
        match pause() {
            Err(VmError::Busy { what }) => debug!(what, "the machine does not pause yet"),
            done => return done,
        }
    }
    pause()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pauses a VM that is busy `busy` times; returns the result and the number of attempts.
    fn tried(busy: usize) -> (Result<(), VmError>, usize) {
        let mut tries = 0;
        let paused = while_busy(|| {
            tries += 1;
            match tries <= busy {
                true => Err(VmError::Busy {
                    what: "vcpu".to_owned(),
                }),
                false => Ok(()),
            }
        });
        (paused, tries)
    }

    #[test]
    fn a_machine_that_is_busy_for_a_moment_pauses_and_one_that_stays_so_does_not() {
        assert!(matches!(tried(0), (Ok(()), 1)));
        assert!(matches!(tried(2), (Ok(()), 3)));
        assert!(matches!(
            tried(99),
            (Err(VmError::Busy { .. }), PAUSE_ATTEMPTS)
        ));
    }
}
