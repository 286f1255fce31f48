//! What threads that serve queues wait with: event loops of a VM, and threads of single queues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// Room for the events of one wait; others are there at the next.
#[derive(Debug, Default)]
pub struct PollEvents([EpollEvent; 32]);

/// Whether a wait may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Until there is an event.
    Blocking,
    /// Not at all: the caller has more to do.
    Nonblocking,
}

/// Descriptors that a thread waits for, each with a number of the caller's.
#[derive(Debug)]
pub struct Poller {
    epoll: Epoll,
}

impl Poller {
    /// Creates one without descriptors.
    ///
    /// # Errors
    /// If there can be no more descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
        })
    }

    /// Waits for a descriptor from now on: it is reported as long as it is readable.
    ///
    /// # Errors
    /// If it is waited for already, or cannot be waited for.
    pub fn add(&self, fd: &impl AsRawFd, id: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN, id);
        self.epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event)
    }

    /// Waits for notifications of a queue's driver from now on. Each write of the eventfd is an
    /// event, without a read in between; so is one that came before.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn add_kick(&self, kick: &EventFd, id: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, id);
        self.epoll
            .ctl(ControlOperation::Add, kick.as_raw_fd(), event)
    }

    /// Does not wait for a descriptor any more. To close it does not suffice if another descriptor
    /// refers to the same file.
    ///
    /// # Errors
    /// If it was not waited for.
    pub fn remove(&self, fd: &impl AsRawFd) -> io::Result<()> {
        let event = EpollEvent::default();
        self.epoll
            .ctl(ControlOperation::Delete, fd.as_raw_fd(), event)
    }

    /// Waits, and returns the numbers of what is ready: none after a signal.
    ///
    /// # Errors
    /// If the kernel cannot report events.
    pub fn wait<'a>(
        &self,
        wait: Wait,
        events: &'a mut PollEvents,
    ) -> io::Result<impl Iterator<Item = u64> + use<'a>> {
        let timeout = match wait {
            Wait::Blocking => -1,
            Wait::Nonblocking => 0,
        };
        let count = match self.epoll.wait(timeout, &mut events.0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        let events = events.0.iter().take(count);
        Ok(events.map(EpollEvent::data))
    }
}

/// For those who wait for several of these.
impl AsRawFd for Poller {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.epoll.as_raw_fd()
    }
}

/// An eventfd by which one thread wakes another.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Creates one that has not been written.
    ///
    /// # Errors
    /// If there can be no more descriptors.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Makes it readable.
    pub fn wake(&self) {
        // It fails only when 2^64 - 2 writes are pending.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable, and returns whether it was readable.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn ready(poller: &Poller, wait: Wait) -> Vec<u64> {
        let mut events = PollEvents::default();
        let mut ids: Vec<_> = poller.wait(wait, &mut events).unwrap().collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn each_notification_is_reported_once_and_what_is_readable_until_it_is_read() {
        let poller = Poller::new().unwrap();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let wake = Wake::new().unwrap();
        kick.write(1).unwrap();
        poller.add_kick(&kick, 7).unwrap();
        poller.add(&wake, 8).unwrap();
        assert_eq!(ready(&poller, Wait::Nonblocking), [7]);
        assert!(ready(&poller, Wait::Nonblocking).is_empty());
        wake.wake();
        kick.write(1).unwrap();
        assert_eq!(ready(&poller, Wait::Nonblocking), [7, 8]);
        assert_eq!(ready(&poller, Wait::Blocking), [8]);
        assert!(wake.take() && !wake.take());
        assert!(ready(&poller, Wait::Nonblocking).is_empty());
        assert!(poller.add(&wake, 9).is_err());
        poller.remove(&wake).unwrap();
        wake.wake();
        assert!(ready(&poller, Wait::Nonblocking).is_empty());
        assert!(poller.remove(&wake).is_err());
    }
}
