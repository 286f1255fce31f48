//! The events that wake up the device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use vmm_sys_util::eventfd::EventFd;

use super::error::NetDeviceError;
use super::host::HostQueue;
use super::nic::Nic;
use super::pair::MAX_QUEUE_PAIRS;
use super::vhost::{RINGS, Report, Vhost, borrow};

#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    Receive,
    Transmit,
}

/// Identifiers in the epoll instance.
const RECEIVE_TIMER: u64 = 0;
const TRANSMIT_TIMER: u64 = 1;
/// The first queue of the backend; the others follow.
const NIC: u64 = 2;

/// The first of [`Report::ALL`], after the maximum number of queues.
const VHOST: u64 = NIC + MAX_QUEUE_PAIRS as u64;

/// The notifications of the pair that vhost could serve: receive, transmit.
const RECEIVE_KICK: u64 = VHOST + Report::ALL.len() as u64;
const TRANSMIT_KICK: u64 = RECEIVE_KICK + 1;

/// The maximum number of events that are reported together.
const EVENTS: usize = 2 + MAX_QUEUE_PAIRS + Report::ALL.len() + RINGS;

/// The events that woke up the device.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// Queues of the backend that have frames.
    pub(super) frames: [bool; MAX_QUEUE_PAIRS],
    /// Whether one of them takes frames again.
    pub(super) room: bool,
    /// A timer is over, or the driver notified a queue that is watched.
    pub(super) receive: bool,
    pub(super) transmit: bool,
    /// Which of [`Report::ALL`] were reported.
    pub(super) vhost: [bool; Report::ALL.len()],
}

/// The epoll instance that the device waits on. It has the backend, edge-triggered, so that frames
/// that cannot be taken are not reported again and again, and a timer for each direction, for rate
/// limits and for work that exceeded a budget.
#[derive(Debug)]
pub(super) struct Events {
    epoll: OwnedFd,
    receive: OwnedFd,
    transmit: OwnedFd,
    /// Queues of the backend that must become writable before frames can be sent.
    await_room: [bool; MAX_QUEUE_PAIRS],
}

