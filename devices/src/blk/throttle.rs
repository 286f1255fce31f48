//! Rate limits of a disk: requests that are held back are resumed by a timer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::virtio::{Limiter, Rate};

/// The rate limits, and an epoll instance that reports their timer and the disk's completions. The
/// limits are shared by the whole device, the timer belongs to one engine.
#[derive(Debug)]
pub(super) struct Throttle {
    limiter: Arc<Mutex<Limiter>>,
    epoll: OwnedFd,
    timer: OwnedFd,
}

impl Throttle {
    pub(super) fn new(bytes: Option<Rate>, operations: Option<Rate>) -> io::Result<Self> {
        Self::over(Arc::new(Mutex::new(Limiter::new(bytes, operations))))
    }

    /// Shares the rate limits with another engine.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Self::over(self.limiter.clone())
    }

    fn over(limiter: Arc<Mutex<Limiter>>) -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let pace = Self {
            limiter,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
        };
        pace.watch(Some(pace.timer.as_fd()))?;
        Ok(pace)
    }

    /// Also reports the completions of a disk.
    pub(super) fn watch(&self, disk: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        disk.map_or(Ok(()), |fd| {
            Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
        })
    }

    /// Removes a disk that is about to be replaced. Its descriptor may stay open elsewhere.
    pub(super) fn forget(&self, disk: Option<BorrowedFd<'_>>) {
        if let Some(fd) = disk {
            // It was added, or adding it failed.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// The descriptor that the event loop waits for.
    pub(super) fn backend(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Whether the next request has to wait. In that case the timer is set.
    pub(super) fn is_over(&mut self) -> bool {
        let wait = self.limiter().wait();
        let Some(wait) = wait else {
            return false;
        };
        self.set(wait);
        true
    }

    /// Charges a request of `len` bytes that is started.
    pub(super) fn charge(&mut self, len: usize) {
        self.limiter().charge(len);
    }

    /// Refunds a request of `len` bytes that is put back.
    pub(super) fn refund(&mut self, len: usize) {
        self.limiter().refund(len);
    }

    fn limiter(&self) -> MutexGuard<'_, Limiter> {
        self.limiter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes [`Self::expired`] return true after this time.
    pub(super) fn set(&self, wait: Duration) {
        let spec = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: wait.subsec_nanos().into(),
            },
        };
        // The descriptor and the time are valid.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// Whether the timer has expired since the last call.
    pub(super) fn expired(&self) -> bool {
        rustix::io::read(&self.timer, &mut [0; 8]).is_ok()
    }
}
