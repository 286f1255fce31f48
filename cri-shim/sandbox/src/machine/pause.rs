//! Pauses of machines on busy hosts, which end when nobody waits for them any more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use podvisor_vmm::{Vm, VmError};
use tokio::runtime::Handle;
use tracing::debug;

/// Attempts to pause a machine before it counts as unable to pause. On a busy host its threads may
/// not be scheduled within the time that a VM gives them.
const PAUSE_ATTEMPTS: usize = 5;

/// A call that pauses a machine, shared by the thread that carries it out and the future that waits
/// for that.
#[derive(Debug, Default)]
pub(super) struct PauseCall(Mutex<Progress>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Progress {
    #[default]
    Trying,
    /// The machine is paused, and the caller does not know it yet.
    Paused,
    /// The caller has its result.
    Delivered,
    /// The caller has dropped its future.
    Cancelled,
}

impl PauseCall {
    /// Retries while a VM is busy, a limited number of times. If the caller is gone, there are no
    /// more attempts, and a pause that succeeds all the same is undone.
    pub(super) fn carry_out(
        &self,
        mut pause: impl FnMut() -> Result<(), VmError>,
        resume: impl FnOnce() -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let mut attempts = 1;
        while !self.is_cancelled() {
            match pause() {
                Err(VmError::Busy { what }) if attempts < PAUSE_ATTEMPTS => {
                    debug!(what, "the machine does not pause yet");
                    attempts += 1;
                }
                Ok(()) => return if self.paused() { Ok(()) } else { resume() },
                failed => return failed,
            }
        }
        // Nobody sees this.
        Ok(())
    }

    /// Reports that the caller gets its result.
    pub(super) fn deliver(&self) {
        *self.progress() = Progress::Delivered;
    }

    /// Reports that the machine is paused; false if the caller is gone.
    fn paused(&self) -> bool {
        let mut progress = self.progress();
        match *progress {
            Progress::Cancelled => false,
            _ => {
                *progress = Progress::Paused;
                true
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        *self.progress() == Progress::Cancelled
    }

    /// Reports that the caller waits no longer; true if the machine is paused, and nobody knows.
    fn cancel(&self) -> bool {
        let mut progress = self.progress();
        match *progress {
            Progress::Delivered => false,
            before => {
                *progress = Progress::Cancelled;
                before == Progress::Paused
            }
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Undoes a pause whose result was not delivered when this is dropped.
pub(super) struct UndoPause {
    pub(super) vm: Arc<Vm>,
    pub(super) call: Arc<PauseCall>,
}

impl Drop for UndoPause {
    fn drop(&mut self) {
        if !self.call.cancel() {
            return;
        }
        let vm = Arc::clone(&self.vm);
        let resume = move || {
            if let Err(error) = vm.resume() {
                debug!(%error, "a pause that was cancelled is not undone");
            }
        };
        // It waits for the vCPUs.
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(resume)),
            Err(_) => resume(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Result<(), VmError> {
        Err(VmError::Busy {
            what: "vcpu".to_owned(),
        })
    }

    /// Pauses a VM that is busy `busy` times; returns the result and the number of attempts.
    fn tried(times: usize) -> (Result<(), VmError>, usize) {
        let mut tries = 0;
        let pause = || {
            tries += 1;
            if tries <= times { busy() } else { Ok(()) }
        };
        let paused = PauseCall::default().carry_out(pause, || unreachable!("it is wanted"));
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

    #[test]
    fn a_pause_whose_caller_is_gone_is_not_tried_again() {
        let call = PauseCall::default();
        let mut tries = 0;
        let pause = || {
            tries += 1;
            assert!(!call.cancel(), "it is not paused yet");
            busy()
        };
        call.carry_out(pause, || unreachable!("it was not paused"))
            .unwrap();
        assert_eq!(tries, 1);
        let pause = || unreachable!("nobody waits for it");
        call.carry_out(pause, || unreachable!("it was not paused"))
            .unwrap();
    }

    #[test]
    fn a_pause_whose_result_nobody_gets_is_undone() {
        let call = PauseCall::default();
        let mut resumed = 0;
        let pause = || {
            assert!(!call.cancel(), "it is not paused yet");
            Ok(())
        };
        let resume = || {
            resumed += 1;
            Ok(())
        };
        call.carry_out(pause, resume).unwrap();
        assert_eq!(resumed, 1);
        // The caller goes after the pause, and before it gets the result.
        let call = PauseCall::default();
        let wanted = || unreachable!("it is wanted");
        call.carry_out(|| Ok(()), wanted).unwrap();
        assert!(call.cancel(), "the guard undoes it");
        // The caller has the result.
        let call = PauseCall::default();
        call.carry_out(|| Ok(()), wanted).unwrap();
        call.deliver();
        assert!(!call.cancel());
    }
}