impl Events {
    pub(super) fn new(queues: &[HostQueue]) -> Result<Self, NetDeviceError> {
        let error = |what| {
            move |source: rustix::io::Errno| NetDeviceError::Descriptor {
                what,
                source: source.into(),
            }
        };
        let timer = || {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            timerfd_create(TimerfdClockId::Monotonic, flags).map_err(error("a timer"))
        };
        let events = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(error("an epoll instance"))?,
            receive: timer()?,
            transmit: timer()?,
            await_room: [false; MAX_QUEUE_PAIRS],
        };
        let add = |fd: BorrowedFd<'_>, id| {
            let data = epoll::EventData::new_u64(id);
            epoll::add(&events.epoll, fd, data, EDGES).map_err(error("a watch"))
        };
        for (id, queue) in (NIC..).zip(queues) {
            add(queue.nic.fd(), id)?;
        }
        add(events.receive.as_fd(), RECEIVE_TIMER)?;
        add(events.transmit.as_fd(), TRANSMIT_TIMER)?;
        Ok(events)
    }

    /// Watches the kernel's reports about a pair.
    pub(super) fn watch_vhost(&self, vhost: &Vhost) -> Result<(), NetDeviceError> {
        for (id, report) in (VHOST..).zip(Report::ALL) {
            let Some(fd) = vhost.fd(report) else { continue };
            let data = epoll::EventData::new_u64(id);
            let added = epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN);
            added.map_err(|source| NetDeviceError::Descriptor {
                what: "a watch",
                source: source.into(),
            })?;
        }
        Ok(())
    }

    /// Undoes [`Self::watch_vhost`].
    pub(super) fn forget_vhost(&self, vhost: &Vhost) {
        for fd in Report::ALL.iter().filter_map(|report| vhost.fd(*report)) {
            // It was added.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// Stops watching the first queue of the backend, which the kernel reads from now on.
    pub(super) fn ignore_nic(&self, nic: &dyn Nic) {
        // It was added.
        let _ = epoll::delete(&self.epoll, nic.fd());
    }

    /// Undoes [`Self::ignore_nic`]. Frames that it has are reported.
    pub(super) fn watch_nic(&self, nic: &dyn Nic) -> io::Result<()> {
        let data = epoll::EventData::new_u64(NIC);
        Ok(epoll::add(&self.epoll, nic.fd(), data, EDGES)?)
    }

    /// Watches the driver's notifications of a queue of the first pair: receive 0, transmit 1.
    pub(super) fn watch_kick(&self, ring: usize, kick: &EventFd) -> io::Result<()> {
        let data = epoll::EventData::new_u64(match ring {
            0 => RECEIVE_KICK,
            _ => TRANSMIT_KICK,
        });
        Ok(epoll::add(&self.epoll, borrow(kick), data, EDGES)?)
    }

    /// Undoes [`Self::watch_kick`]. One that is not watched stays so.
    pub(super) fn ignore_kick(&self, kick: &EventFd) {
        let _ = epoll::delete(&self.epoll, borrow(kick));
    }

    /// The descriptor that the event loop waits for.
    pub(super) fn backend(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Reports a queue of the backend again if it has frames now.
    pub(super) fn watch_again(&self, number: usize, nic: &dyn Nic) {
        // At most MAX_QUEUE_PAIRS.
        let id = u64::try_from(number).unwrap_or(u64::MAX);
        let data = epoll::EventData::new_u64(NIC.saturating_add(id));
        let events = match self.await_room.get(number) {
            Some(true) => EDGES | epoll::EventFlags::OUT,
            _ => EDGES,
        };
        // It was added, unless the kernel reads it.
        let _ = epoll::modify(&self.epoll, nic.fd(), data, events);
    }

    /// Reports a queue of the backend once, when it is writable. A socket becomes writable each
    /// time its peer reads, so it is not watched permanently.
    pub(super) fn await_room(&mut self, number: usize, nic: &dyn Nic) {
        if let Some(awaits) = self.await_room.get_mut(number) {
            *awaits = true;
        }
        self.watch_again(number, nic);
    }

    /// Reports a direction again after this time.
    pub(super) fn soon(&self, direction: Direction, wait: Duration) {
        let timer = match direction {
            Direction::Receive => &self.receive,
            Direction::Transmit => &self.transmit,
        };
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: wait.subsec_nanos().into(),
            },
        };
        // The descriptor and the time are valid.
        let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// Returns the pending events; each is reported once.
    pub(super) fn take(&mut self, queues: &[HostQueue]) -> Ready {
        let mut ready = Ready::default();
        let mut buffer = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(u64::MAX),
        }; EVENTS];
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let Ok(count) = epoll::wait(&self.epoll, &mut buffer, Some(&none)) else {
            return ready;
        };
        for epoll::Event { flags, data } in buffer.into_iter().take(count) {
            match data.u64() {
                RECEIVE_TIMER => ready.receive |= expired(&self.receive),
                TRANSMIT_TIMER => ready.transmit |= expired(&self.transmit),
                RECEIVE_KICK => ready.receive = true,
                TRANSMIT_KICK => ready.transmit = true,
                id if id >= VHOST => {
                    let number = usize::try_from(id.saturating_sub(VHOST)).unwrap_or(usize::MAX);
                    if let Some(reported) = ready.vhost.get_mut(number) {
                        *reported = true;
                    }
                }
                id => {
                    let number = usize::try_from(id.saturating_sub(NIC)).unwrap_or(usize::MAX);
                    let (Some(frames), Some(awaits), Some(queue)) = (
                        ready.frames.get_mut(number),
                        self.await_room.get_mut(number),
                        queues.get(number),
                    ) else {
                        continue;
                    };
                    // A hangup is reported as both: reading and writing will find the error.
                    *frames |= flags != epoll::EventFlags::OUT;
                    if flags != epoll::EventFlags::IN && std::mem::take(awaits) {
                        ready.room = true;
                        self.watch_again(number, &*queue.nic);
                    }
                }
            }
        }
        ready
    }
}

const EDGES: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// Resets a timer, and returns whether it had expired.
fn expired(timer: &OwnedFd) -> bool {
    let mut count = [0; 8];
    rustix::io::read(timer, &mut count).is_ok()
}
