//! All sockets of the host, registered in one epoll instance.
//!
//! Every socket is registered once, edge-triggered, for its lifetime: readiness is remembered here
//! until it is used up. So a guest without receive buffers or credit causes no busy loop, and a
//! change of interest needs no system call.
//!
//! `guest.rs` handles packets of the guest, `close_timer.rs` is the timer of connections that the
//! guest does not end, `counters.rs` has the statistics.

mod close_timer;
mod counters;
mod guest;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;

use super::connection::{Connection, NextPacket, Outcome};
use super::error::VsockError;
use super::handshake::{self, Handshake};
use super::host::VsockHost;
use super::outlet::Outlet;
use super::packet::{Header, Op, Ports};
use super::{MAX_GUEST_CID, MIN_GUEST_CID};
use crate::descriptors::{MAX_CONNECTIONS, Shares};
use crate::virtio::{Fault, RateLimit, SpareList};
use close_timer::CloseTimer;
pub(super) use counters::Counters;

/// The maximum number of resets that wait for receive buffers; with that many, no packet of the
/// guest is processed.
pub(super) const MAX_RESETS: usize = 256;

/// The buffer size of the first [`LARGE_BUFFERS`] connections, for slow host programs.
const LARGE_BUFFER: u32 = 512 << 10;
const LARGE_BUFFERS: usize = 32;
/// The buffer size of all others.
const SMALL_BUFFER: u32 = 32 << 10;

/// The first port of the host that is assigned to a host program, and the one after the last.
const FIRST_HOST_PORT: u32 = 1 << 30;
const END_OF_HOST_PORTS: u32 = u32::MAX;

/// Identifiers in the epoll instance; those of connections are between them.
const LISTENER: u64 = 0;
const REMINDER: u64 = u64::MAX;
const CLOSE_TIMER: u64 = u64::MAX - 1;
const EVENTS_PER_CALL: usize = 64;

/// The next thing to send to the guest.
#[derive(Debug)]
pub(super) enum Work {
    /// A complete packet.
    Packet(Header),
    /// Data of this connection.
    Data(u64),
}

/// The handler of streams that the guest opens.
struct OnConnect(Box<dyn FnMut(UnixStream) + Send>);

impl fmt::Debug for OnConnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnConnect")
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Mux {
    guest_cid: u64,
    /// The driver has streams.
    streams: bool,
    epoll: OwnedFd,
    host: Box<dyn VsockHost>,
    /// Ports of the host that this process serves itself.
    listeners: HashMap<u32, OnConnect>,
    /// Also in the epoll instance: keeps the device readable if work is left.
    reminder: OwnedFd,
    /// Also in the epoll instance.
    close_timer: CloseTimer,
    /// The listener may have more connections, but there was no room.
    accept_pending: bool,
    shares: Shares,
    next_id: u64,
    next_host_port: u32,
    handshakes: BTreeMap<u64, OwnedFd>,
    connections: HashMap<u64, Connection>,
    by_ports: HashMap<Ports, u64>,
    /// Connections that are over, with bytes that the host program has not read yet.
    lingering: HashMap<u64, Outlet>,
    /// Connections that may have something for the guest, each once, served in turn.
    ready: VecDeque<u64>,
    resets: VecDeque<Header>,
    scratch: SpareList,
    log: RateLimit,
    pub(super) counters: Arc<Counters>,
}

