//! One port: its queues, the host's end, and what the driver has yet to be told.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::epoll::{self, EventData, EventFlags};
use vm_memory::VolatileSlice;

use super::control::Event;
use super::counters::Counters;
use crate::console::MAX_TRANSMIT;
use crate::virtio::{Fault, Progress, Queue, SpareList, iovec};

/// Bytes in each direction before the next port has its turn.
const BUDGET: usize = 64 << 10;

/// Bytes read from the host's end at once.
const PIECE: usize = 4096;

/// A port that has a name.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) rx: Option<Queue>,
    pub(super) tx: Option<Queue>,
    stream: Option<UnixStream>,
    /// What the host's end is waited for, in the device's epoll instance.
    watched: Option<EventFlags>,
    /// The rest of the last transmission.
    backlog: Vec<u8>,
    /// The last turn has left transmissions in the queue, of which no kick will tell.
    is_behind: bool,
    /// The driver has no buffers for what the host sends.
    is_starved: bool,
    session: Session,
}

/// What driver and device have agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Session {
    /// The driver has set the port up.
    is_ready: bool,
    /// A program in the guest has it open.
    is_open: bool,
    /// The driver is to be told that the port is there,
    due_add: bool,
    /// what its name is,
    due_name: bool,
    /// and whether the host's end is connected.
    due_open: bool,
}

impl Session {
    /// Returns it as bits, for a snapshot.
    pub(super) fn bits(self) -> u8 {
        let all = [
            self.is_ready,
            self.is_open,
            self.due_add,
            self.due_name,
            self.due_open,
        ];
        (0u8..).zip(all).fold(0, |bits, (at, is_set)| {
            bits | u8::from(is_set).checked_shl(at.into()).unwrap_or(0)
        })
    }

    /// Returns what [`Self::bits`] returned; `None` for other bits.
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        let has = |bit: u8| bits & bit != 0;
        (bits < 1 << 5).then(|| Self {
            is_ready: has(1),
            is_open: has(2),
            due_add: has(4),
            due_name: has(8),
            due_open: has(16),
        })
    }
}

