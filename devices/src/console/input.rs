//! The input descriptor of a console, and when it is waited for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use vm_memory::VolatileSlice;

use crate::virtio::iovec;

/// Why a descriptor cannot be a console's input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsoleError {
    /// For example a regular file, which cannot be waited for.
    #[error("the console's input cannot be waited for: give a terminal, pipe or socket")]
    NotPollable(#[source] io::Error),
    /// No epoll instance.
    #[error("failed to create an epoll instance for the console's input")]
    Epoll(#[source] io::Error),
}

/// An input within its own epoll instance. It is read only once after each report, so that it need
/// not be made non-blocking, which would affect other processes that share it.
#[derive(Debug)]
pub(super) struct Input {
    fd: OwnedFd,
    epoll: OwnedFd,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Readiness is reported.
    Watched,
    /// The driver has no buffers: a report would be useless, and be repeated again and again.
    Ignored,
    /// There will be no more input.
    Ended,
}

impl Input {
    pub(super) fn new(fd: OwnedFd) -> Result<Self, ConsoleError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| ConsoleError::Epoll(error.into()))?;
        let input = Self {
            fd,
            epoll,
            state: State::Watched,
        };
        input
            .add()
            .map_err(|error| ConsoleError::NotPollable(error.into()))?;
        Ok(input)
    }

    fn add(&self) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.epoll, &self.fd, data, epoll::EventFlags::IN)
    }

    pub(super) fn backend(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Waits for input, since the driver has buffers (again).
    pub(super) fn watch(&mut self) -> io::Result<()> {
        if self.state == State::Ignored {
            self.add()?;
            self.state = State::Watched;
        }
        Ok(())
    }

    /// Stops waiting, since the driver has no buffers. A hangup is reported regardless of the
    /// events of interest, so the descriptor is removed from the epoll instance.
    pub(super) fn ignore(&mut self) {
        if self.state == State::Watched {
            let _ = epoll::delete(&self.epoll, &self.fd);
            self.state = State::Ignored;
        }
    }

    /// Whether there is something to read, or the end of the input.
    pub(super) fn is_ready(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let none = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        self.state == State::Watched && matches!(poll(&mut fds, Some(&none)), Ok(1))
    }

    /// Reads once. Returns 0 at the end, after an error, and if there was nothing to read.
    pub(super) fn read(&mut self, slices: &[VolatileSlice<'_>]) -> usize {
        match iovec::receive(self.fd.as_fd(), slices) {
            Ok(len) if len > 0 => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            _ => {
                self.ignore();
                self.state = State::Ended;
                0
            }
        }
    }
}