impl Mux {
    pub(super) fn new(guest_cid: u64, host: Box<dyn VsockHost>) -> Result<Self, VsockError> {
        check_cid(guest_cid)?;
        let epoll_error = |source: Errno| VsockError::Epoll(source.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(epoll_error)?;
        let reminder =
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(epoll_error)?;
        let mux = Self {
            guest_cid,
            streams: true,
            epoll,
            host,
            listeners: HashMap::new(),
            reminder,
            close_timer: CloseTimer::new().map_err(epoll_error)?,
            accept_pending: false,
            shares: Shares::now(),
            next_id: LISTENER,
            next_host_port: FIRST_HOST_PORT,
            handshakes: BTreeMap::new(),
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            lingering: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            scratch: SpareList::default(),
            log: RateLimit::new(Duration::from_secs(10)),
            counters: Arc::default(),
        };
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        if let Some(fd) = mux.host.fd() {
            let data = epoll::EventData::new_u64(LISTENER);
            epoll::add(&mux.epoll, fd, data, edges).map_err(epoll_error)?;
        }
        let data = epoll::EventData::new_u64(REMINDER);
        epoll::add(&mux.epoll, &mux.reminder, data, edges).map_err(epoll_error)?;
        let data = epoll::EventData::new_u64(CLOSE_TIMER);
        epoll::add(&mux.epoll, mux.close_timer.fd(), data, edges).map_err(epoll_error)?;
        Ok(mux)
    }

    /// Keeps the epoll instance readable, for work that exceeded the budget.
    pub(super) fn remind(&self) {
        // It fails only when 2^64 - 2 reminders are pending.
        let _ = rustix::io::write(&self.reminder, &1u64.to_ne_bytes());
    }

    pub(super) fn limit_connections(&mut self, limit: usize) {
        self.shares.limit_connections(limit);
    }

    /// Sets whether the driver has streams. If it has none, there are no connections: its own
    /// packets are of an unknown type, and host programs are refused.
    pub(super) fn set_streams(&mut self, streams: bool) {
        self.streams = streams;
        if !streams {
            self.forget_connections();
        }
    }

    pub(super) fn uses_paths(&self) -> bool {
        self.host.uses_paths()
    }

    pub(super) fn guest_cid(&self) -> u64 {
        self.guest_cid
    }

    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn statistics(&self) -> (usize, usize, usize, usize) {
        (
            self.connections.len(),
            self.handshakes.len(),
            self.lingering.len(),
            self.resets.len(),
        )
    }

    #[cfg(test)]
    pub(super) fn close_timer(&self) -> &CloseTimer {
        &self.close_timer
    }

    #[cfg(test)]
    pub(super) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    // ---- The host's side ----

    /// Handles the events of the sockets.
    pub(super) fn poll(&mut self) -> Result<(), Fault> {
        let mut buffer = [MaybeUninit::uninit(); EVENTS_PER_CALL];
        // Edge-triggered: no socket reports the same event twice in a row, so this ends; the bound
        // is for host programs that cause new events meanwhile.
        for _ in 0..MAX_CONNECTIONS {
            let events = match epoll::wait(&self.epoll, &mut buffer, Some(&NO_WAIT)) {
                Ok((events, _)) => events,
                Err(error) => {
                    return Err(Fault::host(
                        "failed to wait for vsock sockets",
                        error.into(),
                    ));
                }
            };
            let last = events.len() < EVENTS_PER_CALL;
            for event in events {
                // The structure is packed: copy before use.
                let (id, flags) = (event.data.u64(), event.flags);
                self.on_event(id, flags);
            }
            if last {
                break;
            }
        }
        self.accept();
        Ok(())
    }

    fn on_event(&mut self, id: u64, flags: epoll::EventFlags) {
        match id {
            LISTENER => self.accept_pending = true,
            // Every write is a new edge: the count need not be read.
            REMINDER => {}
            CLOSE_TIMER => self.end_overdue(),
            _ => self.on_socket(id, flags),
        }
    }

    /// Resets the connections that were abandoned already when the time was over before: the guest
    /// had as long again to end them (§5.10.6.5).
    fn end_overdue(&mut self) {
        self.close_timer.expired();
        let mut overdue = Vec::new();
        for (id, connection) in &mut self.connections {
            if connection.abandoned() {
                if std::mem::replace(&mut connection.overdue, true) {
                    overdue.push(*id);
                } else {
                    self.close_timer.start();
                }
            }
        }
        for id in overdue {
            self.apply_outcome(id, Outcome::Reset);
        }
    }

    /// Gives the guest its time anew, after its queues have not been served for a while.
    pub(super) fn restart_close_timer(&mut self) {
        self.close_timer.restart();
    }

    fn on_socket(&mut self, id: u64, flags: epoll::EventFlags) {
        use epoll::EventFlags as E;
        if self.handshakes.contains_key(&id) {
            self.on_handshake(id, flags.intersects(E::HUP | E::ERR | E::RDHUP));
            return;
        }
        if let Some(outlet) = self.lingering.get_mut(&id) {
            outlet.set_writable();
            if outlet.flush().is_err() || outlet.is_empty() {
                self.lingering.remove(&id);
            }
            return;
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            let outcome = connection.on_socket(
                flags.intersects(E::IN | E::RDHUP),
                flags.intersects(E::OUT | E::ERR | E::HUP),
                flags.intersects(E::HUP | E::ERR),
            );
            self.apply_outcome(id, outcome);
        }
    }

    /// Accepts new host programs as long as there is room.
    pub(super) fn accept(&mut self) {
        while self.accept_pending && self.has_room() {
            match self.host.accept() {
                Ok(Some(socket)) => self.begin_handshake(socket),
                Ok(None) => self.accept_pending = false,
                Err(error) => {
                    // Out of descriptors or memory: retried at the next wake-up.
                    self.log_error("a host program could not be accepted", &error);
                    return;
                }
            }
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd) {
        // A new one replaces the oldest.
        if self.handshakes.len() >= self.shares.handshakes {
            self.handshakes.pop_first();
            self.counters.handshakes_dropped.one();
        }
        let id = self.new_id();
        if let Err(error) = self.watch(id, socket.as_fd()) {
            self.log_error("a socket could not be watched", &error.into());
            return;
        }
        self.handshakes.insert(id, socket);
        // Most programs have sent their line already.
        self.on_handshake(id, false);
    }

    fn on_handshake(&mut self, id: u64, closed: bool) {
        let Some(socket) = self.handshakes.get(&id) else {
            return;
        };
        let answer = handshake::read(socket);
        if answer == Handshake::Incomplete && !closed {
            return;
        }
        let Some(socket) = self.handshakes.remove(&id) else {
            return;
        };
        match answer {
            Handshake::Connect(port) if self.streams && self.has_room() => {
                let ports = Ports {
                    guest: port,
                    host: self.new_host_port(port),
                };
                self.counters.from_host.one();
                let connection = Connection::from_host(socket, ports, self.buffer_size());
                self.insert(id, connection);
            }
            _ => self.counters.handshakes_dropped.one(),
        }
    }

    #[cfg(test)]
    pub(super) fn max_connections(&self) -> usize {
        self.shares.connections
    }

    fn has_room(&mut self) -> bool {
        if self.occupied() < self.shares.connections {
            return true;
        }
        // A guest may keep connections that no longer have a user on the host.
        let abandoned = self
            .connections
            .iter()
            .find(|(_, connection)| connection.abandoned())
            .map(|(id, _)| *id);
        if let Some(id) = abandoned {
            self.apply_outcome(id, Outcome::Reset);
        }
        self.occupied() < self.shares.connections
    }

    fn occupied(&self) -> usize {
        self.connections.len().saturating_add(self.lingering.len())
    }

    fn buffer_size(&self) -> u32 {
        let large = self
            .connections
            .values()
            .filter(|connection| connection.buf_alloc() == LARGE_BUFFER)
            .count()
            .saturating_add(self.lingering.len());
        if large < LARGE_BUFFERS {
            LARGE_BUFFER
        } else {
            SMALL_BUFFER
        }
    }

    fn new_id(&mut self) -> u64 {
        // 2^64 connections are more than a host ever has.
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    fn new_host_port(&mut self, guest: u32) -> u32 {
        // There are far fewer connections than ports: this ends.
        loop {
            let host = self.next_host_port;
            self.next_host_port = match host.checked_add(1) {
                Some(next) if next < END_OF_HOST_PORTS => next,
                _ => FIRST_HOST_PORT,
            };
            if !self.by_ports.contains_key(&Ports { guest, host }) {
                return host;
            }
        }
    }

    fn watch(&self, id: u64, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        use epoll::EventFlags as E;
        rustix::io::ioctl_fionbio(socket, true)?;
        epoll::add(
            &self.epoll,
            socket,
            epoll::EventData::new_u64(id),
            E::IN | E::OUT | E::RDHUP | E::ET,
        )
    }

    fn insert(&mut self, id: u64, connection: Connection) {
        self.by_ports.insert(connection.ports(), id);
        self.connections.insert(id, connection);
        self.schedule(id);
    }

    /// Applies the outcome of an event to a connection.
    fn apply_outcome(&mut self, id: u64, outcome: Outcome) {
        if outcome == Outcome::Lives {
            self.schedule(id);
            return;
        }
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        self.by_ports.remove(&connection.ports());
        // While the guest gives no buffers, nothing else takes it out.
        if connection.queued {
            self.ready.retain(|other| *other != id);
        }
        if outcome == Outcome::Reset && !connection.unknown_to_guest() {
            let reset = connection.header(self.guest_cid, Op::Reset, 0, 0);
            self.resets.push_back(reset);
        }
        self.linger(id, connection);
    }

    /// Keeps the socket until a host program has read what the guest sent before the end.
    fn linger(&mut self, id: u64, connection: Connection) {
        let outlet = connection.into_outlet();
        if !outlet.is_empty() {
            self.lingering.insert(id, outlet);
        }
    }

    fn schedule(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if !connection.queued && connection.next_packet().is_some() {
            connection.queued = true;
            self.ready.push_back(id);
        }
        if connection.abandoned() {
            self.close_timer.start();
        }
    }

    /// The port of the host that the next program will get.
    pub(super) fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// Continues to assign ports of the host from this one; `false` if it is not in the range.
    pub(super) fn continue_from_host_port(&mut self, port: u32) -> bool {
        let possible = (FIRST_HOST_PORT..END_OF_HOST_PORTS).contains(&port);
        if possible {
            self.next_host_port = port;
        }
        possible
    }

    /// Ends every connection without notifying the guest, which is about to forget them.
    pub(super) fn forget_connections(&mut self) {
        for (id, connection) in std::mem::take(&mut self.connections) {
            self.linger(id, connection);
        }
        self.by_ports.clear();
        self.ready.clear();
        self.resets.clear();
    }

    // ---- Towards the guest ----

    /// Whether anything may be waiting for the guest's receive buffers.
    pub(super) fn has_work(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Whether packets of the guest may be processed, each of which may need a reset as the answer.
    pub(super) fn may_receive(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Takes the next thing to send. After [`Work::Data`] the caller reads from
    /// [`Self::connection`] and ends the turn with [`Self::end_turn`].
    pub(super) fn next_work(&mut self) -> Option<Work> {
        if let Some(reset) = self.resets.pop_front() {
            self.counters.resets_sent.one();
            return Some(Work::Packet(reset));
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            connection.queued = false;
            match connection.next_packet() {
                Some(NextPacket::Control(op, flags)) => {
                    let header = connection.header(self.guest_cid, op, flags, 0);
                    self.schedule(id);
                    return Some(Work::Packet(header));
                }
                Some(NextPacket::Data) => return Some(Work::Data(id)),
                None => {}
            }
        }
        None
    }

    pub(super) fn connection(&mut self, id: u64) -> Option<&mut Connection> {
        self.connections.get_mut(&id)
    }

    /// Ends the turn of a connection.
    pub(super) fn end_turn(&mut self, id: u64, failed: bool) {
        self.apply_outcome(
            id,
            if failed {
                Outcome::Reset
            } else {
                Outcome::Lives
            },
        );
    }

    // ---- This process ----

    /// Opens a stream to a port of the guest. It ends as soon as the guest refuses.
    pub(super) fn connect_guest(&mut self, port: u32) -> io::Result<UnixStream> {
        if !self.streams {
            return Err(Errno::SOCKTNOSUPPORT.into());
        }
        if !self.has_room() {
            return Err(Errno::MFILE.into());
        }
        let (socket, ours) = UnixStream::pair()?;
        let socket = OwnedFd::from(socket);
        let id = self.new_id();
        self.watch(id, socket.as_fd())?;
        let ports = Ports {
            guest: port,
            host: self.new_host_port(port),
        };
        self.counters.from_host.one();
        let connection = Connection::from_process(socket, ports, self.buffer_size());
        self.insert(id, connection);
        self.remind();
        Ok(ours)
    }

    /// Serves a port of the host: `on_connect` receives the streams that the guest opens to it.
    pub(super) fn listen(&mut self, port: u32, on_connect: Box<dyn FnMut(UnixStream) + Send>) {
        self.listeners.insert(port, OnConnect(on_connect));
    }

    fn log_error(&mut self, what: &'static str, error: &io::Error) {
        if let Some(suppressed) = self.log.permit() {
            tracing::warn!(host = ?self.host, %error, suppressed, "vsock: {what}");
        }
    }
}

/// Whether a guest may have this CID.
pub(super) fn check_cid(cid: u64) -> Result<(), VsockError> {
    if (MIN_GUEST_CID..=MAX_GUEST_CID).contains(&cid) {
        Ok(())
    } else {
        Err(VsockError::GuestCid { cid })
    }
}

const NO_WAIT: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
