//! A machine that is to end, or to be replaced by a new one: by its guest's agent, its power
//! button, or a kill.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use podvisor_guest_agent::ShutdownMode;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::super::super::error::SandboxError;
use super::super::super::types::RefusalKind;
use super::vm::{Saving, Vm, Wanted};

/// Pause between presses of the power button: a guest may miss one while it boots.
const PRESS_INTERVAL: Duration = Duration::from_secs(5);

/// How long a guest may take to power itself off for a reboot.
const RESTART_TIMEOUT: Duration = Duration::from_secs(120);

impl Vm {
    /// Asks the guest to power itself off, and kills it if it still runs after `grace`, whether or
    /// not a client waits for it.
    pub(super) fn stop(this: &Arc<Self>, grace: Duration) {
        this.wants(Wanted::Off);
        let vm = Arc::clone(this);
        tokio::spawn(async move {
            let Ok(mut exit) = vm.container.exit(None) else {
                return;
            };
            let asked = async {
                tokio::select! {
                    _ = exit.wait_for(Option::is_some) => {}
                    () = vm.press_until_off() => {}
                }
            };
            if grace.is_zero() || timeout(grace, asked).await.is_err() {
                info!(container = vm.container.id, "the grace period is over");
                vm.kill();
                vm.container.hurry_readers().await;
            }
        });
    }

    /// Asks the agent, and presses the power button again and again.
    async fn press_until_off(self: &Arc<Self>) {
        let asked = timeout(
            PRESS_INTERVAL,
            self.shut_down_by_agent(ShutdownMode::PowerDown),
        );
        match asked.await {
            Ok(Ok(())) => sleep(PRESS_INTERVAL).await,
            Ok(Err(error)) => debug!(%error, "the guest's agent is not asked"),
            Err(_) => debug!("the guest's agent does not answer"),
        }
        loop {
            let machine = self.lock().clone();
            let pressed = machine.map(|machine| machine.press_power_button());
            if let Some(Err(error)) = pressed {
                debug!(%error, "the guest is not asked to power itself off");
            }
            sleep(PRESS_INTERVAL).await;
        }
    }

    /// Powers the machine off immediately, and keeps it from being built again.
    pub(super) fn kill(&self) {
        self.wants(Wanted::Killed);
        let machine = self.lock().clone();
        if let Some(machine) = machine {
            // Its threads end meanwhile, or are abandoned after a moment.
            machine.kill();
        }
    }

    /// Asks the guest to reboot: its agent, or without one by the power button.
    pub(super) async fn soft_reboot(this: &Arc<Self>) -> Result<(), SandboxError> {
        match this.shut_down_by_agent(ShutdownMode::Reboot).await {
            Err(error) if error.kind() == Some(RefusalKind::NoAgent) => Self::power_cycle(this),
            asked => asked,
        }
    }

    /// Asks the guest to power itself off, after which it is booted again. A guest that takes
    /// longer than a moment is not, so that a later power-off is one.
    fn power_cycle(this: &Arc<Self>) -> Result<(), SandboxError> {
        let machine = this.machine()?;
        let until = Instant::now() + RESTART_TIMEOUT;
        *this.restart.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
        machine.press_power_button()?;
        // It must be freed before the next one is built.
        let machine = Arc::downgrade(&machine);
        tokio::spawn(async move {
            while Instant::now() + PRESS_INTERVAL < until {
                sleep(PRESS_INTERVAL).await;
                let Some(machine) = machine.upgrade() else {
                    break;
                };
                if let Err(error) = machine.press_power_button() {
                    debug!(%error, "the guest is not asked to power itself off");
                    break;
                }
            }
        });
        Ok(())
    }

    /// Whether the machine that has ended was to power itself off for another one.
    pub(super) fn takes_restart(&self) -> bool {
        let mut restart = self.restart.lock().unwrap_or_else(PoisonError::into_inner);
        let until = restart.take();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Replaces the machine by a new one, as a reset button does.
    pub(super) fn reset(&self) -> Result<(), SandboxError> {
        let machine = self.machine()?;
        let saving = self.saving();
        if *saving != Saving::No {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the machine is being saved: reset it afterwards",
            ));
        }
        self.is_reset.store(true, Ordering::SeqCst);
        machine.kill();
        Ok(())
    }

    /// Whether the guest was asked to end.
    pub(super) fn is_to_end(&self) -> bool {
        *self.wanted.borrow() != Wanted::Running
    }

    /// Waits until the guest is asked to end.
    pub(super) async fn is_asked_to_end(&self) {
        let mut wanted = self.wanted.subscribe();
        // It does not fail: the sender is this machine's own.
        let _ = wanted.wait_for(|wanted| *wanted != Wanted::Running).await;
    }

    fn wants(&self, more: Wanted) {
        self.wanted.send_if_modified(|wanted| {
            let is_more = *wanted < more;
            *wanted = more.max(*wanted);
            is_more
        });
    }
}
