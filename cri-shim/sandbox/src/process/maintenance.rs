//! Periodic work for a running guest.
//!
//! Its clock is set: a minute after its start, as its first setting did not allow for the duration
//! of the request, then every ten minutes, and whenever the host's clock was set or the host wakes
//! up. A guest that can follow the host's clock does so from the first request on.
//!
//! It has to forget files of the shared directory that were removed on the host, which is checked
//! every minute: while it knows such a file, the host keeps it open and cannot reuse its space.

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use podvisor_host::watch;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tracing::debug;

use super::containers::Containers;

/// Interval of setting the guest's clock.
const CLOCK_INTERVAL: Duration = Duration::from_secs(600);

/// Interval of checks for removed files, and delay before the guest's clock is set first.
const FILES_INTERVAL: Duration = Duration::from_secs(60);

/// Runs as long as the guest.
pub(super) async fn of_guest(containers: Arc<Containers>) {
    tokio::join!(set_clock(&containers), forget_files(&containers));
}

async fn set_clock(containers: &Containers) {
    let steps = ClockSteps::new();
    let mut steps = steps
        .inspect_err(|error| debug!(%error, "cannot watch for clock changes"))
        .ok();
    let mut times = interval_at(Instant::now() + FILES_INTERVAL, CLOCK_INTERVAL);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = times.tick() => {}
            stepped = next_step(steps.as_ref()) => {
                if let Err(error) = stepped {
                    debug!(%error, "cannot watch for clock changes");
                    steps = None;
                    continue;
                }
            }
        }
        containers.set_clock().await;
    }
}

async fn forget_files(containers: &Containers) {
    let mut times = interval_at(Instant::now() + FILES_INTERVAL, FILES_INTERVAL);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        containers.forget_files().await;
    }
}

async fn next_step(steps: Option<&ClockSteps>) -> io::Result<()> {
    match steps {
        Some(steps) => steps.next().await,
        None => pending().await,
    }
}

/// Reports when the host's clock was set, or the host was suspended: the cancellation of a timer
/// that never expires (timerfd_create(2), `TFD_TIMER_CANCEL_ON_SET`).
#[derive(Debug)]
struct ClockSteps(AsyncFd<OwnedFd>);

impl ClockSteps {
    fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Realtime, flags)?;
        let never = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            },
        };
        let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        match timerfd_settime(&timer, flags, &never) {
            // The clock was set just now; the timer is armed nevertheless.
            Ok(_) | Err(Errno::CANCELED) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self(watch::readable(timer)?))
    }

    async fn next(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match rustix::io::read(self.0.get_ref(), &mut [0; size_of::<u64>()]) {
                // The timer stays armed for the next change.
                Err(Errno::CANCELED) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                // Practically never.
                Ok(_) => return pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_clock_that_nobody_sets_makes_no_steps() {
        let steps = ClockSteps::new().unwrap();
        tokio::select! {
            biased;
            stepped = steps.next() => panic!("{stepped:?}"),
            () = std::future::ready(()) => {}
        }
        let read = rustix::io::read(steps.0.get_ref(), &mut [0; 8]);
        assert_eq!(read, Err(Errno::AGAIN), "it is read without waiting");
    }
}
