//! Signals to podvisor while a program runs in its guest.

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// After this many SIGINT or SIGTERM, the guest is killed.
const FORCE_KILL_COUNT: usize = 3;

/// The time within which they have to arrive.
const FORCE_KILL_WINDOW: Duration = Duration::from_secs(10);

/// Returns the exit code for a process that a signal ended.
pub(super) fn exit_code_of(signal: u8) -> u8 {
    128_u8.saturating_add(signal)
}

/// A signal to this process, by its meaning for the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A signal for the program; its number.
    Forward(u8),
    /// The terminal was resized.
    Resized,
}

/// Catches the signals and returns them one by one.
#[derive(Debug)]
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    user1: Signal,
    user2: Signal,
    window: Signal,
}

/// The signal to the processes of a terminal that was closed.
pub(super) const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGQUIT: u8 = 3;
const SIGUSR1: u8 = 10;
const SIGUSR2: u8 = 12;
const SIGTERM: u8 = 15;

impl Signals {
    /// Starts to catch the signals; requires a runtime.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
            window: signal(SignalKind::window_change())?,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) -> Event {
        tokio::select! {
            _ = self.interrupt.recv() => Event::Forward(SIGINT),
            _ = self.terminate.recv() => Event::Forward(SIGTERM),
            _ = self.hangup.recv() => Event::Forward(SIGHUP),
            _ = self.quit.recv() => Event::Forward(SIGQUIT),
            _ = self.user1.recv() => Event::Forward(SIGUSR1),
            _ = self.user2.recv() => Event::Forward(SIGUSR2),
            _ = self.window.recv() => Event::Resized,
        }
    }

    /// Waits for the next signal that ends a process without a program to forward it to.
    pub(super) async fn ending(&mut self) -> u8 {
        loop {
            match self.next().await {
                Event::Forward(signal @ (SIGINT | SIGTERM | SIGHUP | SIGQUIT)) => return signal,
                Event::Forward(_) | Event::Resized => {}
            }
        }
    }
}

/// Detects a user who repeatedly asks for the end.
#[derive(Debug, Default)]
pub(super) struct ForceKillDetector {
    asked: Vec<Instant>,
}

impl ForceKillDetector {
    /// Records a signal; returns true if the limit is reached.
    pub(super) fn is_over(&mut self, signal: u8, now: Instant) -> bool {
        if !matches!(signal, SIGINT | SIGTERM) {
            return false;
        }
        self.asked
            .retain(|then| now.duration_since(*then) < FORCE_KILL_WINDOW);
        self.asked.push(now);
        self.asked.len() >= FORCE_KILL_COUNT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_make_exit_codes_above_128() {
        assert_eq!(exit_code_of(9), 137);
        assert_eq!(exit_code_of(2), 130);
    }

    #[test]
    fn the_third_in_a_short_time_is_one_too_many() {
        let mut impatience = ForceKillDetector::default();
        let now = Instant::now();
        assert!(!impatience.is_over(SIGINT, now));
        assert!(!impatience.is_over(SIGUSR1, now));
        assert!(!impatience.is_over(SIGTERM, now + Duration::from_secs(1)));
        assert!(impatience.is_over(SIGINT, now + Duration::from_secs(2)));
    }

    #[test]
    fn old_ones_are_forgotten() {
        let mut impatience = ForceKillDetector::default();
        let now = Instant::now();
        for seconds in [0, 1, 11, 12, 22] {
            let then = now + Duration::from_secs(seconds);
            assert!(!impatience.is_over(SIGINT, then), "{seconds}");
        }
    }
}