impl Port {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            rx: None,
            tx: None,
            stream: None,
            watched: None,
            backlog: Vec::new(),
            is_behind: false,
            is_starved: false,
            session: Session::default(),
        }
    }

    pub(super) fn session(&self) -> Session {
        self.session
    }

    /// Continues a saved session, with another host's end or none, of which the driver is told.
    pub(super) fn restore(&mut self, saved: Session) {
        self.session = Session {
            due_open: saved.is_ready,
            ..saved
        };
    }

    /// Forgets the driver.
    pub(super) fn reset(&mut self) {
        self.session = Session::default();
        self.is_behind = false;
        self.is_starved = false;
    }

    /// Whether the host has not taken all that the driver has transmitted.
    pub(super) fn is_behind(&self) -> bool {
        !self.backlog.is_empty() || self.is_behind
    }

    pub(super) fn is_open(&self) -> bool {
        self.session.is_open
    }

    /// Replaces the host's end.
    pub(super) fn connect(&mut self, stream: Option<UnixStream>, epoll: &OwnedFd) {
        self.close(epoll);
        self.stream = stream;
        self.session.due_open = self.session.is_ready;
        self.watch(epoll);
    }

    /// Drops the host's end, and what it did not take.
    fn close(&mut self, epoll: &OwnedFd) {
        if let (Some(stream), Some(_)) = (&self.stream, self.watched.take()) {
            let _ = epoll::delete(epoll, stream);
        }
        if self.stream.take().is_some() {
            self.session.due_open = self.session.is_ready;
        }
        self.backlog = Vec::new();
    }

    /// The driver has set itself up, and wants to hear of all ports.
    pub(super) fn on_device_ready(&mut self) {
        self.session = Session {
            due_add: true,
            ..Session::default()
        };
    }

    pub(super) fn on_event(&mut self, event: Event, is_set: bool) {
        let session = &mut self.session;
        match event {
            Event::PortReady => {
                session.is_ready = is_set;
                session.due_name = is_set;
                session.due_open = is_set && self.stream.is_some();
            }
            Event::PortOpen => session.is_open = is_set,
            Event::DeviceReady | Event::PortAdd | Event::PortName => {}
        }
    }

    /// Returns what the driver has to be told next, and whether it is so.
    pub(super) fn due(&self) -> Option<(Event, bool)> {
        let session = &self.session;
        if session.due_add {
            Some((Event::PortAdd, true))
        } else if session.due_name {
            Some((Event::PortName, true))
        } else if session.due_open {
            Some((Event::PortOpen, self.stream.is_some()))
        } else {
            None
        }
    }

    /// The driver was told.
    pub(super) fn told(&mut self, event: Event) {
        let session = &mut self.session;
        match event {
            Event::PortAdd => session.due_add = false,
            Event::PortName => session.due_name = false,
            Event::PortOpen => session.due_open = false,
            Event::DeviceReady | Event::PortReady => {}
        }
    }

    /// The driver made buffers available.
    pub(super) fn on_buffers(&mut self) {
        self.is_starved = false;
    }

    /// Passes on what the driver sends, until the host's end is full.
    pub(super) fn transmit(
        &mut self,
        counters: &Counters,
        slices: &mut SpareList,
        epoll: &OwnedFd,
    ) -> Result<Progress, Fault> {
        self.flush(counters, epoll);
        let Some(tx) = self.tx.as_mut().filter(|_| self.backlog.is_empty()) else {
            self.watch(epoll);
            return Ok(Progress::Idle);
        };
        let mem = tx.shared_memory();
        let mut list = slices.take();
        let (stream, backlog) = (&self.stream, &mut self.backlog);
        let mut has_failed = false;
        let progress = tx.serve(BUDGET, |tx, chain| {
            let len = chain.readable_len();
            if len > MAX_TRANSMIT {
                return Err(Fault::protocol("a transmission of a port that is too long"));
            }
            let sent = match stream.as_ref().filter(|_| !has_failed) {
                None => Err(io::ErrorKind::NotConnected.into()),
                Some(stream) if len > 0 => {
                    chain.readable_slices(&mem, 0, len, &mut list)?;
                    iovec::send(stream.as_fd(), &list)
                }
                Some(_) => Ok(0),
            };
            let sent = match sent {
                Ok(sent) => sent.min(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(_) => {
                    has_failed = true;
                    counters.lost_bytes.add(len as u64);
                    tx.complete(chain, 0)?;
                    return Ok(len);
                }
            };
            counters.tx_bytes.add(sent as u64);
            let is_full = sent < len;
            if is_full {
                backlog.resize(len.saturating_sub(sent), 0);
                chain.read(&mem, sent, backlog)?;
            }
            tx.complete(chain, 0)?;
            Ok(if is_full { usize::MAX } else { len })
        });
        slices.put_back(list);
        self.is_behind = matches!(progress, Ok(Progress::More));
        if has_failed {
            self.close(epoll);
        }
        self.watch(epoll);
        progress
    }

    /// Passes on what is left of a transmission.
    fn flush(&mut self, counters: &Counters, epoll: &OwnedFd) {
        let Some(stream) = &self.stream else {
            return;
        };
        if self.backlog.is_empty() {
            return;
        }
        let rest = [VolatileSlice::from(self.backlog.as_mut_slice())];
        match iovec::send(stream.as_fd(), &rest) {
            Ok(sent) => {
                let sent = sent.min(self.backlog.len());
                counters.tx_bytes.add(sent as u64);
                self.backlog.drain(..sent);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => {
                counters.lost_bytes.add(self.backlog.len() as u64);
                self.close(epoll);
            }
        }
    }

    /// Passes on what the host sends, as long as the driver has buffers and a program has the port
    /// open.
    pub(super) fn receive(
        &mut self,
        counters: &Counters,
        slices: &mut SpareList,
        epoll: &OwnedFd,
    ) -> Result<(), Fault> {
        let mut has_ended = false;
        if let (Some(stream), Some(rx), true) = (&self.stream, &mut self.rx, self.session.is_open) {
            let mem = rx.shared_memory();
            let mut list = slices.take();
            let mut spent = 0usize;
            while spent < BUDGET {
                let Some(chain) = rx.next_or_enable_kicks()? else {
                    self.is_starved = true;
                    break;
                };
                let room = chain.writable_len().min(PIECE);
                if room == 0 {
                    spent = spent.saturating_add(chain.cost());
                    rx.complete(chain, 0)?;
                    continue;
                }
                chain.writable_slices(&mem, 0, room, &mut list)?;
                match iovec::receive(stream.as_fd(), &list) {
                    Ok(len) if len > 0 => {
                        let len = len.min(room);
                        spent = spent.saturating_add(len).saturating_add(chain.cost());
                        // At most PIECE.
                        rx.complete(chain, u32::try_from(len).unwrap_or(0))?;
                        counters.rx_bytes.add(len as u64);
                    }
                    other => {
                        rx.undo_pop(chain);
                        let waits = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
                        has_ended = !other.as_ref().is_err_and(waits);
                        break;
                    }
                }
            }
            slices.put_back(list);
            rx.notify()?;
        }
        if has_ended {
            self.close(epoll);
        }
        self.watch(epoll);
        Ok(())
    }

    /// Waits for what can be done next. An end for which nothing can be done is not waited for: its
    /// hangup would be reported again and again.
    pub(super) fn watch(&mut self, epoll: &OwnedFd) {
        let Some(stream) = &self.stream else {
            return;
        };
        let mut wanted = EventFlags::empty();
        if self.session.is_open && self.rx.is_some() && !self.is_starved {
            wanted |= EventFlags::IN;
        }
        if !self.backlog.is_empty() {
            wanted |= EventFlags::OUT;
        }
        let wanted = (!wanted.is_empty()).then_some(wanted);
        if wanted == self.watched {
            return;
        }
        let data = EventData::new_u64(0);
        let result = match (self.watched, wanted) {
            (None, Some(flags)) => epoll::add(epoll, stream, data, flags),
            (Some(_), Some(flags)) => epoll::modify(epoll, stream, data, flags),
            (_, None) => epoll::delete(epoll, stream),
        };
        match result {
            Ok(()) => self.watched = wanted,
            Err(error) => {
                let name = &self.name;
                tracing::warn!(name, %error, "the host's end of a port cannot be waited for");
            }
        }
    }
}
