//! The time that a guest has to answer the end of a connection (§5.10.6.5).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// The seconds after which the guest has had time to answer: as long as Linux waits.
const SECONDS: i64 = 8;

/// A timer that runs while connections are over for the host and not for the guest.
#[derive(Debug)]
pub(in crate::vsock) struct CloseTimer {
    timer: OwnedFd,
    runs: bool,
}

impl CloseTimer {
    pub(in crate::vsock) fn new() -> Result<Self, Errno> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self {
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            runs: false,
        })
    }

    /// Readable when the time is over. Each time is a new edge: it need not be read.
    pub(in crate::vsock) fn fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Starts the timer, unless it runs.
    pub(in crate::vsock) fn start(&mut self) {
        if !self.runs {
            self.runs = true;
            self.set(SECONDS, 0);
        }
    }

    /// Lets a timer that runs start anew: the guest could not answer until now.
    pub(in crate::vsock) fn restart(&mut self) {
        if self.runs {
            self.set(SECONDS, 0);
        }
    }

    /// The time is over.
    pub(in crate::vsock) fn expired(&mut self) {
        self.runs = false;
    }

    fn set(&self, seconds: i64, nanoseconds: i64) {
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: seconds,
                tv_nsec: nanoseconds,
            },
        };
        // The descriptor and the time are valid.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

#[cfg(test)]
impl CloseTimer {
    pub(in crate::vsock) fn runs(&self) -> bool {
        self.runs
    }

    /// Lets the time be over immediately, if the timer runs.
    pub(in crate::vsock) fn expire(&self) {
        if self.runs {
            self.set(0, 1);
        }
    }

    /// The seconds that are left, rounded up; 0 if the kernel's timer does not run.
    pub(in crate::vsock) fn left(&self) -> i64 {
        let value = rustix::time::timerfd_gettime(&self.timer).unwrap().it_value;
        value.tv_sec + i64::from(value.tv_nsec > 0)
    }
}
